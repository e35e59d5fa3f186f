"""RMSNorm of few rows and their grouping by expert, in one launch on Hopper: groups.py with rms_norm_wgmma.py.

A program takes a pair (row, slot): it numbers the pair among those of its expert, norms the row and stores it at its
place. A row is normed once per expert that is here, which costs less than a launch. Blocks, positions and rows are
bit-identical to those of the two launches.
"""

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.moe.groups import PairBlocks, bins, counted
from quengine.kernels.cuda.moe.share import own_number
from quengine.kernels.cuda.rms_norm_wgmma import normed_row, row_columns, row_geometry, store_wgmma_layout
from quengine.kernels.rms_norm import RMSNorm


@gluon.jit
def _number_pair(
    experts_ptr, blocks_ptr, positions_ptr, mine, pairs, first_expert,
    E: gl.constexpr, BINS: gl.constexpr, BLOCK: gl.constexpr, COUNTED: gl.constexpr, SHARE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """`_number_pair` of groups.py: the position of pair number `mine`, of at most COUNTED."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pair = gl.arange(0, COUNTED, layout=LINE)
    expert = own_number(gl.load(experts_ptr + mine), first_expert, E, SHARE)
    others = gl.load(experts_ptr + pair, mask=pair < pairs, other=first_expert + E)
    others = own_number(others, first_expert, E, SHARE)
    number = gl.sum(((others == expert) & (pair < mine)).to(gl.int32), 0)
    of_bin = gl.arange(0, BINS, layout=LINE)
    blocks = (gl.histogram(others, BINS, layout=LINE) + (BLOCK - 1)) // BLOCK
    blocks = gl.where(of_bin < E, blocks, 0)
    position = gl.sum(gl.where(of_bin < expert, blocks, 0), 0) * BLOCK + number
    here = expert < E
    position = gl.where(here, position, -1)
    gl.store(positions_ptr + mine, position)
    if here & (number % BLOCK == 0):
        gl.store(blocks_ptr + 1 + position // BLOCK, expert)
    if mine == 0:
        gl.store(blocks_ptr, gl.sum(blocks, 0))
    return position


@DirectLaunch
@gluon.jit(do_not_specialize=["pairs", "first_expert"])
def _group_normed_kernel(
    experts_ptr, blocks_ptr, positions_ptr, x_ptr, norm_ptr, out_ptr, out_row_scale_ptr, pairs, x_stride, eps,
    first_expert,
    E: gl.constexpr, USED: gl.constexpr, BINS: gl.constexpr, BLOCK: gl.constexpr, COUNTED: gl.constexpr,
    WIDTH: gl.constexpr, BLOCKS: gl.constexpr, PADDED: gl.constexpr, WARPS: gl.constexpr, SHARE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = gl.program_id(0)
    column = row_columns(PADDED, WARPS)
    live = column < WIDTH
    norm = gl.load(norm_ptr + column, mask=live, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if SHARE:
        away = own_number(gl.load(experts_ptr + pair), first_expert, E, SHARE) == E
        if away:
            gl.store(positions_ptr + pair, -1)
        if away & (pair > 0):
            return
    x = gl.load(x_ptr + (pair // USED).to(gl.int64) * x_stride + column, mask=live, other=0.0)
    place = _number_pair(
        experts_ptr, blocks_ptr, positions_ptr, pair, pairs, first_expert, E, BINS, BLOCK, COUNTED, SHARE, WARPS
    )  # fmt: skip
    if SHARE and place < 0:
        return
    y, row_scale = normed_row(x, norm, eps, WIDTH, PADDED)
    gl.store(out_row_scale_ptr + place, row_scale)
    store_wgmma_layout(out_ptr + place.to(gl.int64) * (BLOCKS * 128), y, BLOCKS, WARPS)


def group_normed_rows(
    x: Tensor, norm: RMSNorm, experts: Tensor, groups: PairBlocks, out: Fp16Operand, pdl: bool = False
) -> None:
    """Fills in `groups` for a routing's experts, int32 [T, k], and stores the norm of rows x fp32 [T, D] at
    their places in `out`, in the WGMMA layout. Columns are padded to 128 with zeros; padding rows are
    undefined. `counted` limits the number of pairs.
    """
    pairs, used = experts.numel(), experts.shape[1]
    assert out.is_wgmma and out.fits(x.shape[1]) and counted(pairs) and experts.is_contiguous()
    blocks, padded, warps = row_geometry(x.shape[1])
    _group_normed_kernel[(pairs,)](
        experts, groups.blocks, groups.positions, x, norm.weight, out.values, out.row_scale, pairs, x.stride(0),
        norm.eps, groups.first, E=groups.experts, USED=used, BINS=bins(groups.experts), BLOCK=groups.block,
        COUNTED=counted(pairs), WIDTH=x.shape[1], BLOCKS=blocks, PADDED=padded, WARPS=warps,
        SHARE=groups.share is not None, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
