"""Prefill attention on Hopper's warp-group matrix instruction: fp16 caches, heads of 128.

The same online softmax as attention_prefill.py's, with warps of three kinds. One copies tiles of keys and values to
shared memory by the copy engine, ahead of two groups of four warps that take half of a program's rows each. These meet
nobody: what is there, and what may be written over, is said by barriers in shared memory, so that one makes weights
while the matrix units work for the other. Beside that, a group asks for the scores of a tile and the sum of values of
the tile before together, and waits for the scores only. Tiles are visited from the last, which the diagonal crosses, to
the first. A mask is positions compared. Results may be written as ordered rows (half.py): columns which lie side by
side there are a thread's own, so it writes 16 bytes at a time.
Does not know: which launches come here (attention_prefill.py), rotation, or where the cache's blocks come from.
"""

from functools import partial

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quengine.kernels.cuda.attention.kv_store import BLOCK, BLOCK_BITS
from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS
from quengine.kernels.cuda.launch.relaunch import Relaunched

HEAD_DIM = 128
GROUP_ROWS = 64
TILE_ROWS = 2 * GROUP_ROWS
TILE_KEYS = 128

_FIELDS = gl.constexpr(TILE_FIELDS)
_STAGES = gl.constexpr(2)
_GROUPS = gl.constexpr(2)
_ROWS = gl.constexpr(GROUP_ROWS)
_KEYS = gl.constexpr(TILE_KEYS)
_SIZE = gl.constexpr(HEAD_DIM)
_BITS = gl.constexpr(TILE_KEYS.bit_length() - 1)

STAGED = gl.NVMMASharedLayout(128, 16, 2)
"""How rows lie in shared memory."""


@gluon.jit
def _copy_tile(rows, stage, bar, table_ptr, blocks, head_row, tile, PAGED: gl.constexpr):
    """Copy key tile `tile` of a head whose rows begin at `head_row`: whole, or by blocks of a pool."""
    mbarrier.expect(bar, _KEYS * _SIZE * 2)
    if PAGED:
        for part in gl.static_range(_KEYS // BLOCK):
            entry = gl.load(table_ptr + gl.minimum(tile * (_KEYS // BLOCK) + part, blocks - 1))
            place = head_row + (entry << BLOCK_BITS)
            tma.async_copy_global_to_shared(rows, [place, 0], bar, stage.slice(part * BLOCK, BLOCK, 0))
    else:
        tma.async_copy_global_to_shared(rows, [head_row + tile * _KEYS, 0], bar, stage)


@gluon.jit
def _copy_all(
    q_rows, k_rows, v_rows, shared, table_ptr, blocks, head_row, query_row, column, last_tile, count,
    PAGED: gl.constexpr,
):  # fmt: skip
    """What the copying warp does: `count` tiles from `last_tile` down."""
    queries, keys, values, query_ready, keys_ready, values_ready, keys_free, values_free, _ = shared
    mbarrier.expect(query_ready, _GROUPS * _ROWS * _SIZE * 2)
    for group in gl.static_range(_GROUPS):
        tma.async_copy_global_to_shared(
            q_rows, [query_row + group * _ROWS, column], query_ready, queries.index(group)
        )
    for i in range(count):
        stage = i % _STAGES
        free = ((i // _STAGES) & 1) ^ 1
        tile = last_tile - i
        mbarrier.wait(keys_free.index(stage), free)
        _copy_tile(
            k_rows, keys.index(stage), keys_ready.index(stage), table_ptr, blocks, head_row, tile, PAGED
        )
        mbarrier.wait(values_free.index(stage), free)
        _copy_tile(
            v_rows, values.index(stage), values_ready.index(stage), table_ptr, blocks, head_row, tile, PAGED
        )


@gluon.jit
def _weigh(scores, largest, total, position, key0, scale, WINDOW: gl.constexpr, MASKED: gl.constexpr):
    """One step of the online softmax (Milakov & Gimelshein 2018): weights [rows, keys], and by what the sums so far
    shrink. Only a MASKED tile may hold keys that some row does not see."""
    if MASKED:
        MMA: gl.constexpr = scores.type.layout
        key = gl.expand_dims(key0 + gl.arange(0, _KEYS, layout=gl.SliceLayout(0, MMA)), 0)
        at = gl.expand_dims(position, 1)
        visible = key <= at
        if WINDOW > 0:
            visible = visible & (key > at - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    new_largest = gl.maximum(largest, gl.max(scores, 1) * scale)
    base = new_largest
    if MASKED:
        base = gl.where(new_largest == float("-inf"), 0.0, new_largest)
    shrink = gl.exp2(largest - base)
    weights = gl.exp2(scores * scale - gl.expand_dims(base, 1))
    total = total * shrink + gl.sum(weights, 1)
    return weights, shrink, new_largest, total


@gluon.jit
def _attend(
    queries, shared, weights, mixed, largest, total, position, last_tile, begin, end, count, scale,
    WINDOW: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Tiles number begin .. end - 1 of this program's `count`, number 0 being `last_tile`, and the values of the tile
    in front of each, whose `weights` are made. The keys of `begin` are there."""
    _, keys, values, _, keys_ready, values_ready, keys_free, values_free, _ = shared
    MMA: gl.constexpr = mixed.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    for i in range(begin, end):
        here = i % _STAGES
        before = (i - 1) % _STAGES
        behind = (i + 1) % _STAGES
        scores = gl.zeros([_ROWS, _KEYS], gl.float32, MMA)
        scores = warpgroup_mma(
            queries, keys.index(here).permute((1, 0)), scores, use_acc=False, is_async=True
        )
        mbarrier.wait(values_ready.index(before), ((i - 1) // _STAGES) & 1)
        mixed = warpgroup_mma(weights, values.index(before), mixed, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(keys_free.index(here), count=1)
        new, shrink, largest, total = _weigh(
            scores, largest, total, position, (last_tile - i) * _KEYS, scale, WINDOW, MASKED
        )
        # Here, so that there is a loop between the weights and the wait for the sums: the assembler would wait first.
        mbarrier.wait(keys_ready.index(behind), ((i + 1) // _STAGES) & 1, pred=i + 1 < count)
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        mbarrier.arrive(values_free.index(before), count=1)
        mixed = mixed * gl.expand_dims(shrink, 1)
        weights = gl.convert_layout(new.to(gl.float16), A, assert_trivial=True)
    return weights, mixed, largest, total


@gluon.jit
def _clear_from(stage, first):
    """Rows [keys / 2] of values that nothing has been written to, from `first` on, become 0: a weight of 0 times what
    is no number would be none."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    live = gl.expand_dims(gl.arange(0, _KEYS // _GROUPS, layout=gl.SliceLayout(1, L)) < first, 1)
    values = stage.load(L)
    stage.store(gl.where(live, values, 0.0))
    fence_async_shared()


@gluon.jit
def _store(out_ptr, mixed, row, width, rows, ORDERED: gl.constexpr):
    """Store [rows, columns of a head] from `out_ptr` on; ORDERED: with the columns in order (`operand_offset`)."""
    if ORDERED:
        # Thread (r, q) of a warp has columns 8 n + 2 q + e: the lowest three bits of a place lie in one thread.
        L: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [_ROWS, _SIZE],
        )
        mixed = gl.reshape(gl.permute(gl.reshape(mixed, [_ROWS, 4, 16, 2]), [0, 2, 1, 3]), [_ROWS, _SIZE])
        token = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, L))
        place = gl.expand_dims(token * width, 1) + gl.expand_dims(
            gl.arange(0, _SIZE, layout=gl.SliceLayout(0, L)), 0
        )
        mixed = gl.convert_layout(mixed, L, assert_trivial=True)
        gl.store(out_ptr + place, mixed, mask=gl.expand_dims(token < rows, 1))
    else:
        MMA: gl.constexpr = mixed.type.layout
        token = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, MMA))
        column = gl.expand_dims(gl.arange(0, _SIZE, layout=gl.SliceLayout(0, MMA)), 0)
        gl.store(
            out_ptr + (gl.expand_dims(token * width, 1) + column), mixed, mask=gl.expand_dims(token < rows, 1)
        )


@gluon.jit
def _one_group(
    group: gl.constexpr, shared, out_ptr, scale, start, first_row, rows, last_tile, count,
    width: gl.constexpr, WINDOW: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """What group `group` of four warps does: its half of the program's rows."""
    queries, keys, values, query_ready, keys_ready, values_ready, keys_free, _, cleared = shared
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIZE, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    row = first_row + group * _ROWS
    # Tiles of keys below number `high`, and in a window those from number `low` on, are seen by some rows only.
    first = start + row
    high = gl.minimum(gl.maximum(last_tile - ((first + 1) >> _BITS) + 1, 1), count)
    low = count
    if WINDOW > 0:
        last = gl.minimum(first + _ROWS, start + rows) - 1
        low = last_tile - ((gl.maximum(last - (WINDOW - 1), 0) + _KEYS - 1) >> _BITS) + 1
        low = gl.maximum(gl.minimum(low, count), high)
    position = first + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, MMA))
    largest = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    total = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, MMA))
    mixed = gl.zeros([_ROWS, _SIZE], gl.float32, MMA)
    written = start + rows - last_tile * _KEYS
    if written < _KEYS:
        mbarrier.wait(values_ready.index(0), 0)
        HALF: gl.constexpr = _KEYS // _GROUPS
        _clear_from(values.index(0).slice(group * HALF, HALF, 0), written - group * HALF)
        tl.debug_barrier()
        mbarrier.arrive(cleared, count=1)
        mbarrier.wait(cleared, 0)
    mbarrier.wait(query_ready, 0)
    mbarrier.wait(keys_ready.index(0), 0)
    mine = queries.index(group)
    scores = warpgroup_mma(mine, keys.index(0).permute((1, 0)), mixed, use_acc=False)
    mbarrier.arrive(keys_free.index(0), count=1)
    weights, _, largest, total = _weigh(
        scores, largest, total, position, last_tile * _KEYS, scale, WINDOW, True
    )
    weights = gl.convert_layout(weights.to(gl.float16), A, assert_trivial=True)
    mbarrier.wait(keys_ready.index(1), 0, pred=count > 1)
    weights, mixed, largest, total = _attend(
        mine, shared, weights, mixed, largest, total, position, last_tile, 1, high, count, scale, WINDOW, True
    )
    weights, mixed, largest, total = _attend(
        mine, shared, weights, mixed, largest, total, position, last_tile, high, low, count, scale, WINDOW, False
    )  # fmt: skip
    if WINDOW > 0:
        weights, mixed, largest, total = _attend(
            mine, shared, weights, mixed, largest, total, position, last_tile, low, count, count, scale, WINDOW, True
        )  # fmt: skip
    end = count - 1
    mbarrier.wait(values_ready.index(end % _STAGES), (end // _STAGES) & 1)
    mixed = warpgroup_mma(weights, values.index(end % _STAGES), mixed)
    mixed = (mixed / gl.expand_dims(total, 1)).to(out_ptr.dtype.element_ty)
    _store(out_ptr, mixed, row, width, rows, ORDERED)


@partial(Relaunched, layout=STAGED)
@gluon.jit(do_not_specialize=["start", "rows", "context", "blocks"])
def attention_wgmma_kernel(
    out_ptr, table_ptr, tile_ptr, q_rows, k_rows, v_rows, scale, start, rows, context, blocks,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, WINDOW: gl.constexpr, PAGED: gl.constexpr, TILED: gl.constexpr,
    ORDERED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs (query head, TILE_ROWS rows of a chunk). q_rows [T, heads * head size], k_rows and v_rows [rows of all
    heads, head size] are copied in blocks of [GROUP_ROWS, or TILE_KEYS, or BLOCK where PAGED, head size]."""
    WIDTH: gl.constexpr = HEADS * _SIZE
    queries = gl.allocate_shared_memory(gl.float16, [_GROUPS, _ROWS, _SIZE], q_rows.layout)
    keys = gl.allocate_shared_memory(gl.float16, [_STAGES, _KEYS, _SIZE], k_rows.layout)
    values = gl.allocate_shared_memory(gl.float16, [_STAGES, _KEYS, _SIZE], v_rows.layout)
    query_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    shared = (queries, keys, values, query_ready, keys_ready, values_ready, keys_free, values_free, cleared)
    mbarrier.init(query_ready, count=1)
    mbarrier.init(cleared, count=_GROUPS)
    for i in gl.static_range(_STAGES):
        mbarrier.init(keys_ready.index(i), count=1)
        mbarrier.init(values_ready.index(i), count=1)
        mbarrier.init(keys_free.index(i), count=_GROUPS)
        mbarrier.init(values_free.index(i), count=_GROUPS)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = gl.program_id(0)
    head_row = (head // (HEADS // KV_HEADS)) * context
    if TILED:
        tile_ptr += gl.program_id(1) * _FIELDS
        chunk_row = gl.load(tile_ptr)
        out_ptr += chunk_row.to(gl.int64) * WIDTH
        first_row = gl.load(tile_ptr + 1)
        rows = gl.load(tile_ptr + 2)
        start = gl.load(tile_ptr + 3)
        table_ptr += gl.load(tile_ptr + 4) * blocks
        query_row = chunk_row + first_row
    else:
        # The last rows see the most keys: they start first, so that no long program is left over at the end.
        first_row = (gl.num_programs(1) - 1 - gl.program_id(1)) * (_GROUPS * _ROWS)
        query_row = first_row
    out_ptr += head * _SIZE
    # Positions: the program's queries are first .. last.
    first = start + first_row
    # A program of no rows goes through one tile for nothing.
    last_tile = (gl.maximum(gl.minimum(first + _GROUPS * _ROWS, start + rows), 1) - 1) >> _BITS
    count = last_tile + 1
    if WINDOW > 0:
        count = last_tile - (gl.maximum(first - (WINDOW - 1), 0) >> _BITS) + 1
    # Written out: in a variable, constants would be none.
    gl.warp_specialize(
        [
            (
                _one_group,
                (0, shared, out_ptr, scale, start, first_row, rows, last_tile, count, WIDTH, WINDOW, ORDERED),
            ),
            (
                _one_group,
                (1, shared, out_ptr, scale, start, first_row, rows, last_tile, count, WIDTH, WINDOW, ORDERED),
            ),
            (
                _copy_all,
                (
                    q_rows, k_rows, v_rows, shared, table_ptr, blocks, head_row, query_row, head * _SIZE, last_tile,
                    count, PAGED,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
