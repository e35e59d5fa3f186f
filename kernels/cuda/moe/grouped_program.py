"""Device functions shared by the grouped matmuls: the block of rows and the weights of a program.

Rows of x are in blocks of one expert each (groups.py). Weights are those of all experts, an expert's tiles adjacent
(expert_weights.py), so a block's weights are a part's planes from the expert's first tile on.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.glu import BIAS, BIASED_SWISH, EPILOGUES, ROWS
from quengine.kernels.glu import Activation

SIDE = tl.constexpr(8)
"""Blocks of rows scheduled together over all weights: those of one expert share weights in the L2 cache,
those of different experts share it for their rows.
"""


UNBOUNDED = 2.0**126
"""A bound for glu.product_scales that bounds nothing: with biases, a clamped activation is bounded by its
clamp alone.
"""


class Blocks(NamedTuple):
    """The blocks of `rows` rows of a launch: numbers `first` to `end` - 1 in `of_block` (PairBlocks.blocks).

    early: `of_block` was written before the previous launch started, so programs may read it, and the first weights,
    before that launch has ended.
    """

    of_block: Tensor
    rows: int
    first: int
    end: int
    early: bool

    def grid(self, weight_blocks: int) -> tuple[int, ...]:
        return (-(-(self.end - self.first) // SIDE.value) * SIDE.value * weight_blocks,)


class GroupedOutput(NamedTuple):
    """The destination of products, fp32 [places, N]: `out` from column `first` on, plus bias [E, N]. With an
    `activation`, it takes gated units instead, fp16 in the layout of the input rows, and their row scales.
    """

    out: Tensor
    first: int
    bias: Tensor | None
    activation: Activation | None = None
    row_scale: Tensor | None = None

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """`out` and the row scales, or an unused pointer in their place."""
        return self.out, self.out if self.row_scale is None else self.row_scale

    @property
    def epilogue(self) -> int:
        """The epilogue (a number of glu.py): products, or a gated unit, which may have a bias if it clamps."""
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
    """The expert of a block of rows; -1 if the block does not exist or is not below `end`."""
    # .cg for Blocks.early: L1 may hold values of an earlier layer. The two loads are independent.
    expert = tl.load(blocks_ptr + 1 + block, mask=block < end, other=-1, cache_modifier=".cg")
    return tl.where(block < tl.load(blocks_ptr, cache_modifier=".cg"), expert, -1)


@triton.jit
def expert_planes(low, high, scales, supers, expert, tiles, P: tl.constexpr):
    """The planes of an expert of `tiles` tiles, from those of all experts."""
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
