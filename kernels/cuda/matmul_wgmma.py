"""Matrix times 2 to 128 rows on Hopper's warp-group matrix instruction, on packed weights.

As in matmul_fused.py, weights are read packed and dequantized to fp16 in registers, now as the left operand of wgmma;
the rows, the right operand, are staged in shared memory by asynchronous copies, some sets of 128 columns ahead, so
that all warps of a program share them and no register waits for them. The stored order of the weights fixes which
columns meet in an instruction; rows come with their columns in that order (half.py, "ordered").

Programs take 16 rows of weights a warp and all rows of x; where they are too few, `splits` of them share the columns,
and the last to end adds up what all have left, in the order of the columns.
Does not know: where rows come from, or when this way pays (matmul.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from quengine.kernels.cuda.attention_prefill import is_hopper
from quengine.kernels.cuda.fragments import chunk_scales, load_chunk, step_codes
from quengine.kernels.cuda.half import HalfRows
from quengine.kernels.cuda.launch_table import wgmma_block, wgmma_geometry
from quengine.kernels.cuda.matmul_fused import FusedScratch, step_halves
from quengine.kernels.cuda.packed import PackedPart

_ROWS = gl.constexpr(0)
_RESIDUAL = gl.constexpr(1)
_SWIGLU = gl.constexpr(2)
_SET = gl.constexpr(128)


@gluon.jit
def _halves_apart(words, COUNT: gl.constexpr):
    """COUNT int32 tensors [thread] of two fp16: fp16 [thread, COUNT, 2]."""
    for level in gl.static_range(8):
        if 1 << level < COUNT:
            pairs = ()
            for i in gl.static_range(COUNT >> (level + 1)):
                pairs = pairs + (gl.join(words[i], words[i + (COUNT >> (level + 1))]),)
            words = pairs
    all_words = words[0]
    near = all_words.to(gl.int16).to(gl.float16, bitcast=True)
    far = (all_words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.join(near, far)


@gluon.jit
def _weights(words, half: gl.constexpr, gain, FMT: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr):
    """128 columns of this program's weights, half `half` of a chunk: fp16 [16*WARPS, 128] as wgmma's left operand."""
    STEPS: gl.constexpr = FMT.steps_per_set
    SETS: gl.constexpr = 128 // (4 * FMT.group)
    operand = ()
    for s in gl.static_range(SETS):
        scales = chunk_scales(words, half * SETS + s, gain, FMT)
        for j in gl.static_range(STEPS):
            codes = step_codes(words, (half * SETS + s) * STEPS + j, FMT, True)
            first, last = step_halves(codes, scales, FMT, True)
            operand = operand + (first[0], first[1], first[2], first[3], last[0], last[1], last[2], last[3])
    apart = _halves_apart(operand, 32)  # [thread, 8 blocks of 16 columns, pair, rh, e]: see below
    apart = gl.reshape(apart, [WARPS, 8, 4, 8, 2, 2, 2])  # warp, r, q, block, pair, rh, e
    return gl.convert_layout(
        gl.reshape(gl.permute(apart, [0, 5, 1, 3, 4, 2, 6]), [16 * WARPS, 128]), A, assert_trivial=True
    )


@gluon.jit
def _copy(stages, x_at, it, end, STAGES: gl.constexpr):
    """Start copying set `it` of the rows."""
    on = it < end
    async_copy.async_copy_global_to_shared(stages.index(it % STAGES), x_at + it * _SET, mask=on)
    async_copy.commit_group()


@gluon.jit
def _store(
    y, block_row, unscale_ptr, residual_ptr, out_ptr, rows, first, N, T, gain,
    MMA: gl.constexpr, WARPS: gl.constexpr, TB: gl.constexpr, PAIRED: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Finish and store fp32 [16*WARPS, TB], whose first row is row `block_row` of the packed matrix."""
    row = block_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA))
    token = gl.arange(0, TB, layout=gl.SliceLayout(0, MMA))
    scale = gl.load(unscale_ptr + token, mask=token < T, other=0.0) / gain
    y = y * gl.expand_dims(scale, 0)
    token = gl.expand_dims(token, 0)
    if PAIRED:
        column = (row >> 4) * 8 + (row & 7)
        inside = gl.expand_dims(column < rows // 2, 1) & (token < T)
        if EPILOGUE != _SWIGLU:
            column = column + ((row >> 3) & 1) * (rows // 2)
    else:
        column = row
        inside = gl.expand_dims(row < rows, 1) & (token < T)
    at = token * N + (first + gl.expand_dims(column, 1))
    if EPILOGUE == _SWIGLU:
        # Rows r and r + 8 of a tile, gate and up, lie in the same thread.
        gate, up = gl.split(gl.permute(gl.reshape(y, [WARPS, 2, 8, TB]), [0, 2, 3, 1]))
        place, _ = gl.split(gl.permute(gl.reshape(at, [WARPS, 2, 8, TB]), [0, 2, 3, 1]))
        live, _ = gl.split(gl.permute(gl.reshape(inside.to(gl.int32), [WARPS, 2, 8, TB]), [0, 2, 3, 1]))
        gl.store(out_ptr + place, gate / (1.0 + gl.exp(-gate)) * up, mask=live != 0)
    else:
        if EPILOGUE == _RESIDUAL:
            y += gl.load(residual_ptr + at, mask=inside, other=0.0)
        gl.store(out_ptr + at, y, mask=inside)


@gluon.jit
def _wgmma_kernel(
    low, high, scales, supers, x_ptr, unscale_ptr, residual_ptr, out_ptr, partial_ptr, tickets_ptr,
    tiles, rows, first, N, T, gain,
    FMT: gl.constexpr, K: gl.constexpr, TB: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, ASYNC: gl.constexpr, PAIRED: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    CHUNKS: gl.constexpr = K // FMT.chunk
    SHARE: gl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    HALVES: gl.constexpr = FMT.chunk // 128
    THREAD: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TB, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    thread = gl.arange(0, 32 * WARPS, layout=THREAD)
    lane = thread & 31
    tile0 = gl.program_id(0) * WARPS
    tile = tile0 + (thread >> 5)
    begin = gl.program_id(1) * SHARE
    end = gl.minimum(begin + SHARE, CHUNKS)
    planes = (low, high, scales, supers)
    words = load_chunk(planes, tile * CHUNKS + begin, 0, lane, tile < tiles, FMT, True)
    stages = gl.allocate_shared_memory(gl.float16, [STAGES, TB, 128], X)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    x_row = gl.expand_dims(gl.arange(0, TB, layout=gl.SliceLayout(1, COPY)), 1)
    x_at = x_ptr + (x_row * K + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, COPY)), 0))
    if PDL:
        tl.extra.cuda.gdc_wait()
    last = end * HALVES
    for i in gl.static_range(STAGES - 1 - ASYNC):
        _copy(stages, x_at, begin * HALVES + i, last, STAGES)
    acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
    if ASYNC:
        acc = warpgroup_mma_init(acc)
    for c in range(begin, end):
        later = load_chunk(planes, tile * CHUNKS + c + 1, 0, lane, (tile < tiles) & (c + 1 < end), FMT, True)
        for half in gl.static_range(HALVES):
            it = c * HALVES + half
            if ASYNC:
                acc = warpgroup_mma_wait(1, deps=[acc])
            async_copy.wait_group(STAGES - 2 - ASYNC)
            fence_async_shared()
            tl.debug_barrier()
            _copy(stages, x_at, it + STAGES - 1 - ASYNC, last, STAGES)
            a = _weights(words, half, gain, FMT, WARPS, A)
            b = stages.index(it % STAGES).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=ASYNC)
        words = later
    if ASYNC:
        acc = warpgroup_mma_wait(0, deps=[acc])
    if SPLITS == 1:
        _store(
            acc, tile0 * 16, unscale_ptr, residual_ptr, out_ptr, rows, first, N, T, gain,
            MMA, WARPS, TB, PAIRED, EPILOGUE,
        )  # fmt: skip
    else:
        SIZE: gl.constexpr = 16 * WARPS * TB
        spread = gl.expand_dims(gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA)), 1) + (
            gl.expand_dims(gl.arange(0, TB, layout=gl.SliceLayout(0, MMA)), 0) * (16 * WARPS)
        )
        block = gl.program_id(0)
        blocks = gl.num_programs(0)
        gl.store(partial_ptr + (gl.program_id(1) * blocks + block) * SIZE + spread, acc)
        tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
        ticket = gl.atomic_add(tickets_ptr + block, 1, sem="acq_rel", scope="gpu")
        if ticket == SPLITS - 1:
            # Other programs wrote these: not from this multiprocessor's own cache.
            total = gl.load(partial_ptr + block * SIZE + spread, cache_modifier=".cg")
            for split in gl.static_range(1, SPLITS):
                total += gl.load(partial_ptr + (split * blocks + block) * SIZE + spread, cache_modifier=".cg")
            _store(
                total, tile0 * 16, unscale_ptr, residual_ptr, out_ptr, rows, first, N, T, gain,
                MMA, WARPS, TB, PAIRED, EPILOGUE,
            )  # fmt: skip
            gl.store(tickets_ptr + block, 0)


def uses_wgmma(device: torch.device, cols: int) -> bool:
    """Whether this kernel takes weights of `cols` columns on `device`."""
    return is_hopper(device) and cols % 128 == 0


def launch_wgmma(
    x: HalfRows,
    part: PackedPart,
    paired: bool,
    out: Tensor,
    first: int,
    scratch: FusedScratch,
    residual: Tensor | None = None,
    swiglu: bool = False,
    pdl: bool = False,
) -> None:
    """`launch_fused` for ordered rows, at most 128 of them."""
    geometry = wgmma_geometry(part, "swiglu" if swiglu else "rows", x.rows)
    block = wgmma_block(x.rows)
    blocks = triton.cdiv(part.tiles, geometry.warps)
    splits = triton.cdiv(part.chunks, triton.cdiv(part.chunks, geometry.splits))  # none without a share
    assert x.ordered and x.rows <= 128 and (splits == 1 or blocks <= scratch.tickets.shape[0])
    size = 0 if splits == 1 else splits * blocks * 16 * geometry.warps * block
    epilogue = _SWIGLU if swiglu else _ROWS if residual is None else _RESIDUAL
    _wgmma_kernel[(blocks, splits)](
        part.low, part.high, part.scales, part.supers, x.values[0 if part.layout.group == 32 else 1], x.unscale,
        out if residual is None else residual, out, scratch.partial(size), scratch.tickets, part.tiles, part.rows,
        first, out.shape[1], x.rows, part.gain,
        FMT=part.layout, K=part.cols, TB=block, WARPS=geometry.warps, SPLITS=splits, STAGES=geometry.stages,
        ASYNC=geometry.overlap, PAIRED=paired, EPILOGUE=epilogue.value, PDL=pdl,
        num_warps=geometry.warps, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip
