"""A program of the wgmma matmul: a block of weight rows times a block of rows of x, over all columns or a split of
them (split-K).

Where several programs share a block's columns, each stores its partial sums. Either the last to arrive adds them up in
the order of the columns. Or, with 17 to 128 rows of x, the last programs to start wait for the others, and each adds
the sums of some rows. Or each program stores rows of its own, which the next launch adds.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quengine.kernels.cuda.gemm.staged_book import with_staged_book
from quengine.kernels.cuda.gemm.wgmma_loop import copy_set, copy_sets, load_turn, multiply, multiply_alone
from quengine.kernels.cuda.gemm.wgmma_store import WgmmaOutput, store_block, store_sums, tile_of
from quengine.kernels.cuda.glu import SILU
from quengine.kernels.cuda.weights.many_rows import MOST_SHARES

_MOST_SHARES = gl.constexpr(MOST_SHARES)


class WgmmaMatrix(NamedTuple):
    """A packed part in a kernel. planes: pointers of its low, high, scale and super-scale planes."""

    planes: Any
    tiles: Any
    rows: Any
    weight_scale: Any


@gluon.jit
def wgmma_matrix(planes, tiles, rows, weight_scale, P: gl.constexpr):
    """A WgmmaMatrix whose codebook, if it has one, this program's P.warps warps have copied to shared memory."""
    FMT: gl.constexpr = P.layout
    THREADS: gl.constexpr = 32 * P.warps
    return WgmmaMatrix(with_staged_book(planes, FMT, THREADS), tiles, rows, weight_scale)


@gluon.jit
def partial_offsets(MMA: gl.constexpr, WARPS: gl.constexpr, TB: gl.constexpr):
    """Offsets of partial sums fp32 [16*WARPS, TB] in scratch: in thread order, two values of each thread
    adjacent, so that a warp writes 256 contiguous bytes. Offsets of fewer rows of x are a prefix of these.
    """
    row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA))
    token = gl.arange(0, TB, layout=gl.SliceLayout(0, MMA))
    of_row = ((row // 8) % 2) * (64 * WARPS) + (row // 16) * 64 + (row % 8) * 8
    return gl.expand_dims(of_row, 1) + gl.expand_dims(token // 8 * (128 * WARPS) + token % 8, 0)


@gluon.jit
def allocate_stages(x_rows, P: gl.constexpr):
    """Shared memory for the sets of columns of x in flight, and the barriers that signal their arrival."""
    stages = gl.allocate_shared_memory(gl.float16, [P.stages, P.block, P.columns], x_rows.layout)
    ready = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = P.stages
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    return stages, ready


@gluon.jit
def begin_block(matrix, x_rows, block, begin, end, token0, P: gl.constexpr):
    """A program's start, for chunks begin .. end - 1 of a block of weight rows and rows of x from token0 on:
    starts loading the first words of the weights, and, once the previous launch has ended, the first sets of
    x. Returns the words, the shared memory and barriers of the sets, this thread's tile and lane.
    """
    thread = gl.arange(0, 32 * P.warps, layout=gl.BlockedLayout([1], [32], [P.warps], [0]))
    lane = thread & 31
    tile = gl.minimum(tile_of(block, thread >> 5, P), matrix.tiles - 1)  # tiles past the end are not stored
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
def leave(acc, at, arrival_ptr, splits):
    """Stores the partial sums of one of `splits` splits at pointers `at`; returns whether all others have
    stored theirs.
    """
    gl.store(at, acc)
    tl.debug_barrier()  # all warps' stores come before the atomic that publishes them
    arrived = gl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu")
    return arrived == splits - 1


@gluon.jit
def _meet(counter, stays, P: gl.constexpr):
    """Counts this program at `counter`; if it `stays`, waits for the others of its block. Those that stayed count once
    more, which makes the counter zero. Why the others will have started: `WgmmaProgram.first_adding`.
    """
    thread = gl.arange(0, 32 * P.warps, layout=gl.BlockedLayout([1], [32], [P.warps], [0]))
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 count;
        setp.ne.u32 p, $2, 0; @p bra met;
        red.release.gpu.global.inc.u32 [$1], $5;
        setp.eq.u32 p, $3, 0; @p bra met;
        wait: ld.acquire.gpu.global.u32 count, [$1]; setp.lt.u32 p, count, $4; @p bra wait;
        red.relaxed.gpu.global.inc.u32 [$1], $5;
        met: mov.b32 $0, 0; }""",
        "=r,l,r,r,r,r",
        [
            counter + 0 * thread, thread, 0 * thread + stays.to(gl.int32), 0 * thread + P.splits,
            0 * thread + (P.splits + P.parts - 1),
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )  # fmt: skip
    tl.debug_barrier()


@gluon.jit
def _add_splits(
    acc, block, split, place, places, output, rows, weight_scale, partial_ptr, arrivals_ptr,
    MMA: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Stores the partial sums of a split at place `place` of `places`. The last P.parts programs of a block wait for
    the others, and each adds and stores the sums of as many rows of x; or, if that is one, the last to arrive does it.
    """
    WARPS: gl.constexpr = P.warps
    SIZE: gl.constexpr = 16 * WARPS * P.block
    PART: gl.constexpr = P.block // P.parts
    OF_PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
    own = partial_ptr + (split * places + place) * SIZE + partial_offsets(MMA, WARPS, P.block)
    if P.parts == 1:
        part = 0
        adds = leave(acc, own, arrivals_ptr + place, P.splits)
        gl.store(arrivals_ptr + place, 0, mask=adds)
    else:
        part = split - P.first_adding
        adds = part >= 0
        gl.store(own, acc)
        tl.debug_barrier()  # all warps' stores come before the count that publishes them
        _meet(arrivals_ptr + place, adds, P)
    if adds:
        # Other programs wrote these: bypass this multiprocessor's L1. All splits at once, as one by one each would cost
        # an L2 latency.
        at = partial_ptr + place * SIZE + part * (16 * WARPS * PART) + partial_offsets(OF_PART, WARPS, PART)
        y = gl.load(at, cache_modifier=".cg")
        SPLITS: gl.constexpr = P.splits
        for i in gl.static_range(1, SPLITS):
            y += gl.load(at + i * (places * SIZE), cache_modifier=".cg")
        store_sums(y, block * (16 * WARPS), output, rows, weight_scale, OF_PART, P, part * PART)


@gluon.jit
def _rows_of_split(output, split):
    """The output of split number `split`, whose rows lie after those of the splits before it."""
    ptr = output.ptr + split * (output.rows * output.stride)
    return WgmmaOutput(
        output.row_scale_ptr, output.residual_ptr, ptr, output.out_row_scale_ptr, output.first, output.stride,
        output.rows, output.bound,
    )  # fmt: skip


@gluon.jit
def few_rows_program(
    matrix, x_rows, output, partial_ptr, arrivals_ptr, block, split, place, places, P: gl.constexpr
):  # fmt: skip
    """Computes block `block` of a part, split `split` of the columns; `place` of `places` among all blocks of
    the launch.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [P.warps, 1], [16, P.block, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    begin = split * P.split_chunks
    end = gl.minimum(begin + P.split_chunks, P.chunks)
    words, stages, ready, tile, lane = begin_block(matrix, x_rows, block, begin, end, 0, P)
    acc, words = multiply(
        matrix.planes, words, x_rows, stages, ready, tile, lane, begin, begin, end, end, 0, matrix.weight_scale,
        P, MMA, A, P.even,
    )  # fmt: skip
    if P.flags.pdl and P.flags.consumer:
        tl.extra.cuda.gdc_wait()
    if P.flags.apart:
        output = _rows_of_split(output, split)
    if P.splits > 1 and not P.flags.apart:
        _add_splits(
            acc, block, split, place, places, output, matrix.rows, matrix.weight_scale, partial_ptr, arrivals_ptr,
            MMA, P,
        )  # fmt: skip
    else:
        store_sums(acc, block * (16 * P.warps), output, matrix.rows, matrix.weight_scale, MMA, P)


class Share(NamedTuple):
    """The work of a program of many rows: block number `block` of weight rows, rows of x from token0 on,
    chunks begin .. end - 1. If `splits` programs share the columns (`shared`), it is number `split`, and the
    block is `place` of `places` among the shared blocks.
    """

    block: Any
    token0: Any
    begin: Any
    end: Any
    shared: Any
    split: Any
    splits: Any
    place: Any
    places: Any


@gluon.jit
def share_of(program, whole, splits, split_chunks, tiles, tokens, TILES: gl.constexpr, P: gl.constexpr):
    """The share of program number `program`: each of the first `whole` blocks, of TILES tiles by P.block rows
    of x, is one program's; each following block is shared by `splits` programs of `split_chunks` chunks.
    """
    beyond = gl.maximum(program - whole, 0)
    split = beyond % splits
    place = gl.minimum(program, whole) + beyond // splits
    token_blocks = (tokens + P.block - 1) // P.block
    begin = split * split_chunks
    end = gl.where(place < whole, P.chunks, gl.minimum(begin + split_chunks, P.chunks))
    return Share(
        place // token_blocks, place % token_blocks * P.block, begin, end, place >= whole, split, splits,
        place - whole, token_blocks * ((tiles + TILES - 1) // TILES) - whole,
    )  # fmt: skip


@gluon.jit
def finish_share(
    acc, share, block, place, places, output, rows, weight_scale, partial_ptr, arrivals_ptr,
    MMA: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Stores the sums of an unshared block; for a shared one, stores partial sums, which the last program to
    arrive adds up from memory, a few rows of x at a time: all at once, besides the sums in registers, would
    be twice the instructions. Rows of splits `apart` are stored as an unshared block's.
    """
    WARPS: gl.constexpr = P.warps
    TB: gl.constexpr = P.block
    SIZE: gl.constexpr = 16 * WARPS * TB
    PART: gl.constexpr = 64
    AT_ONCE: gl.constexpr = PART if P.flags.epilogue >= SILU else 32
    if P.flags.apart:
        output = _rows_of_split(output, share.split)
        store_block(acc, block * (16 * WARPS), share.token0, output, rows, weight_scale, P, TB, AT_ONCE)
    elif share.shared:
        own = partial_ptr + (share.split * places + place) * SIZE
        if leave(acc, own + partial_offsets(MMA, WARPS, TB), arrivals_ptr + place, share.splits):
            gl.store(arrivals_ptr + place, 0)
            OF_PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
            at = partial_ptr + place * SIZE + partial_offsets(OF_PART, WARPS, PART)
            for part in range(TB // PART):
                y = gl.zeros([16 * WARPS, PART], gl.float32, OF_PART)
                for i in gl.static_range(_MOST_SHARES):
                    split = at + i * (places * SIZE) + part * (16 * WARPS * PART)
                    y += gl.load(split, mask=i < share.splits, other=0.0, cache_modifier=".cg")
                store_block(
                    y, block * (16 * WARPS), share.token0 + part * PART, output, rows, weight_scale, P, PART, AT_ONCE
                )  # fmt: skip
    else:
        store_block(acc, block * (16 * WARPS), share.token0, output, rows, weight_scale, P, TB, AT_ONCE)


@gluon.jit
def consumer_group(
    group: gl.constexpr, matrix, output, share, stages, ready, free, partial_ptr, arrivals_ptr, P: gl.constexpr
):  # fmt: skip
    """One of two warp groups that share a program's rows of x; they alternate in blocks of P.warps tiles."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [P.warps, 1], [16, P.block, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    thread = gl.arange(0, 32 * P.warps, layout=gl.BlockedLayout([1], [32], [P.warps], [0]))
    lane = thread & 31
    block = 2 * share.block + group
    tile = gl.minimum(tile_of(block, thread >> 5, P), matrix.tiles - 1)  # tiles past the end are not stored
    words = load_turn(matrix.planes, tile, share.begin, share.end, lane, P)
    if P.flags.pdl and not P.flags.consumer:
        tl.extra.cuda.gdc_wait()
    acc = multiply_alone(
        matrix.planes, words, stages, ready, free, tile, lane, share.begin, share.end, matrix.weight_scale, P, MMA, A
    )  # fmt: skip
    if P.flags.pdl and P.flags.consumer:
        tl.extra.cuda.gdc_wait()
    finish_share(
        acc, share, block, 2 * share.place + group, 2 * share.places, output, matrix.rows, matrix.weight_scale,
        partial_ptr, arrivals_ptr, MMA, P,
    )  # fmt: skip


@gluon.jit
def producer_warp(x_rows, share, stages, ready, free, P: gl.constexpr):
    """Copies the rows of x for both groups, once the previous launch has ended."""
    if P.flags.pdl and not P.flags.consumer:
        tl.extra.cuda.gdc_wait()
        if P.flags.producer:
            tl.extra.cuda.gdc_launch_dependents()
    copy_sets(x_rows, stages, ready, free, share.begin, share.end, share.token0, P)
