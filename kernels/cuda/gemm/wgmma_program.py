"""A program of the few-row matmul on Hopper's warp-group matrix instruction: a block of weight rows times up to 128
rows of x, over all columns or a split of them (split-K).

Where several programs share the columns of a block, each leaves its sums for the others, and the last to arrive adds
them up in the order of the columns.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quengine.kernels.cuda.gemm.wgmma_loop import copy_set, load_turn, multiply
from quengine.kernels.cuda.gemm.wgmma_store import store_sums, tile_of


class Matrix(NamedTuple):
    """A packed part in a kernel. planes: pointers of its low, high, scale and super-scale planes."""

    planes: Any
    tiles: Any
    rows: Any
    weight_scale: Any


@gluon.jit
def _partial_offsets(MMA: gl.constexpr, P: gl.constexpr):
    """Offsets of fp32 [16*P.warps, P.block] that programs leave for each other: as the threads hold it, two values of
    each side by side, so that a warp writes 256 bytes in a row."""
    row = gl.arange(0, 16 * P.warps, layout=gl.SliceLayout(1, MMA))
    token = gl.arange(0, P.block, layout=gl.SliceLayout(0, MMA))
    of_row = ((row // 8) % 2) * (64 * P.warps) + (row // 16) * 64 + (row % 8) * 8
    return gl.expand_dims(of_row, 1) + gl.expand_dims(token // 8 * (128 * P.warps) + token % 8, 0)


@gluon.jit
def allocate_stages(x_rows, P: gl.constexpr):
    """Shared memory for the sets of columns of x that are on their way, and the barriers that say which are there."""
    stages = gl.allocate_shared_memory(gl.float16, [P.stages, P.block, P.columns], x_rows.layout)
    ready = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = P.stages
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    return stages, ready


@gluon.jit
def begin_block(matrix, x_rows, block, begin, end, token0, P: gl.constexpr):
    """What a program does before its first product, for chunks begin .. end - 1 of a block of weight rows and rows of x
    from token0 on: its weights' first words are on their way, and, once the launch in front has ended, the first sets
    of x. The words, shared memory and barriers of the sets, this thread's tile and lane."""
    thread = gl.arange(0, 32 * P.warps, layout=gl.BlockedLayout([1], [32], [P.warps], [0]))
    lane = thread & 31
    tile = gl.minimum(tile_of(block, thread >> 5, P), matrix.tiles - 1)  # what is beyond is not stored
    words = load_turn(matrix.planes, tile, begin, end, lane, P)
    stages, ready = allocate_stages(x_rows, P)
    if P.flags.pdl and not P.flags.consumer:
        tl.extra.cuda.gdc_wait()
        if P.flags.producer:
            tl.extra.cuda.gdc_launch_dependents()
    STAGES: gl.constexpr = P.stages
    for i in gl.static_range(STAGES):
        copy_set(x_rows, stages, ready, i, i, begin * P.sets, (end - begin) * P.sets, token0, P)
    return words, stages, ready, tile, lane


@gluon.jit
def _add_splits(acc, split, place, places, partial_ptr, arrivals_ptr, MMA: gl.constexpr, P: gl.constexpr):
    """Leave the sums of a split at place `place` of `places`: for the program that arrives last, all splits added up,
    and True."""
    SIZE: gl.constexpr = 16 * P.warps * P.block
    AT_ONCE: gl.constexpr = P.at_once
    spread = _partial_offsets(MMA, P)
    gl.store(partial_ptr + (split * places + place) * SIZE + spread, acc)
    tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
    arrived = gl.atomic_add(arrivals_ptr + place, 1, sem="acq_rel", scope="gpu")
    last = arrived == P.splits - 1
    if last:
        gl.store(arrivals_ptr + place, 0)
        # Other programs wrote these: not from this multiprocessor's own cache. All at once would take more
        # registers than all that comes before; one after the other, a way to the L2 cache each.
        at = partial_ptr + place * SIZE + spread
        step = places * SIZE
        acc = gl.load(at, cache_modifier=".cg")
        for i in gl.static_range(1, AT_ONCE):
            acc += gl.load(at + i * step, cache_modifier=".cg")
        for start in range(AT_ONCE, P.splits, AT_ONCE):
            for i in gl.static_range(AT_ONCE):
                acc += gl.load(at + (start + i) * step, cache_modifier=".cg")
    return acc, last


@gluon.jit
def few_rows_program(
    matrix, x_rows, output, partial_ptr, arrivals_ptr, block, split, place, places, P: gl.constexpr
):  # fmt: skip
    """Block `block` of a part, split `split` of the columns; `place` of `places` among all blocks of the launch."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [P.warps, 1], [16, P.block, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    begin = split * P.split_chunks
    end = gl.minimum(begin + P.split_chunks, P.chunks)
    words, stages, ready, tile, lane = begin_block(matrix, x_rows, block, begin, end, 0, P)
    acc, words = multiply(
        matrix.planes, words, x_rows, stages, ready, tile, lane, begin, begin, end, end, 0, matrix.weight_scale,
        P, MMA, A,
    )  # fmt: skip
    if P.flags.pdl and P.flags.consumer:
        tl.extra.cuda.gdc_wait()
    finished = True
    if P.splits > 1:
        acc, finished = _add_splits(acc, split, place, places, partial_ptr, arrivals_ptr, MMA, P)
    if finished:
        store_sums(acc, block * (16 * P.warps), output, matrix.rows, matrix.weight_scale, MMA, P)
