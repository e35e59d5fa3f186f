"""Groups a step's rows by expert: assigns blocks of rows to experts, and copies the rows there.

The P = T * k pairs (row, slot) of a routing are counted by expert and numbered in the order of the rows, which gives
each a unique position: first the blocks of expert 0, then those of expert 1, and so on; each expert's last block is
padded. Blocks and positions follow from the routing alone, so they are the same in every run; the host has a bound on
their number (kernels/moe/grouping.py), the device the exact one. Few pairs take one launch, in which every program
counts them; many take three. A pair whose expert another device has (kernels/moe/experts.py, ExpertShare) has position
-1 and is in no block.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    OperandLayout,
    operand_offset,
    padded_cols,
    wgmma_order,
)
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.moe.share import own_number
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.grouping import most_blocks

_MOST_COUNTED = 1024
"""The most pairs that every program of the copy counts itself: this costs about 1 us, a launch more than 2."""

_COUNTED = tl.constexpr(1024)
_NUMBERED = 4096
"""Pairs that a program numbers at a time."""

_WGMMA = tl.constexpr(int(OperandLayout.WGMMA))


@dataclass(frozen=True)
class PairBlocks:
    """The blocks of a step's pairs.

    blocks: int32 [1 + `most`]: the number of blocks, then the expert of each; the rest is undefined. positions: int32
    [P], for pair t * k + s the place of row t for its slot s, `block` places per block. experts: the number of experts
    here. share: which of the layer's experts these are; None: all.
    """

    blocks: Tensor
    positions: Tensor
    block: int
    experts: int
    share: ExpertShare | None = None

    @property
    def first(self) -> int:
        """The number of the first expert in a routing."""
        return 0 if self.share is None else self.share.first

    @property
    def most(self) -> int:
        """The most blocks."""
        return most_blocks(self.positions.shape[0], self.experts, self.block)

    @property
    def rows(self) -> int:
        """The most places."""
        return self.most * self.block


@triton.jit
def _blocks_before(blocks, expert):
    """The number of the first block of `expert`."""
    return tl.sum(tl.where(tl.arange(0, blocks.shape[0]) < expert, blocks, 0), 0)


@DirectLaunch
@triton.jit(do_not_specialize=["first_expert"])
def _count_pairs_kernel(experts_ptr, counts_ptr, pairs, first_expert, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One program per expert: the number of its pairs."""
    launch_then_wait(PDL)
    mine = first_expert + tl.program_id(0)
    count = tl.zeros([CHUNK], tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        count += (tl.load(experts_ptr + pair, mask=pair < pairs, other=-1) == mine).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(count, 0))


@DirectLaunch
@triton.jit(do_not_specialize=["first_expert"])
def _number_pairs_kernel(
    experts_ptr, counts_ptr, blocks_ptr, positions_ptr, rows, first_expert,
    E: tl.constexpr, BINS: tl.constexpr, USED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per expert: its blocks, and the positions of its pairs, found row by row, as rows are fewer."""
    launch_then_wait(PDL)
    mine = tl.program_id(0)
    of_bin = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + of_bin, mask=of_bin < E, other=0, cache_modifier=".cg")
    blocks = (counts + (BLOCK - 1)) // BLOCK
    first = _blocks_before(blocks, mine)
    if mine == 0:
        tl.store(blocks_ptr, tl.sum(blocks, 0))
    slot = tl.arange(0, SLOTS)[None, :]
    before = 0
    for start in range(0, rows, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        pair = row * USED + slot
        inside = (row < rows) & (slot < USED)
        found = tl.load(experts_ptr + pair, mask=inside, other=-1) == first_expert + mine
        one = found.to(tl.int32)
        of_row = tl.sum(one, 1)
        number = (before + tl.cumsum(of_row, 0) - of_row)[:, None] + (tl.cumsum(one, 1) - one)
        tl.store(positions_ptr + pair, first * BLOCK + number, mask=found)
        tl.store(
            blocks_ptr + 1 + first + number // BLOCK, mine + 0 * number, mask=found & (number % BLOCK == 0)
        )
        before += tl.sum(of_row, 0)


@triton.jit
def _number_pair(
    experts_ptr, blocks_ptr, positions_ptr, mine, pairs, first_expert,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """The position of pair number `mine`, of at most COUNTED; the first pair of a block stores the block's expert, and
    pair 0, also where its expert is not here, their number.
    """
    pair = tl.arange(0, COUNTED)
    others = tl.load(experts_ptr + pair, mask=pair < pairs, other=first_expert + E)
    others = own_number(others, first_expert, E, SHARE)
    expert = own_number(tl.load(experts_ptr + mine), first_expert, E, SHARE)
    blocks = (tl.histogram(others, BINS) + (BLOCK - 1)) // BLOCK
    blocks = tl.where(tl.arange(0, BINS) < E, blocks, 0)
    number = tl.sum(((others == expert) & (pair < mine)).to(tl.int32), 0)
    position = _blocks_before(blocks, expert) * BLOCK + number
    here = expert < E
    position = tl.where(here, position, -1)
    tl.store(positions_ptr + mine, position)
    if here & (number % BLOCK == 0):
        tl.store(blocks_ptr + 1 + position // BLOCK, expert)
    if mine == 0:
        tl.store(blocks_ptr, tl.sum(blocks, 0))
    return position


@triton.jit
def _row_part(
    x_ptr, row, column, stride, K, PADDED: tl.constexpr, FROM: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """Columns of a row, zeros from K on; in stored order if both operands have the WGMMA layout."""
    if FROM == LAYOUT and FROM == _WGMMA:  # its columns are whole blocks
        return tl.load(x_ptr + row * stride + column, mask=column < PADDED, other=0.0)
    else:
        return tl.load(x_ptr + operand_offset(row, column, stride, FROM), mask=column < K, other=0.0)


@triton.jit
def _store_part(
    out_ptr, row, column, stride, values, PADDED: tl.constexpr, FROM: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """Stores the result of `_row_part`."""
    if LAYOUT == _WGMMA:
        if FROM != _WGMMA:
            values = wgmma_order(values)
        tl.store(out_ptr + row * stride + column, values, mask=column < PADDED)
    else:
        tl.store(out_ptr + operand_offset(row, column, stride, LAYOUT), values, mask=column < PADDED)


@DirectLaunch
@triton.jit(do_not_specialize=["first_expert"])
def _group_rows_kernel(
    experts_ptr, blocks_ptr, positions_ptr, x_ptr, row_scale_ptr, out_ptr, out_row_scale_ptr, pairs, K, x_stride,
    stride, first_expert,
    E: tl.constexpr, USED: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
    PADDED: tl.constexpr, COLUMNS: tl.constexpr, FROM: tl.constexpr, LAYOUT: tl.constexpr, SHARE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per pair: copies its row from an operand to its position in another, with zeros from column K on.

    COUNTED: at most this many pairs, whose positions are computed here; 0: positions are known.
    """
    launch_then_wait(PDL)
    pair = tl.program_id(0)
    if SHARE:
        away = own_number(tl.load(experts_ptr + pair), first_expert, E, SHARE) == E
        if away:
            tl.store(positions_ptr + pair, -1)
        if away & ((pair > 0) | (COUNTED == 0)):
            return
    row = (pair // USED).to(tl.int64)
    first = _row_part(x_ptr, row, tl.arange(0, COLUMNS), x_stride, K, PADDED, FROM, LAYOUT)
    row_scale = tl.load(row_scale_ptr + row)
    if COUNTED > 0:
        place = _number_pair(
            experts_ptr, blocks_ptr, positions_ptr, pair, pairs, first_expert, E, BINS, BLOCK, COUNTED, SHARE
        )  # fmt: skip
    else:
        place = tl.load(positions_ptr + pair)
    if SHARE and place < 0:
        return
    place = place.to(tl.int64)
    tl.store(out_row_scale_ptr + place, row_scale)
    _store_part(out_ptr, place, tl.arange(0, COLUMNS), stride, first, PADDED, FROM, LAYOUT)
    for start in range(COLUMNS, PADDED, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        values = _row_part(x_ptr, row, column, x_stride, K, PADDED, FROM, LAYOUT)
        _store_part(out_ptr, place, column, stride, values, PADDED, FROM, LAYOUT)


def number_pairs(experts: Tensor, groups: PairBlocks, pdl: bool = False) -> None:
    """Fills in `groups` for a routing's experts, int32 [T, k]. Does not write the positions of pairs whose experts are
    not here."""
    rows, used = experts.shape
    slots = int(triton.next_power_of_2(used))
    counts = torch.empty(groups.experts, dtype=torch.int32, device=experts.device)
    _count_pairs_kernel[(groups.experts,)](
        experts,
        counts,
        experts.numel(),
        groups.first,
        CHUNK=_COUNTED.value,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    _number_pairs_kernel[(groups.experts,)](
        experts, counts, groups.blocks, groups.positions, rows, groups.first,
        E=groups.experts, BINS=bins(groups.experts), USED=used, SLOTS=slots, BLOCK=groups.block,
        ROWS=min(1024, _NUMBERED // slots), PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


def group_rows(
    x: Fp16Operand, cols: int, experts: Tensor, groups: PairBlocks, out: Fp16Operand, pdl: bool = False
) -> None:
    """Fills in `groups` for a routing's experts, int32 [T, k], and copies rows x [T, cols] to their places in
    `out`. Columns are padded to 128 with zeros; padding rows are undefined.
    """
    assert experts.is_contiguous() and experts.dtype == torch.int32 and x.fits(cols)
    pairs, used = experts.numel(), experts.shape[1]
    most = counted(pairs)
    if not most:
        number_pairs(experts, groups, pdl)
    padded = padded_cols(cols)
    _group_rows_kernel[(pairs,)](
        experts, groups.blocks, groups.positions, x.values, x.row_scale, out.values, out.row_scale, pairs, cols,
        x.stride, out.stride, groups.first,
        E=groups.experts, USED=used, BINS=bins(groups.experts), BLOCK=groups.block, COUNTED=most, PADDED=padded,
        COLUMNS=min(2048, int(triton.next_power_of_2(padded))), FROM=int(x.layout), LAYOUT=int(out.layout),
        SHARE=groups.share is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def counted(pairs: int) -> int:
    """Number of pairs that each program of the copy can count: 128, 512 or 1024; 0: programs do not count."""
    return 0 if pairs > _MOST_COUNTED else next(size for size in (128, 512, 1024) if pairs <= size)


def bins(experts: int) -> int:
    """Bins of the histogram of experts, a power of two: one for each, and one for places after the last pair."""
    return max(64, int(triton.next_power_of_2(experts + 1)))
