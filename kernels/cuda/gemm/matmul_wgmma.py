"""Matmul of any number of rows with packed weights, on Hopper's warp-group matrix instruction (wgmma).

As in matmul_fused.py, weights are read packed and dequantized to fp16 in registers, here as wgmma's left operand; the
rows, the right operand, are staged in shared memory by TMA, a few sets of 128 or 256 columns ahead, so that all warps
of a program share them and no register waits for them. The stored order of the weights fixes which columns meet in an
instruction; rows are in the WGMMA layout (fp16_operand.py).

Programs take 16 weight rows per warp and up to 128 rows of x; where there are too few such programs, `splits` of them
share the columns (split-K, wgmma_program.py), and a matrix of two parts is one launch. More than 128 rows are cut into
blocks of 128 or 256. A program takes all columns of a block, except that the blocks after the last full wave are
shared by several programs (weights/many_rows.py). In batch-invariant mode, where sums must match those of few rows, a
program computes the splits one after another and adds them in the same order.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemm.matmul_fused import MatmulMode, SplitScratch
from quengine.kernels.cuda.gemm.wgmma_loop import multiply
from quengine.kernels.cuda.gemm.wgmma_plan import MOST_WAITING, WgmmaFlags, wgmma_plan, wgmma_plan_two_parts
from quengine.kernels.cuda.gemm.wgmma_program import (
    allocate_stages,
    begin_block,
    consumer_group,
    few_rows_program,
    finish_share,
    producer_warp,
    share_of,
    wgmma_matrix,
)
from quengine.kernels.cuda.gemm.wgmma_store import WgmmaOutput
from quengine.kernels.cuda.glu import EPILOGUES, ROWS, epilogue_adding, product_bound
from quengine.kernels.cuda.launch.gpu import runs_together
from quengine.kernels.cuda.launch.kernel import Copied, DirectLaunch
from quengine.kernels.cuda.weights.geometry import WgmmaGeometry
from quengine.kernels.cuda.weights.launch_table import MOST_FEW, wgmma_geometry
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.glu import Activation

STAGED = gl.NVMMASharedLayout(128, 16, 2)


@partial(DirectLaunch, layout=STAGED)
@gluon.jit(do_not_specialize=["T"])  # any number of rows up to a block runs the same code
def _wgmma_kernel(
    low, high, scales, supers, x_rows, row_scale_ptr, residual_ptr, out_ptr, out_row_scale_ptr, partial_ptr,
    arrivals_ptr, tiles, rows, first, N, T, weight_scale, bound, P: gl.constexpr,
):  # fmt: skip
    """Grid: (splits of the columns, blocks of weight rows). Up to P.block rows of x."""
    if P.flags.pdl and not P.flags.producer:
        tl.extra.cuda.gdc_launch_dependents()
    block = gl.program_id(1)
    matrix = wgmma_matrix((low, high, scales, supers), tiles, rows, weight_scale, P)
    output = WgmmaOutput(row_scale_ptr, residual_ptr, out_ptr, out_row_scale_ptr, first, N, T, bound)
    few_rows_program(
        matrix, x_rows, output, partial_ptr, arrivals_ptr, block, gl.program_id(0), block, gl.num_programs(1), P
    )  # fmt: skip


@partial(DirectLaunch, layout=STAGED)
@gluon.jit(do_not_specialize=["T"])
def _wgmma_two_parts_kernel(
    low, high, scales, supers, x_rows, row_scale_ptr, out_ptr, partial_ptr, arrivals_ptr, tiles, rows, N, T,
    weight_scale, low_2, high_2, scales_2, supers_2, tiles_2, rows_2, weight_scale_2,
    P: gl.constexpr, P_2: gl.constexpr,
):  # fmt: skip
    """`_wgmma_kernel` for two parts of one matrix with different types: the blocks of one after those of the other."""
    if P.flags.pdl and not P.flags.producer:
        tl.extra.cuda.gdc_launch_dependents()
    place = gl.program_id(1)
    blocks = (tiles + P.warps - 1) // P.warps
    if place < blocks:
        matrix = wgmma_matrix((low, high, scales, supers), tiles, rows, weight_scale, P)
        output = WgmmaOutput(row_scale_ptr, out_ptr, out_ptr, out_ptr, 0, N, T, 0.0)
        few_rows_program(
            matrix, x_rows, output, partial_ptr, arrivals_ptr, place, gl.program_id(0), place, gl.num_programs(1), P
        )  # fmt: skip
    else:
        matrix_2 = wgmma_matrix((low_2, high_2, scales_2, supers_2), tiles_2, rows_2, weight_scale_2, P_2)
        output_2 = WgmmaOutput(row_scale_ptr, out_ptr, out_ptr, out_ptr, rows, N, T, 0.0)
        few_rows_program(
            matrix_2, x_rows, output_2, partial_ptr, arrivals_ptr, place - blocks, gl.program_id(0), place,
            gl.num_programs(1), P_2,
        )  # fmt: skip


@partial(DirectLaunch, layout=STAGED)
@gluon.jit(do_not_specialize=["T", "whole", "splits", "split_chunks"])
def _wgmma_blocks_kernel(
    low, high, scales, supers, x_rows, row_scale_ptr, residual_ptr, out_ptr, out_row_scale_ptr, partial_ptr,
    arrivals_ptr, whole, splits, split_chunks, tiles, rows, first, N, T, weight_scale, bound, P: gl.constexpr,
):  # fmt: skip
    """Grid: one program for each of the first `whole` blocks of weight rows by rows of x, `splits` programs
    for each of the others, with `split_chunks` chunks of the columns. Or all blocks are whole, computed in
    P.splits splits in turn.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [P.warps, 1], [16, P.block, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    if P.flags.pdl and not P.flags.producer:
        tl.extra.cuda.gdc_launch_dependents()
    share = share_of(gl.program_id(0), whole, splits, split_chunks, tiles, T, P.warps, P)
    matrix = wgmma_matrix((low, high, scales, supers), tiles, rows, weight_scale, P)
    output = WgmmaOutput(row_scale_ptr, residual_ptr, out_ptr, out_row_scale_ptr, first, N, T, bound)
    words, stages, ready, tile, lane = begin_block(
        matrix, x_rows, share.block, share.begin, share.end, share.token0, P
    )
    if P.splits == 1:
        acc, words = multiply(
            matrix.planes, words, x_rows, stages, ready, tile, lane, share.begin, share.begin, share.end, share.end,
            share.token0, weight_scale, P, MMA, A,
        )  # fmt: skip
    else:
        WARPS: gl.constexpr = P.warps
        TB: gl.constexpr = P.block
        acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
        for split in range(P.splits):
            last = gl.minimum((split + 1) * P.split_chunks, P.chunks)
            one, words = multiply(
                matrix.planes, words, x_rows, stages, ready, tile, lane, 0, split * P.split_chunks, last, P.chunks,
                share.token0, weight_scale, P, MMA, A,
            )  # fmt: skip
            acc += one
    if P.flags.pdl and P.flags.consumer:
        tl.extra.cuda.gdc_wait()
    finish_share(
        acc, share, share.block, share.place, share.places, output, rows, weight_scale, partial_ptr, arrivals_ptr,
        MMA, P,
    )  # fmt: skip


@partial(DirectLaunch, layout=STAGED)
@gluon.jit(do_not_specialize=["T", "whole", "splits", "split_chunks"])
def _wgmma_groups_kernel(
    low, high, scales, supers, x_rows, row_scale_ptr, residual_ptr, out_ptr, out_row_scale_ptr, partial_ptr,
    arrivals_ptr, whole, splits, split_chunks, tiles, rows, first, N, T, weight_scale, bound, P: gl.constexpr,
):  # fmt: skip
    """`_wgmma_blocks_kernel` for two warp groups of P.warps warps each and a producer warp: one group
    multiplies while the other dequantizes.
    """
    if P.flags.pdl and not P.flags.producer:
        tl.extra.cuda.gdc_launch_dependents()
    stages, ready = allocate_stages(x_rows, P)
    free = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = P.stages
    for i in gl.static_range(STAGES):
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    share = share_of(gl.program_id(0), whole, splits, split_chunks, tiles, T, 2 * P.warps, P)
    matrix = wgmma_matrix((low, high, scales, supers), tiles, rows, weight_scale, P)
    output = WgmmaOutput(row_scale_ptr, residual_ptr, out_ptr, out_row_scale_ptr, first, N, T, bound)
    # Written out, as values taken from a variable would no longer be constexpr.
    gl.warp_specialize(
        [
            (consumer_group, (0, matrix, output, share, stages, ready, free, partial_ptr, arrivals_ptr, P)),
            (consumer_group, (1, matrix, output, share, stages, ready, free, partial_ptr, arrivals_ptr, P)),
            (producer_warp, (x_rows, share, stages, ready, free, P)),
        ],
        [4, 1],
        [232, 40],
    )


def subnormal_weight_scale(part: PackedPart) -> float:
    """The weight scale for codes read as subnormal fp16: scales must fit fp16 after multiplication by 2^24.
    It brings the largest weight to about 2^-5, or 2^-9 with codes of one bit; fp16 keeps its 11 bits down to 2^-14.
    """
    few = 0 if part.layout.offset else part.layout.bits
    return part.weight_scale * 2.0 ** {1: -13, 2: -11}.get(few, -9)


def launch_wgmma(
    x: Fp16Operand,
    part: PackedPart,
    paired: bool,
    out: Tensor,
    first: int,
    scratch: SplitScratch,
    mode: MatmulMode,
    residual: Tensor | None = None,
    producer: bool = False,
    consumer: bool = False,
) -> None:
    """`launch_fused` in the WGMMA layout; `out` may be the residual for more than `MOST_FEW` rows.

    With PDL, the launches of one matrix's parts overlap: the first part's is the `producer`, the others' are
    `consumer`s. A consumer reads nothing that the producer writes, but shares its scratch: it runs beside the producer
    and waits for its end only before it writes. This is safe because the producer lets it start only once the inputs
    of both are written. The same holds for any launch that follows a producer and reads its own inputs early.
    """
    geometry = wgmma_geometry(part, "rows", x.rows, mode.batch_invariant, consumer)
    flags = WgmmaFlags(
        epilogue_adding(residual), paired, _is_exact(mode, x.rows), mode.pdl, producer, consumer,
        waiting=runs_together(MOST_WAITING),
    )  # fmt: skip
    added = out if residual is None else residual
    _launch(x, part, geometry, flags, (added, out, out), (first, out.shape[1]), scratch)


MOST_TOGETHER = 64
"""The most rows for which a block's last program to arrive adds the splits as fast as the next launch would."""


class SplitRows(NamedTuple):
    """A product as the rows of `splits` splits of its columns, to be added in order: fp32 [splits, T, N] at the start
    of `values`, a buffer of a SplitScratch."""

    values: Tensor
    splits: int


def launch_wgmma_apart(
    x: Fp16Operand, part: PackedPart, scratch: SplitScratch, mode: MatmulMode
) -> SplitRows | None:
    """Multiplies rows by a part where several programs share the columns of every block. Each program stores rows of
    its own, and none waits for the others at the end. Returns None where programs do not share columns, or where there
    are so few rows that this is no faster. The result is valid until the next launch with `scratch`.
    """
    if x.rows <= MOST_TOGETHER:
        return None
    geometry = wgmma_geometry(part, "rows", x.rows, mode.batch_invariant, False, 0, True)
    flags = WgmmaFlags(ROWS.value, False, _is_exact(mode, x.rows), mode.pdl, apart=True)
    splits = wgmma_plan(geometry, part.layout, part.rows, x.values.shape[1], x.rows, flags).splits
    if splits == 1:
        return None
    rows, _ = scratch.take(splits * x.rows * part.rows, 0)
    _launch(x, part, geometry, flags, (rows, rows, rows), (0, part.rows), scratch)
    return SplitRows(rows, splits)


def launch_wgmma_glu(
    x: Fp16Operand,
    part: PackedPart,
    activation: Activation,
    out: Fp16Operand,
    scratch: SplitScratch,
    mode: MatmulMode,
) -> None:
    """Writes activation(gate) * up of rows times a paired part to `out`; rows and `out` are in the WGMMA layout."""
    geometry = wgmma_geometry(part, "swiglu", x.rows, mode.batch_invariant)
    assert out.is_wgmma
    flags = WgmmaFlags(
        EPILOGUES[activation], True, _is_exact(mode, x.rows), mode.pdl, waiting=runs_together(MOST_WAITING)
    )
    _launch(x, part, geometry, flags, (out.row_scale, out.values, out.row_scale), (0, out.stride), scratch)


def takes_two_parts(x: Fp16Operand, parts: Sequence[PackedPart], batch_invariant: bool) -> bool:
    """Whether `launch_wgmma_two_parts` supports these rows and parts. In batch-invariant mode each part keeps
    the splits that it has with many rows, so each is a separate launch.
    """
    return x.is_wgmma and x.rows <= MOST_FEW and not batch_invariant and len(parts) == 2


def launch_wgmma_two_parts(
    x: Fp16Operand,
    parts: Sequence[PackedPart],
    out: Tensor,
    scratch: SplitScratch,
    mode: MatmulMode,
    producer: bool = False,
) -> None:
    """Rows times a matrix of two parts, fp32, into `out`, in one launch with the geometry of the first part:
    two overlapping launches take half as long again. producer: see `launch_wgmma`.
    """
    one, two = parts
    geometry = wgmma_geometry(one, "rows", x.rows, beside=two.rows)
    flags = WgmmaFlags(ROWS.value, False, mode.exact, mode.pdl, producer, waiting=runs_together(MOST_WAITING))
    plan = wgmma_plan_two_parts(
        geometry, (one.layout, two.layout), (one.rows, two.rows), x.values.shape[1], x.rows, flags
    )
    assert x.rows * out.shape[1] < 2**31, "the kernel counts results in 32 bits"
    partials, arrivals = scratch.take(plan.partial, plan.blocks)
    scales = [part.weight_scale if mode.exact else subnormal_weight_scale(part) for part in parts]
    _wgmma_two_parts_kernel.launch(
        plan.grid,
        (
            *one.planes, Copied(x.values, plan.tma_block), x.row_scale, out, partials, arrivals, one.tiles, one.rows,
            out.shape[1], x.rows, scales[0], *two.planes, two.tiles, two.rows, scales[1],
        ),
        plan.constants,
    )  # fmt: skip


def _is_exact(mode: MatmulMode, rows: int) -> bool:
    """Whether weights are rounded once: always above `MOST_FEW` rows, where the products hide what that takes."""
    return mode.exact or mode.batch_invariant or rows > MOST_FEW


def _launch(
    x: Fp16Operand,
    part: PackedPart,
    geometry: WgmmaGeometry,
    flags: WgmmaFlags,
    outputs: tuple[Tensor, Tensor, Tensor],
    columns: tuple[int, int],
    scratch: SplitScratch,
) -> None:
    """Launches the kernel for `geometry`. outputs: the residual, the result and the result's row scale, any tensor
    where unused. columns: the first output column, and the row stride.
    """
    plan = wgmma_plan(geometry, part.layout, part.rows, x.values.shape[1], x.rows, flags)
    results = x.rows * columns[1] * (plan.splits if flags.apart else 1)
    assert x.is_wgmma and results < 2**31, "the kernel counts results in 32 bits"
    weight_scale = part.weight_scale if flags.exact else subnormal_weight_scale(part)
    pointers = (*part.planes, Copied(x.values, plan.tma_block), x.row_scale, *outputs)
    sizes = (part.tiles, part.rows, *columns, x.rows, weight_scale, product_bound(part))
    shared = scratch.take(0 if flags.apart else plan.partial, plan.blocks)
    if x.rows <= MOST_FEW:
        _wgmma_kernel.launch(plan.grid, pointers + shared + sizes, plan.constants)
        return
    kernel = _wgmma_groups_kernel if geometry.groups else _wgmma_blocks_kernel
    kernel.launch(plan.grid, pointers + shared + plan.sharing + sizes, plan.constants)
