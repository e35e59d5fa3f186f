"""The gated delta net (Qwen3-Next, Qwen3.5), declared.

One projection gives queries, keys and values, which go through a causal depthwise convolution; a second gives a gate z
for each value, two more give beta (the strength of an update) and alpha (the decay) of each value head. Each value head
keeps a matrix, whose products with queries are normalized, gated and projected back (kernels/gated_delta.py). Source:
`Qwen3NextGatedDeltaNet` in the `transformers` library; llama.cpp's converter for the names and orders of GGUF files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quengine.models.blocks.block import BIAS, NORM, Axis, Cut, Mixer, Shape, SlotState, TensorSpec, Uniform

_HF = "linear_attn"
"""The module in a Hugging Face layer."""

_OF_VALUE_HEADS: Mapping[str, tuple[bool, int, Literal["rows", "columns"]]] = {
    "attn_qkv.weight": (True, 0, "rows"),
    "ssm_conv1d.weight": (True, 0, "rows"),
    "attn_gate.weight": (False, 0, "rows"),
    "ssm_beta.weight": (False, 1, "rows"),
    "ssm_alpha.weight": (False, 1, "rows"),
    "ssm_dt.bias": (False, 1, "columns"),
    "ssm_a": (False, 1, "columns"),
    "ssm_out.weight": (False, 0, "columns"),
}
"""Tensors that have a part for each value head: (whether queries and keys come before these parts, elements of a part,
or 0 for `head_dim`, the side that the parts follow one another along)."""

_DECAY = Uniform(-1.0, -0.02)
"""Draws for synthetic models: negative, so that a head's memory fades."""


@dataclass(frozen=True)
class GatedDeltaSizes:
    """The sizes of a gated delta net.

    head_dim: of queries, keys and values. taps: positions that the convolution reads, the token's own included. tiled:
    the order of value heads, see GatedDeltaSpec. by_key_head: one tensor has the rows of beta and alpha, key head by
    key head.
    """

    key_heads: int
    value_heads: int
    head_dim: int
    taps: int
    tiled: bool
    by_key_head: bool = False

    @property
    def ratio(self) -> int:
        """Value heads that read the same key head."""
        return self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values

    def tiled_order(self, tensor: str) -> tuple[list[int], Literal["rows", "columns"]] | None:
        """The order in which a GGUF file with tiled value heads has the rows or columns of a folder's `tensor`, and
        which of the two are reordered; None: the order is the same."""
        first, elements, along = _OF_VALUE_HEADS.get(tensor, (False, 0, "rows"))
        if self.by_key_head or tensor not in _OF_VALUE_HEADS or self.ratio == 1:
            return None
        begin, width = 2 * self.keys if first else 0, elements or self.head_dim
        heads = [
            head % self.key_heads * self.ratio + head // self.key_heads for head in range(self.value_heads)
        ]
        values = [begin + head * width + element for head in heads for element in range(width)]
        return [*range(begin), *values], along

    def rows_of_qkvz(self) -> list[list[int]]:
        """The rows of q, k, v and z in a matrix that holds the rows of all four key head by key head."""
        wide = self.ratio * self.head_dim
        return _rows_by_part((self.head_dim, self.head_dim, wide, wide), self.key_heads)

    def rows_of_ba(self) -> list[list[int]]:
        """The rows of beta and alpha in a matrix that holds both key head by key head."""
        return _rows_by_part((self.ratio, self.ratio), self.key_heads)


def _rows_by_part(parts: tuple[int, ...], heads: int) -> list[list[int]]:
    """The rows of each part in a matrix that holds, head after head, `parts` rows of the head's parts."""
    every, first, found = sum(parts), 0, []
    for part in parts:
        found.append([every * head + first + row for head in range(heads) for row in range(part)])
        first += part
    return found


@dataclass(frozen=True)
class GatedDelta(Mixer):
    """width: of the residual stream. sizes: this rank's. partial: each rank has some of the key heads, and the value
    heads that read them."""

    width: int
    sizes: GatedDeltaSizes
    partial: bool = False
    kind = "gated delta net"

    @property
    def state(self) -> SlotState:
        """History and memory (kernels/gated_delta.py). The history has a row for the newest position too: writing that
        row overwrites none that the convolution reads."""
        sizes, values = self.sizes, self._of_value_heads(1)
        shapes = (sizes.taps, sizes.channels), (sizes.value_heads, sizes.head_dim, sizes.head_dim)
        return SlotState(shapes, sections=((1, 1, *values), values))

    def tensors(self) -> Mapping[str, TensorSpec]:
        sizes, width = self.sizes, self.width
        channels = (sizes.head_dim, sizes.head_dim, *self._of_value_heads(sizes.head_dim))
        values, heads = self._of_value_heads(sizes.head_dim), self._of_value_heads(1)
        return {
            "attn_norm.weight": TensorSpec((width,), hf="input_layernorm.weight", draw=NORM),
            "attn_qkv.weight": TensorSpec(
                (sizes.channels, width), _cut("rows", channels), f"{_HF}.in_proj_qkv.weight"
            ),
            "attn_gate.weight": TensorSpec(
                (sizes.values, width), _cut("rows", values), f"{_HF}.in_proj_z.weight"
            ),
            **self._gates(),
            "ssm_conv1d.weight": TensorSpec(
                (sizes.channels, sizes.taps), _cut("rows", channels), f"{_HF}.conv1d.weight"
            ),
            "ssm_dt.bias": TensorSpec(
                (sizes.value_heads,), _cut("columns", heads), f"{_HF}.dt_bias", draw=BIAS
            ),
            "ssm_a": TensorSpec((sizes.value_heads,), _cut("columns", heads), f"{_HF}.A_log", draw=_DECAY),
            "ssm_norm.weight": TensorSpec((sizes.head_dim,), hf=f"{_HF}.norm.weight", draw=NORM),
            "ssm_out.weight": TensorSpec(
                (width, sizes.values), _cut("columns", values), f"{_HF}.out_proj.weight"
            ),
        }

    def joined(self) -> Mapping[str, TensorSpec]:
        """The tensor of Qwen3-Next's first GGUF files that holds the rows of attn_qkv and attn_gate, key head by key
        head."""
        if not self.sizes.by_key_head:
            return {}
        rows = 2 * (self.sizes.keys + self.sizes.values)
        cut = _cut("rows", (rows // self.sizes.key_heads,))
        return {"ssm_in.weight": TensorSpec((rows, self.width), cut, f"{_HF}.in_proj_qkvz.weight")}

    def _gates(self) -> dict[str, TensorSpec]:
        """The matrices of beta and alpha."""
        heads = self.sizes.value_heads
        if self.sizes.by_key_head:
            of_key_head = 2 * self.sizes.ratio
            cut, hf = _cut("rows", (of_key_head,)), f"{_HF}.in_proj_ba.weight"
            return {"ssm_ba.weight": TensorSpec((2 * heads, self.width), cut, hf)}
        cut = _cut("rows", self._of_value_heads(1))
        return {
            f"ssm_{name}.weight": TensorSpec((heads, self.width), cut, f"{_HF}.in_proj_{name[0]}.weight")
            for name in ("beta", "alpha")
        }

    def _of_value_heads(self, elements: int) -> Shape:
        """Rows or columns per key head, by part, of a tensor with `elements` rows or columns for each value head."""
        ratio = self.sizes.ratio
        return (elements,) * ratio if self.sizes.tiled else (ratio * elements,)


def _cut(along: Literal["rows", "columns"], units: Shape) -> Cut:
    axes: tuple[Axis, ...] = tuple("key_heads" for _ in units)
    return Cut(along, axes, units=units)
