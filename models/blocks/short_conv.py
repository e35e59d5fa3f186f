"""The gated short convolution (LFM2), declared.

`in_proj` gives each position three vectors b, c and x of `channels`; u = b * x goes through a causal depthwise
convolution over the last `taps` positions, and y = c * conv(u) through `out_proj`. Source: `Lfm2ShortConv`
in the `transformers` library; "LFM2 Technical Report", Liquid AI 2025, section 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quengine.kernels.kv.cache_types import CONV_HISTORY
from quengine.models.blocks.block import NORM, Axis, Cut, Mixer, SlotState, TensorSpec


@dataclass(frozen=True)
class ShortConv(Mixer):
    """width: of the residual stream. channels: the convolution's channels on this rank. taps: positions that the
    convolution reads, the token's own included. partial: each rank has some of the channels."""

    width: int
    channels: int
    taps: int
    partial: bool = False
    kind = "short convolution"

    @property
    def state(self) -> SlotState:
        """u of the last positions."""
        return SlotState(((CONV_HISTORY, self.channels),), rewinds=CONV_HISTORY - self.taps)

    def tensors(self) -> Mapping[str, TensorSpec]:
        channels: tuple[Axis, ...] = ("channels",)
        three = Cut("rows", channels * 3)
        return {
            "attn_norm.weight": TensorSpec((self.width,), hf="input_layernorm.weight", draw=NORM),
            "shortconv.in_proj.weight": TensorSpec(
                (3 * self.channels, self.width), three, "conv.in_proj.weight"
            ),
            "shortconv.conv.weight": TensorSpec(
                (self.channels, self.taps), Cut("rows", channels), "conv.conv.weight"
            ),
            "shortconv.out_proj.weight": TensorSpec(
                (self.width, self.channels), Cut("columns", channels), "conv.out_proj.weight"
            ),
        }
