"""Grouped matmul on packed weights with Hopper's warp-group matrix instruction: matmul_wgmma.py with an expert for each
block of rows.

A program takes a block of rows, all of one expert, times 16 weight rows a warp, over all columns in their order: a
row's bits depend on nothing but the row and its expert. Rows are padded with zeros to whole blocks of 128 columns, as
the planes of the weights are.
"""

from functools import partial

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemm.fragments import load_chunk
from quengine.kernels.cuda.gemm.matmul_fused import MatmulMode
from quengine.kernels.cuda.gemm.matmul_wgmma import STAGED, subnormal_weight_scale
from quengine.kernels.cuda.gemm.weight_ring import allocate_ring, copy_chunk, read_chunk
from quengine.kernels.cuda.gemm.wgmma_loop import multiply
from quengine.kernels.cuda.gemm.wgmma_operand import weights_operand
from quengine.kernels.cuda.gemm.wgmma_plan import WgmmaFlags, wgmma_plan_grouped
from quengine.kernels.cuda.gemm.wgmma_program import Matrix, allocate_stages, begin_block
from quengine.kernels.cuda.gemm.wgmma_store import Output, store_block, store_sums, tile_of
from quengine.kernels.cuda.glu import SILU, product_bound
from quengine.kernels.cuda.launch.kernel import Copied, DirectLaunch
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.grouped_program import (
    SIDE,
    UNBOUNDED,
    Blocks,
    GroupedOutput,
    epilogue_of,
    expert_of,
    expert_planes,
    scheduled,
)
from quengine.kernels.cuda.weights.launch_table import grouped_wgmma_geometry
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.glu import Activation


@partial(DirectLaunch, layout=STAGED)
@gluon.jit(do_not_specialize=["first_block", "end_block", "places"])
def _grouped_wgmma_kernel(
    low, high, scales, supers, of_block_ptr, x_rows, row_scale_ptr, bias_ptr, out_ptr, out_row_scale_ptr,
    tiles, rows, weight_blocks, first_block, end_block, first, outputs, stride, places, weight_scale, bound,
    P: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A block of rows of x times a block of its expert's weight rows. outputs: of an expert, in all parts."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [P.warps, 1], [16, P.block, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    if P.flags.pdl:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        else:  # programs that have no block end here, which lets the next launch begin as well
            tl.extra.cuda.gdc_wait()
    block, weight_block = scheduled(gl.program_id(0), weight_blocks)
    expert = expert_of(of_block_ptr, first_block + block, end_block)
    if expert >= 0:
        token0 = block * P.block
        matrix = Matrix(expert_planes(low, high, scales, supers, expert, tiles, P), tiles, rows, weight_scale)
        words, stages, ready, tile, lane = begin_block(matrix, x_rows, weight_block, 0, P.chunks, token0, P)
        acc, words = multiply(
            matrix.planes, words, x_rows, stages, ready, tile, lane, 0, 0, P.chunks, P.chunks, token0,
            weight_scale, P, MMA, A,
        )  # fmt: skip
        output = Output(
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
def _copy_turn(rings, slot, planes, expert, block, turn, tiles, P: gl.constexpr):
    """Start copying the chunks of a turn of a block of an expert's tiles to a slot."""
    CHUNKS: gl.constexpr = P.columns // P.layout.chunk
    for i in gl.static_range(CHUNKS):
        chunk = gl.minimum(turn * CHUNKS + i, P.chunks - 1)  # behind the last one rows are zeros
        copy_chunk(rings[i], slot, planes, expert, block, chunk, tiles, P)


@gluon.jit
def _load_turn(planes, first, turn, lane, P: gl.constexpr):
    FMT: gl.constexpr = P.layout
    CHUNKS: gl.constexpr = P.columns // P.layout.chunk
    words = ()
    for i in gl.static_range(CHUNKS):
        chunk = gl.minimum(turn * CHUNKS + i, P.chunks - 1)
        words = words + (load_chunk(planes, first + chunk, 0, lane, True, FMT, False),)
    return words


@gluon.jit
def _prefetch_turn(planes, first, turn, lane, P: gl.constexpr):
    """Bring the chunks of a turn to the L2 cache: a lane a plane."""
    FMT: gl.constexpr = P.layout
    CHUNKS: gl.constexpr = P.columns // P.layout.chunk
    LOW: gl.constexpr = FMT.low_bytes
    HIGH: gl.constexpr = FMT.high_bytes
    SCALES: gl.constexpr = FMT.scale_bytes
    SUPERS: gl.constexpr = FMT.super_bytes
    chunk = (first + gl.minimum(turn * CHUNKS, P.chunks - 1)).to(gl.int64)
    many = gl.minimum(P.chunks - turn * CHUNKS, CHUNKS)
    base = gl.where(lane == 0, planes[0].to(gl.int64), gl.where(lane == 1, planes[1].to(gl.int64), gl.where(
        lane == 2, planes[2].to(gl.int64), planes[3].to(gl.int64))))
    size = gl.where(lane == 0, LOW, gl.where(lane == 1, HIGH, gl.where(lane == 2, SCALES, SUPERS)))
    size = gl.where(lane < 4, size, 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [base + chunk * size, size * many], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def _copy_rows(x_rows, stages, ready, stage, token0, turn, on, P: gl.constexpr):
    """Start copying the rows' columns of a turn, zeros where there are none, to a stage."""
    bar = ready.index(stage)
    mbarrier.expect(bar, P.block * P.columns * 2, pred=on)
    tma.async_copy_global_to_shared(x_rows, [token0, turn * P.columns], bar, stages.index(stage), pred=on)


@gluon.jit
def _work(number, blocks, weight_blocks):
    """Piece of work `number`: as `scheduled`, but the last blocks of rows are side by side with as many as there are."""
    together = weight_blocks * SIDE
    group = number // together
    inside = number % together
    width = gl.minimum(blocks - group * SIDE, SIDE)
    return group * SIDE + inside % width, inside // width


@partial(DirectLaunch, layout=STAGED)
@gluon.jit(do_not_specialize=["first_block", "end_block", "places"])
def _grouped_ring_kernel(
    low, high, scales, supers, of_block_ptr, x_rows, row_scale_ptr, bias_ptr, out_ptr, out_row_scale_ptr,
    tiles, rows, weight_blocks, first_block, end_block, first, outputs, stride, places, weight_scale, bound,
    P: gl.constexpr, EARLY: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """`_grouped_wgmma_kernel` for blocks of few rows: a program takes one piece of work behind the other, and the first
    turns of the next one are on their way while it ends this one."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [P.warps, 1], [16, P.block, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [P.warps], [0])
    CHUNK: gl.constexpr = P.layout.chunk
    CHUNKS: gl.constexpr = P.columns // CHUNK
    HALVES: gl.constexpr = P.columns // 128
    TURNS: gl.constexpr = (P.cols + P.columns - 1) // P.columns
    STAGES: gl.constexpr = P.stages
    WARPS: gl.constexpr = P.warps
    TB: gl.constexpr = P.block
    if P.flags.pdl:
        if not EARLY:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks = gl.minimum(gl.load(of_block_ptr, cache_modifier=".cg"), end_block) - first_block
    pieces = blocks * weight_blocks
    begin = gl.program_id(0)
    step = gl.num_programs(0)
    if begin < pieces:
        planes = (low, high, scales, supers)
        of_block_ptr += first_block
        thread = gl.arange(0, 32 * WARPS, layout=LINE)
        lane = thread & 31
        rings = ()
        warp = thread >> 5
        if SLOTS > 0:
            for i in gl.static_range(CHUNKS):
                rings = rings + (allocate_ring(planes, SLOTS, P),)
        stages, ready = allocate_stages(x_rows, P)
        row_block, weight_block = _work(begin, blocks, weight_blocks)
        expert = gl.load(of_block_ptr + 1 + row_block, cache_modifier=".cg")
        here = (expert * tiles + gl.minimum(tile_of(weight_block, warp, P), tiles - 1)) * P.chunks
        if SLOTS <= 0:
            ahead = _load_turn(planes, here, 0, lane, P)
            for i in gl.static_range(-SLOTS):
                _prefetch_turn(planes, here, i + 1, lane, P)
        else:
            ahead = (lane,)
        for i in gl.static_range(max(SLOTS - 1, 0)):
            _copy_turn(rings, i, planes, expert, weight_block, i, tiles, P)
            async_copy.commit_group()
        row_block_2, weight_block_2 = _work(gl.minimum(begin + step, pieces - 1), blocks, weight_blocks)
        expert_2 = gl.load(of_block_ptr + 1 + row_block_2, cache_modifier=".cg")
        if P.flags.pdl and EARLY:
            tl.extra.cuda.gdc_wait()
        for i in gl.static_range(STAGES - 1):
            _copy_rows(x_rows, stages, ready, i, row_block * TB, i, True, P)
        slot, slot_before, stage, stage_before, phase = 0, SLOTS - 1, 0, STAGES - 1, 0
        for piece in range(begin, pieces, step):
            more = piece + step < pieces
            # The one after the next: known when its turn comes, without waiting for it.
            row_block_3, weight_block_3 = _work(gl.minimum(piece + 2 * step, pieces - 1), blocks, weight_blocks)
            expert_3 = gl.load(of_block_ptr + 1 + row_block_3, cache_modifier=".cg")
            there = (expert_2 * tiles + gl.minimum(tile_of(weight_block_2, warp, P), tiles - 1)) * P.chunks
            acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
            for turn in range(TURNS):
                if SLOTS > 0:
                    async_copy.wait_group(SLOTS - 2)
                tl.debug_barrier()  # all warps have used the slot and the stage of the turn before
                later = turn + (SLOTS - 1)
                inside = later < TURNS
                words = ()
                if SLOTS > 0:
                    for i in gl.static_range(CHUNKS):
                        words = words + (read_chunk(rings[i], slot, planes, lane, P),)
                    if inside | more:
                        _copy_turn(
                            rings, slot_before, planes, gl.where(inside, expert, expert_2),
                            gl.where(inside, weight_block, weight_block_2), gl.where(inside, later, later - TURNS),
                            tiles, P,
                        )  # fmt: skip
                    async_copy.commit_group()
                else:
                    words = ahead
                    inside = turn + 1 < TURNS
                    ahead = _load_turn(planes, gl.where(inside, here, there), gl.where(inside, turn + 1, 0), lane, P)
                    if SLOTS < 0:
                        later = turn + 1 - SLOTS
                        inside = later < TURNS
                        if inside | more:
                            _prefetch_turn(
                                planes, gl.where(inside, here, there), gl.where(inside, later, later - TURNS), lane, P
                            )
                later = turn + (STAGES - 1)
                inside = later < TURNS
                _copy_rows(
                    x_rows, stages, ready, stage_before, gl.where(inside, row_block, row_block_2) * TB,
                    gl.where(inside, later, later - TURNS), inside | more, P,
                )  # fmt: skip
                x = stages.index(stage)
                for half in gl.static_range(HALVES):
                    a = weights_operand(words[half * 128 // CHUNK], half % (CHUNK // 128), weight_scale, P, A)
                    if half == 0:
                        mbarrier.wait(ready.index(stage), phase)
                    columns = x if HALVES == 1 else x.slice(half * 128, 128, 1)
                    acc = warpgroup_mma(a, columns.permute((1, 0)), acc)
                slot_before, stage_before = slot, stage
                slot = gl.where(slot == SLOTS - 1, 0, slot + 1)
                phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            output = Output(
                row_scale_ptr, bias_ptr + expert * outputs, out_ptr, out_row_scale_ptr, first, stride, places, bound,
            )  # fmt: skip
            store_sums(
                acc, weight_block * (16 * WARPS), output, rows, weight_scale, MMA, P, row_block * TB
            )
            here = there
            row_block, weight_block, expert = row_block_2, weight_block_2, expert_2
            row_block_2, weight_block_2, expert_2 = row_block_3, weight_block_3, expert_3


def launch_grouped_wgmma(
    x: Fp16Operand,
    weights: ExpertWeights,
    part: PackedPart,
    blocks: Blocks,
    output: GroupedOutput,
    mode: MatmulMode,
) -> None:
    """Rows x in the WGMMA layout, in blocks, times a part of their experts' matrices."""
    _launch(x, weights, part, blocks, (output.out, output.out), output, None, mode)


def launch_grouped_wgmma_glu(
    x: Fp16Operand,
    weights: ExpertWeights,
    blocks: Blocks,
    out: Fp16Operand,
    activation: Activation,
    mode: MatmulMode,
) -> None:
    """activation(gate) * up of rows x, in blocks, times their experts' paired matrices, both in the WGMMA layout. What
    is behind the last column is finite where the row is."""
    part = weights.parts[0]
    assert isinstance(part, PackedPart) and weights.paired and out.is_wgmma
    output = GroupedOutput(out.values, 0, weights.bias)
    _launch(x, weights, part, blocks, (out.values, out.row_scale), output, activation, mode)


def _launch(
    x: Fp16Operand,
    weights: ExpertWeights,
    part: PackedPart,
    blocks: Blocks,
    results: tuple[Tensor, Tensor],
    output: GroupedOutput,
    activation: Activation | None,
    mode: MatmulMode,
) -> None:
    """results: the products, or of a gated unit with an `activation` its values and row scales."""
    geometry, bias = grouped_wgmma_geometry(blocks.rows), output.bias
    exact, epilogue = mode.exact or mode.batch_invariant, epilogue_of(activation, bias)
    flags = WgmmaFlags(epilogue, weights.paired, exact, mode.pdl, producer=not blocks.early)
    # Of a gated unit a tile is 8 columns of the result, whose padding is written too.
    tiles = results[0].shape[1] // 8 if activation else weights.expert_tiles
    weight_blocks = -(-tiles // geometry.warps)
    kernel = _grouped_ring_kernel if geometry.programs else _grouped_wgmma_kernel
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
