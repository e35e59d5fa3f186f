"""RMSNorm of few rows and their grouping by expert, in one launch on Hopper: groups.py with rms_norm_wgmma.py.

A program takes a row for one or several of its experts: it numbers each pair (row, slot) among those of its expert,
norms the row and stores it at the pairs' places. Norming a row once or a few times costs less than a launch. Blocks,
positions and rows are bit-identical to those of the two launches.
"""

from functools import lru_cache

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.moe.groups import PairBlocks, bins, counted
from quengine.kernels.cuda.rms_norm_wgmma import normed_row, row_columns, row_geometry, store_wgmma_layout
from quengine.kernels.rms_norm import RMSNorm

_MOST_PROGRAMS = 256
"""Programs that one launch takes: two for a multiprocessor."""


@gluon.jit
def _number_pairs(
    experts_ptr, blocks_ptr, positions_ptr, mine, pairs,
    SLOTS: gl.constexpr, E: gl.constexpr, BINS: gl.constexpr, BLOCK: gl.constexpr, COUNTED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """`_number_pair` of groups.py for SLOTS pairs, from number `mine` on, of at most COUNTED: their positions."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pair = gl.arange(0, COUNTED, layout=LINE)
    others = gl.load(experts_ptr + pair, mask=pair < pairs, other=E)
    of_bin = gl.arange(0, BINS, layout=LINE)
    blocks = (gl.histogram(others, BINS, layout=LINE) + (BLOCK - 1)) // BLOCK
    blocks = gl.where(of_bin < E, blocks, 0)
    positions = ()
    for slot in gl.static_range(SLOTS):
        expert = gl.load(experts_ptr + mine + slot)
        number = gl.sum(((others == expert) & (pair < mine + slot)).to(gl.int32), 0)
        position = gl.sum(gl.where(of_bin < expert, blocks, 0), 0) * BLOCK + number
        gl.store(positions_ptr + mine + slot, position)
        if number % BLOCK == 0:
            gl.store(blocks_ptr + 1 + position // BLOCK, expert)
        positions = positions + (position,)
    if mine == 0:
        gl.store(blocks_ptr, gl.sum(blocks, 0))
    return positions


@DirectLaunch
@gluon.jit(do_not_specialize=["pairs"])
def _group_normed_kernel(
    experts_ptr, blocks_ptr, positions_ptr, x_ptr, norm_ptr, out_ptr, out_row_scale_ptr, pairs, x_stride, eps,
    E: gl.constexpr, USED: gl.constexpr, SLOTS: gl.constexpr, BINS: gl.constexpr, BLOCK: gl.constexpr,
    COUNTED: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, PADDED: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = gl.program_id(0) * SLOTS
    column = row_columns(PADDED, WARPS)
    live = column < WIDTH
    norm = gl.load(norm_ptr + column, mask=live, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = gl.load(x_ptr + (pair // USED).to(gl.int64) * x_stride + column, mask=live, other=0.0)
    places = _number_pairs(
        experts_ptr, blocks_ptr, positions_ptr, pair, pairs, SLOTS, E, BINS, BLOCK, COUNTED, WARPS
    )
    y, row_scale = normed_row(x, norm, eps, WIDTH, PADDED)
    for slot in gl.static_range(SLOTS):
        gl.store(out_row_scale_ptr + places[slot], row_scale)
        store_wgmma_layout(out_ptr + places[slot].to(gl.int64) * (BLOCKS * 128), y, BLOCKS, WARPS)


@lru_cache(1024)
def slots_together(rows: int, used: int) -> int:
    """Pairs of a row that a program takes, a divisor of `used`; 0 if the pairs are too many for it to count."""
    fits = (
        slots for slots in range(1, used + 1) if used % slots == 0 and rows * used <= _MOST_PROGRAMS * slots
    )
    return next(fits, 0) if counted(rows * used) else 0


def group_normed_rows(
    x: Tensor, norm: RMSNorm, experts: Tensor, groups: PairBlocks, out: Fp16Operand, pdl: bool = False
) -> None:
    """Fills in `groups` for a routing's experts, int32 [T, k], and stores the norm of rows x fp32 [T, D] at
    their places in `out`, in the WGMMA layout. Columns are padded to 128 with zeros; padding rows are
    undefined. The most rows are those of `slots_together`.
    """
    pairs, used = experts.numel(), experts.shape[1]
    slots = slots_together(*experts.shape)
    assert out.is_wgmma and out.fits(x.shape[1]) and slots and experts.is_contiguous()
    blocks, padded, warps = row_geometry(x.shape[1])
    _group_normed_kernel[(pairs // slots,)](
        experts, groups.blocks, groups.positions, x, norm.weight, out.values, out.row_scale, pairs, x.stride(0),
        norm.eps, E=groups.experts, USED=used, SLOTS=slots, BINS=bins(groups.experts), BLOCK=groups.block,
        COUNTED=counted(pairs), WIDTH=x.shape[1], BLOCKS=blocks, PADDED=padded, WARPS=warps, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
