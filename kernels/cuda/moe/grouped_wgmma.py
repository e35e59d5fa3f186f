"""Grouped matmul of packed weights on Hopper's wgmma: matmul_wgmma.py with an expert for each block of rows.

A program takes a block of rows, all of one expert, times 16 weight rows per warp, over all columns in order: a row's
bits depend only on the row and its expert. Rows are padded with zeros to whole blocks of 128 columns, as are the
planes of the weights.
"""

from functools import partial

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemm.matmul_fused import MatmulMode
from quengine.kernels.cuda.gemm.matmul_wgmma import STAGED, subnormal_weight_scale
from quengine.kernels.cuda.gemm.weight_ring import allocate_ring, copy_chunk, read_chunk
from quengine.kernels.cuda.gemm.wgmma_loop import load_turn, multiply, of_chunk
from quengine.kernels.cuda.gemm.wgmma_operand import weights_operand
from quengine.kernels.cuda.gemm.wgmma_plan import WgmmaFlags, WgmmaProgram, takes_turns, wgmma_plan_grouped
from quengine.kernels.cuda.gemm.wgmma_program import allocate_stages, begin_block, wgmma_matrix
from quengine.kernels.cuda.gemm.wgmma_store import (
    WgmmaOutput,
    load_row_scales,
    store_block,
    store_sums,
    tile_of,
)
from quengine.kernels.cuda.glu import SILU, product_bound
from quengine.kernels.cuda.launch.kernel import Copied, DirectLaunch
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.grouped_program import (
    UNBOUNDED,
    Blocks,
    GroupedOutput,
    expert_of,
    expert_planes,
    scheduled,
)
from quengine.kernels.cuda.weights.launch_table import grouped_wgmma_geometry
from quengine.kernels.cuda.weights.packed import PackedPart


@partial(DirectLaunch, layout=STAGED)
@gluon.jit(do_not_specialize=["first_block", "end_block", "places"])
def _grouped_wgmma_kernel(
    low, high, scales, supers, of_block_ptr, x_rows, row_scale_ptr, bias_ptr, out_ptr, out_row_scale_ptr,
    tiles, rows, weight_blocks, first_block, end_block, first, outputs, stride, places, weight_scale, bound,
    P: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A block of rows of x times a block of its expert's weight rows. outputs: outputs per expert, over all parts."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [P.warps, 1], [16, P.block, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    if P.flags.pdl:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        else:  # programs without a block end after this, which lets the next launch start as well
            tl.extra.cuda.gdc_wait()
    block, weight_block = scheduled(gl.program_id(0), weight_blocks)
    expert = expert_of(of_block_ptr, first_block + block, end_block)
    if expert >= 0:
        token0 = block * P.block
        planes = expert_planes(low, high, scales, supers, expert, tiles, P)
        matrix = wgmma_matrix(planes, tiles, rows, weight_scale, P)
        words, stages, ready, tile, lane = begin_block(matrix, x_rows, weight_block, 0, P.chunks, token0, P)
        acc, words = multiply(
            matrix.planes, words, x_rows, stages, ready, tile, lane, 0, 0, P.chunks, P.chunks, token0,
            weight_scale, P, MMA, A,
        )  # fmt: skip
        output = WgmmaOutput(
            row_scale_ptr, bias_ptr + expert * outputs, out_ptr, out_row_scale_ptr, first, stride, places, bound,
        )  # fmt: skip
        block_row = weight_block * (16 * P.warps)
        if P.flags.epilogue >= SILU or P.block > 64:
            store_block(
                acc, block_row, token0, output, rows, weight_scale, P, P.block,
                64 if P.flags.epilogue >= SILU else 32,
            )  # fmt: skip
        else:
            store_sums(acc, block_row, output, rows, weight_scale, MMA, P, token0)


@gluon.jit
def _copy_turn(rings, slot, planes, tiles, weight_block, turn, P: gl.constexpr):
    """Starts copying the chunks of iteration `turn` of a block of weight rows to a slot."""
    CHUNKS: gl.constexpr = P.columns // P.layout.chunk
    for i in gl.static_range(CHUNKS):
        chunk = gl.minimum(turn * CHUNKS + i, P.chunks - 1)  # past the last one, rows are zeros
        copy_chunk(rings[i], slot, planes, tiles, weight_block, chunk, P)


@gluon.jit
def _copy_rows(x_rows, stages, ready, stage, token0, turn, on, P: gl.constexpr):
    """Starts copying the rows' columns of iteration `turn` to a stage, zeros past the end."""
    bar = ready.index(stage)
    mbarrier.expect(bar, P.block * P.columns * 2, pred=on)
    tma.async_copy_global_to_shared(x_rows, [token0, turn * P.columns], bar, stages.index(stage), pred=on)


@gluon.jit
def _begin_weights(planes, rings, tile, tiles, weight_block, lane, SLOTS: gl.constexpr, P: gl.constexpr):
    """Starts copying the weights of the first SLOTS - 1 iterations; without a ring, loads those of the first."""
    words = ()
    if SLOTS == 0:
        words = load_turn(planes, tile, 0, P.chunks, lane, P)
    for i in gl.static_range(SLOTS - 1):
        _copy_turn(rings, i, planes, tiles, weight_block, i, P)
        async_copy.commit_group()
    return words


@gluon.jit
def _next_weights(
    planes, rings, words, slot, slot_before, turn, tile, tiles, weight_block, lane,
    SLOTS: gl.constexpr, TURNS: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """The words of iteration `turn`, and those of the next: () with a ring, which then gets a later iteration's."""
    CHUNKS: gl.constexpr = P.columns // P.layout.chunk
    if SLOTS == 0:
        return words, load_turn(planes, tile, (turn + 1) * CHUNKS, P.chunks, lane, P)
    else:
        here = ()
        for i in gl.static_range(CHUNKS):
            here = here + read_chunk(rings[i], slot, planes, lane, P)
        if turn + (SLOTS - 1) < TURNS:
            _copy_turn(rings, slot_before, planes, tiles, weight_block, turn + (SLOTS - 1), P)
        async_copy.commit_group()
        return here, ()


@gluon.jit
def _multiply_few(
    planes, rings, words, x_rows, stages, ready, tile, tiles, weight_block, token0, weight_scale,
    SLOTS: gl.constexpr, P: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Few rows of x, from row token0 on, times a block of weight rows, over all columns: fp32 [16*P.warps,
    P.block]. words: of `_begin_weights`. Copies of the first P.stages - 1 iterations' rows are in flight.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [P.warps], [0])
    CHUNK: gl.constexpr = P.layout.chunk
    HALVES: gl.constexpr = P.columns // 128
    TURNS: gl.constexpr = (P.cols + P.columns - 1) // P.columns
    STAGES: gl.constexpr = P.stages
    WARPS: gl.constexpr = P.warps
    TB: gl.constexpr = P.block
    lane = gl.arange(0, 32 * WARPS, layout=LINE) & 31
    slot, slot_before, stage, stage_before, phase = 0, SLOTS - 1, 0, STAGES - 1, 0
    acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
    for turn in range(TURNS):
        if SLOTS > 0:
            async_copy.wait_group(SLOTS - 2)
        tl.debug_barrier()  # all warps have used the previous iteration's slot and stage
        here, words = _next_weights(
            planes, rings, words, slot, slot_before, turn, tile, tiles, weight_block, lane, SLOTS, TURNS, P
        )  # fmt: skip
        later = turn + (STAGES - 1)
        _copy_rows(x_rows, stages, ready, stage_before, token0, later, later < TURNS, P)
        x = stages.index(stage)
        for half in gl.static_range(HALVES):
            chunk = of_chunk(here, half * 128 // CHUNK, P)
            a = weights_operand(chunk, half % (CHUNK // 128), weight_scale, P, A)
            if half == 0:
                mbarrier.wait(ready.index(stage), phase)
            columns = x if HALVES == 1 else x.slice(half * 128, 128, 1)
            if P.per_warp:
                acc = mma_v2(a, columns.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2)), acc)
            else:
                acc = warpgroup_mma(a, columns.permute((1, 0)), acc)
        slot_before, stage_before = slot, stage
        slot = gl.where(slot == SLOTS - 1, 0, slot + 1)
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    return acc


@gluon.constexpr_function
def _few_layout(program: WgmmaProgram) -> gl.NVMMADistributedLayout:
    """The layout of the sums of few rows."""
    if program.per_warp:
        return gl.NVMMADistributedLayout([2, 0], [program.warps, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [program.warps, 1], [16, program.block, 16])


@partial(DirectLaunch, layout=STAGED)
@gluon.jit(do_not_specialize=["first_block", "end_block", "places"])
def _grouped_few_kernel(
    low, high, scales, supers, of_block_ptr, x_rows, row_scale_ptr, bias_ptr, out_ptr, out_row_scale_ptr,
    tiles, rows, weight_blocks, first_block, end_block, first, outputs, stride, places, weight_scale, bound,
    P: gl.constexpr, EARLY: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """`_grouped_wgmma_kernel` for blocks of few rows, P.columns columns at a time: weights pass through a ring
    buffer of SLOTS slots in shared memory, a few iterations ahead, or, with none, through registers, one ahead.
    """
    MMA: gl.constexpr = _few_layout(P)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    CHUNKS: gl.constexpr = P.columns // P.layout.chunk
    AHEAD: gl.constexpr = P.stages - 1
    if P.flags.pdl:
        if not EARLY:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block, weight_block = scheduled(gl.program_id(0), weight_blocks)
    expert = expert_of(of_block_ptr, first_block + block, end_block)
    stages, ready = allocate_stages(x_rows, P)  # first, as its fence waits for copies in flight
    if expert >= 0:
        token0 = block * P.block
        # The codebook stays where it is: with a copy of it the ring of IQ2_XS ends just above 48 KiB, of which Triton
        # counts its own part alone, and the launch fails.
        planes = expert_planes(low, high, scales, supers, expert, tiles, P)
        thread = gl.arange(0, 32 * P.warps, layout=gl.BlockedLayout([1], [32], [P.warps], [0]))
        tile = gl.minimum(
            tile_of(weight_block, thread >> 5, P), tiles - 1
        )  # tiles past the end are not stored
        rings = ()
        if SLOTS > 0:
            for i in gl.static_range(CHUNKS):
                rings = rings + (allocate_ring(planes, SLOTS, P),)
        words = _begin_weights(planes, rings, tile, tiles, weight_block, thread & 31, SLOTS, P)
        if P.flags.pdl and EARLY:
            tl.extra.cuda.gdc_wait()
        for i in gl.static_range(AHEAD):
            _copy_rows(x_rows, stages, ready, i, token0, i, True, P)
        output = WgmmaOutput(
            row_scale_ptr, bias_ptr + expert * outputs, out_ptr, out_row_scale_ptr, first, stride, places, bound,
        )  # fmt: skip
        scale = load_row_scales(output, token0, MMA, P)
        acc = _multiply_few(
            planes, rings, words, x_rows, stages, ready, tile, tiles, weight_block, token0, weight_scale, SLOTS, P,
            MMA, A,
        )  # fmt: skip
        store_sums(acc, weight_block * (16 * P.warps), output, rows, weight_scale, MMA, P, token0, scale)


def launch_grouped_wgmma(
    x: Fp16Operand,
    weights: ExpertWeights,
    part: PackedPart,
    blocks: Blocks,
    output: GroupedOutput,
    mode: MatmulMode,
) -> None:
    """Multiplies rows x, in blocks and in the WGMMA layout, by a part of their experts' matrices. The padding columns
    of a gated unit are finite if the row is.
    """
    results, bias, exact = output.results, output.bias, mode.exact or mode.batch_invariant
    geometry = grouped_wgmma_geometry(part, x.values.shape[1], blocks.rows, exact)
    flags = WgmmaFlags(output.epilogue, weights.paired, exact, mode.pdl, producer=not blocks.early)
    # A tile of a gated unit is 8 columns of the result, whose padding is written too.
    tiles = results[0].shape[1] // 8 if output.activation else weights.expert_tiles
    weight_blocks = -(-tiles // geometry.warps)
    kernel = (
        _grouped_few_kernel
        if takes_turns(geometry, part.layout, x.values.shape[1])
        else _grouped_wgmma_kernel
    )
    plan = wgmma_plan_grouped(
        geometry, part.layout, x.values.shape[1], blocks.grid(weight_blocks), flags, blocks.early
    )
    stride, places = results[0].stride(0), (blocks.end - blocks.first) * blocks.rows
    assert x.is_wgmma and places * stride < 2**31, "the kernel counts results in 32 bits"
    kernel.launch(
        plan.grid,
        (
            *part.planes, blocks.of_block, Copied(x.values, plan.tma_block), x.row_scale,
            results[0] if bias is None else bias, *results, weights.expert_tiles, weights.part_rows, weight_blocks,
            blocks.first, blocks.end, output.first, weights.expert_rows, stride, places,
            part.weight_scale if exact else subnormal_weight_scale(part),
            product_bound(part) if bias is None else UNBOUNDED,
        ),
        plan.constants,
    )  # fmt: skip
