"""What the programs of the grouped matmuls share: which block of rows and which weights a program takes.

Rows of x are in blocks of one expert each (groups.py). Weights are those of all experts, an expert's tiles side by side
(expert_weights.py), so that a block's weights are a part's planes from the expert's first tile on.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.glu import BIAS, BIASED_SWISH, EPILOGUES, ROWS
from quengine.kernels.glu import Activation

SIDE = tl.constexpr(8)
"""Blocks of rows that run side by side over all weights: of one expert, they read the same weights from the L2 cache,
and those of different experts read rows that it holds."""


UNBOUNDED = 2.0**126
"""A bound on products that bounds nothing (glu.product_scales): with biases, a clamped activation has its clamp
alone."""


class Blocks(NamedTuple):
    """The blocks of rows that a launch takes: those from number `first` up to `end` of `of_block` (Groups.blocks).

    early: what is in `of_block` was written before the launch in front began, so that programs may read it, and the
    first weights, before that has ended.
    """

    of_block: Tensor
    rows: int
    first: int
    end: int
    early: bool

    def grid(self, weight_blocks: int) -> tuple[int, ...]:
        return (-(-(self.end - self.first) // SIDE.value) * SIDE.value * weight_blocks,)


class GroupedOutput(NamedTuple):
    """Where products go, fp32 [places, N]: into columns first .. of `out`, with those of bias [E, N] added. With an
    `activation` the values of gated units, fp16 in the layout of the rows that are multiplied, and their scales."""

    out: Tensor
    first: int
    bias: Tensor | None
    activation: Activation | None = None
    row_scale: Tensor | None = None

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """`out` and the row scales, or a pointer in their place that is not used."""
        return self.out, self.out if self.row_scale is None else self.row_scale

    @property
    def epilogue(self) -> int:
        """Of products, or of a gated unit, which takes a bias where it clamps: a number of glu.py."""
        if self.activation is None:
            return int((ROWS if self.bias is None else BIAS).value)
        assert self.bias is None or self.activation == "clamped_swish"
        return EPILOGUES[self.activation] if self.bias is None else int(BIASED_SWISH.value)


@triton.jit
def scheduled(number, weight_blocks):
    """The block of rows and the block of weights of program `number`."""
    together = weight_blocks * SIDE
    inside = number % together
    return number // together * SIDE + inside % SIDE, inside // SIDE


@triton.jit
def expert_of(blocks_ptr, block, end):
    """The expert of a block of rows, -1 where there is no such block or it is not below `end`."""
    # Blocks.early: not from what this multiprocessor's cache may hold of an earlier layer's. One load beside the other.
    expert = tl.load(blocks_ptr + 1 + block, mask=block < end, other=-1, cache_modifier=".cg")
    return tl.where(block < tl.load(blocks_ptr, cache_modifier=".cg"), expert, -1)


@triton.jit
def expert_planes(low, high, scales, supers, expert, tiles, P: tl.constexpr):
    """The planes of an expert with so many tiles, from those of all experts."""
    first = expert.to(tl.int64) * (tiles * P.chunks)
    low_bytes: tl.constexpr = P.layout.low_bytes
    high_bytes: tl.constexpr = P.layout.high_bytes
    scale_bytes: tl.constexpr = P.layout.scale_bytes
    super_bytes: tl.constexpr = P.layout.super_bytes
    return (
        low + first * low_bytes,
        high + first * high_bytes,
        scales + first * scale_bytes,
        supers + first * super_bytes,
    )
