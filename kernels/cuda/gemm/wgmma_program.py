"""A program of the few-row matmul on Hopper's warp-group matrix instruction: a block of weight rows times up to 128
rows of x, over all columns or a share of them.

Where several programs share the columns of a block, each leaves its sums for the others, and the last to end adds them
up in the order of the columns.
Does not know: how many blocks a launch has, or of which matrices they are (matmul_wgmma.py).
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quengine.kernels.cuda.gemm.fragments import load_chunk
from quengine.kernels.cuda.gemm.wgmma_loop import copy_set, multiply
from quengine.kernels.cuda.gemm.wgmma_store import store_sums, tile_of


@gluon.jit
def _places(WARPS: gl.constexpr, TB: gl.constexpr, MMA: gl.constexpr):
    """Where programs leave fp32 [16*WARPS, TB] for each other: as the threads hold it, two values of each side by side,
    so that a warp writes 256 bytes in a row."""
    row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA))
    token = gl.arange(0, TB, layout=gl.SliceLayout(0, MMA))
    of_row = ((row // 8) % 2) * (64 * WARPS) + (row // 16) * 64 + (row % 8) * 8
    return gl.expand_dims(of_row, 1) + gl.expand_dims(token // 8 * (128 * WARPS) + token % 8, 0)


@gluon.jit
def _room_for_copies(x_rows, TB: gl.constexpr, SET: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for the sets of columns of x that are on their way, and the barriers that say which are there."""
    stages = gl.allocate_shared_memory(gl.float16, [STAGES, TB, SET], x_rows.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    return stages, ready


@gluon.jit
def begin_block(
    planes, x_rows, block, tiles, begin, end, token0,
    FMT: gl.constexpr, CHUNKS: gl.constexpr, TB: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    SET: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr, BEFORE: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """What a program does before its first product, for chunks begin .. end - 1 of a block of weight rows and rows of x
    from token0 on: its weights' first words are on their way, and, once the launch in front has ended, the first sets
    of x. The words, shared memory and barriers of the sets, this thread's tile and lane."""
    SETS: gl.constexpr = FMT.chunk // SET
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    lane = thread & 31
    tile = gl.minimum(tile_of(block, thread >> 5, WARPS, EPILOGUE), tiles - 1)  # what is beyond is not stored
    words = load_chunk(planes, tile * CHUNKS + begin, 0, lane, True, FMT, False)
    stages, ready = _room_for_copies(x_rows, TB, SET, STAGES)
    if PDL and not BEHIND:
        tl.extra.cuda.gdc_wait()
        if BEFORE:
            tl.extra.cuda.gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        copy_set(x_rows, stages, ready, i, i, begin * SETS, (end - begin) * SETS, token0, TB, SET)
    return words, stages, ready, tile, lane


@gluon.jit
def _add_shares(
    acc, share, place, places, partial_ptr, tickets_ptr,
    MMA: gl.constexpr, WARPS: gl.constexpr, TB: gl.constexpr, SPLITS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Leave the sums of a share at place `place` of `places`: for the program that is the last to, all shares added up,
    and True."""
    SIZE: gl.constexpr = 16 * WARPS * TB
    spread = _places(WARPS, TB, MMA)
    gl.store(partial_ptr + (share * places + place) * SIZE + spread, acc)
    tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
    ticket = gl.atomic_add(tickets_ptr + place, 1, sem="acq_rel", scope="gpu")
    last = ticket == SPLITS - 1
    if last:
        gl.store(tickets_ptr + place, 0)
        # Other programs wrote these: not from this multiprocessor's own cache. All at once would take more
        # registers than all that comes before; one after the other, a way to the L2 cache each.
        at = partial_ptr + place * SIZE + spread
        step = places * SIZE
        acc = gl.load(at, cache_modifier=".cg")
        for i in gl.static_range(1, AT_ONCE):
            acc += gl.load(at + i * step, cache_modifier=".cg")
        for split in range(AT_ONCE, SPLITS, AT_ONCE):
            for i in gl.static_range(AT_ONCE):
                acc += gl.load(at + (split + i) * step, cache_modifier=".cg")
    return acc, last


@gluon.jit
def few_rows_program(
    planes, x_rows, outs, shared, sizes, block, share, place, places,
    FMT: gl.constexpr, K: gl.constexpr, TB: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    AT_ONCE: gl.constexpr, STAGES: gl.constexpr, SET: gl.constexpr, ASYNC: gl.constexpr, EXACT: gl.constexpr,
    PAIRED: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr, BEFORE: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Block `block` of a part, share `share` of the columns; `place` of `places` among all blocks of the launch.

    outs: (unscale of x, residual, result, its unscale); shared: (room for shares' sums, tickets); sizes: (tiles, rows,
    first column of the result, its stride, rows of x, gain, reach). BEFORE, BEHIND: see `launch_wgmma`.
    """
    unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr = outs
    partial_ptr, tickets_ptr = shared
    tiles, rows, first, N, T, gain, reach = sizes
    CHUNKS: gl.constexpr = K // FMT.chunk
    SHARE: gl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TB, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    begin = share * SHARE
    end = gl.minimum(begin + SHARE, CHUNKS)
    words, stages, ready, tile, lane = begin_block(
        planes, x_rows, block, tiles, begin, end, 0,
        FMT, CHUNKS, TB, WARPS, STAGES, SET, EPILOGUE, PDL, BEFORE, BEHIND,
    )  # fmt: skip
    acc, words = multiply(
        planes, words, x_rows, stages, ready, tile, lane, begin, begin, end, end, 0, gain,
        FMT, CHUNKS, TB, WARPS, STAGES, SET, ASYNC, EXACT, MMA, A,
    )  # fmt: skip
    if PDL and BEHIND:
        tl.extra.cuda.gdc_wait()
    finished = True
    if SPLITS > 1:
        acc, finished = _add_shares(
            acc, share, place, places, partial_ptr, tickets_ptr, MMA, WARPS, TB, SPLITS, AT_ONCE
        )  # fmt: skip
    if finished:
        store_sums(
            acc, block * (16 * WARPS), unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, rows, first, N, T, gain,
            reach, MMA, WARPS, TB, PAIRED, EPILOGUE,
        )  # fmt: skip
