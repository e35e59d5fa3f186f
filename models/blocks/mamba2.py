"""Mamba2's state space layer (Nemotron-H, Granite 4.0-H), declared.

One projection gives a gate, the channels x, B and C, which go through a causal depthwise convolution, and a time step
dt for each head. Each head keeps a matrix, whose products with C are gated, normalized by group and
projected back (kernels/mamba2.py). Source: `NemotronHMamba2Mixer` and `GraniteMoeHybridMambaLayer` in the
`transformers` library; llama.cpp's converter for the names and shapes of GGUF files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from quengine.models.blocks.block import BIAS, NORM, Axis, Cut, Mixer, Shape, SlotState, TensorSpec, Uniform

_HF = "mamba"
"""The module in a Hugging Face layer."""

_DECAY, _STEP = Uniform(-1.0, -0.02), Uniform(-3.0, 0.0)
"""Draws for synthetic models. The decay is negative, so that a head's memory fades; time steps are mostly below 1."""


@dataclass(frozen=True)
class Mamba2Sizes:
    """The sizes of a Mamba2 layer.

    head_dim: elements of x in a head. groups: the groups of B and C, each read by the same number of heads, and of the
    norm. state_dim: elements of B and of C in a group. taps: positions that the convolution reads, the token's own
    included. eps: that of the norm. conv_bias: the convolution has a bias. step_limits: least and largest time step.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    eps: float
    conv_bias: bool = True
    step_limits: tuple[float, float] = (0.0, inf)

    @property
    def inner(self) -> int:
        """Elements of x, and of the gate."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def rows(self) -> int:
        """Rows of the projection to gate, channels and time steps."""
        return self.inner + self.channels + self.heads


@dataclass(frozen=True)
class Mamba2(Mixer):
    """width: of the residual stream. sizes: this rank's. partial: each rank has some of the groups, and the heads that
    read them."""

    width: int
    sizes: Mamba2Sizes
    partial: bool = False
    kind = "Mamba2"

    @property
    def state(self) -> SlotState:
        """History and memory (kernels/mamba2.py). The history has a row for the newest position too: writing that row
        overwrites none that the convolution reads."""
        sizes = self.sizes
        shapes = (sizes.taps, sizes.channels), (sizes.heads, sizes.head_dim, sizes.state_dim)
        ratio = sizes.heads // sizes.groups * sizes.head_dim
        return SlotState(shapes, sections=((ratio, sizes.state_dim, sizes.state_dim), (1,)))

    def tensors(self) -> Mapping[str, TensorSpec]:
        sizes, width, heads, hf = self.sizes, self.width, self.sizes.heads, _HF
        ratio = heads // sizes.groups
        values = ratio * sizes.head_dim
        channels = (values, sizes.state_dim, sizes.state_dim)
        rows, of_heads = _cut("rows", channels), _cut("rows", (ratio,))
        found = {
            "attn_norm.weight": TensorSpec((width,), hf="input_layernorm.weight", draw=NORM),
            "ssm_in.weight": TensorSpec(
                (sizes.rows, width), _cut("rows", (values, *channels, ratio)), f"{hf}.in_proj.weight"
            ),
            "ssm_conv1d.weight": TensorSpec((sizes.channels, sizes.taps), rows, f"{hf}.conv1d.weight"),
            "ssm_conv1d.bias": TensorSpec(
                (sizes.channels,), _cut("columns", channels), f"{hf}.conv1d.bias", draw=BIAS
            ),
            "ssm_dt.bias": TensorSpec((heads,), _cut("columns", (ratio,)), f"{hf}.dt_bias", draw=_STEP),
            "ssm_a": TensorSpec((heads, 1), of_heads, f"{hf}.A_log", hf_shape=(heads,), draw=_DECAY),
            "ssm_d": TensorSpec((heads, 1), of_heads, f"{hf}.D", hf_shape=(heads,), draw=BIAS),
            "ssm_norm.weight": TensorSpec(
                (sizes.groups, sizes.inner // sizes.groups),
                _cut("rows", (1,)),
                f"{hf}.norm.weight",
                hf_shape=(sizes.inner,),
                draw=NORM,
            ),
            "ssm_out.weight": TensorSpec(
                (width, sizes.inner), _cut("columns", (values,)), f"{hf}.out_proj.weight"
            ),
        }
        if not sizes.conv_bias:
            del found["ssm_conv1d.bias"]
        return found


def _cut(along: Literal["rows", "columns"], units: Shape) -> Cut:
    """units: rows or columns of a group in each part."""
    axes: tuple[Axis, ...] = tuple("groups" for _ in units)
    return Cut(along, axes, units=units)
