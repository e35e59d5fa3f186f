"""Prefill attention on Hopper's warp-group matrix instruction: fp16 caches, heads of 128.

The same online softmax as attention_prefill.py's, but keys and values come by the copy engine, tiles ahead, and the
matrix units add up the tile before while the weights of this one are made: scores of a tile and the sum of values of
the one before are asked for together, and only the scores are waited for. Tiles are visited from the last, which the
diagonal crosses, to the first. A mask is positions compared. Results may be written as ordered rows (half.py): the
columns which lie side by side there are a thread's own, so it writes 16 bytes at a time.
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

from quengine.kernels.cuda.kv_store import BLOCK, BLOCK_BITS
from quengine.kernels.cuda.prompt_rows import TILE_FIELDS
from quengine.kernels.cuda.relaunch import Relaunched

HEAD_DIM = 128
TILE_ROWS = 128
TILE_KEYS = 128

_FIELDS = gl.constexpr(TILE_FIELDS)
_STAGES = gl.constexpr(2)
_ROWS = gl.constexpr(TILE_ROWS)
_KEYS = gl.constexpr(TILE_KEYS)
_SIZE = gl.constexpr(HEAD_DIM)
_BITS = gl.constexpr(TILE_KEYS.bit_length() - 1)

STAGED = gl.NVMMASharedLayout(128, 16, 2)
"""How rows lie in shared memory."""


@gluon.jit
def _places(table_ptr, blocks, head_row, tile, PAGED: gl.constexpr):
    """Rows of the cache at which the parts of key tile `tile` begin: one part, or blocks of a pool. `head_row`: where
    the head's rows begin. A tile below 0 gets some rows."""
    tile = gl.maximum(tile, 0)
    places = ()
    if PAGED:
        for part in gl.static_range(_KEYS // BLOCK):
            entry = gl.load(table_ptr + gl.minimum(tile * (_KEYS // BLOCK) + part, blocks - 1))
            places = places + (head_row + (entry << BLOCK_BITS),)
    else:
        places = places + (head_row + tile * _KEYS,)
    return places


@gluon.jit
def _copy_pair(k_rows, v_rows, staged, number, key_places, value_places, count, PAGED: gl.constexpr):
    """Start copying the values of tile `number` of this program's `count`, and the keys of the one behind it. `staged`:
    where in shared memory, and barriers that say what is there."""
    keys, values, keys_ready, values_ready = staged
    here = number % _STAGES
    behind = (number + 1) % _STAGES
    for_keys = number + 1 < count
    for_values = number < count
    PARTS: gl.constexpr = _KEYS // BLOCK if PAGED else 1
    # In this order, as the compiler has all threads meet between whatever touches the same barrier, or tile, in turns.
    mbarrier.expect(keys_ready.index(behind), _KEYS * _SIZE * 2, pred=for_keys)
    mbarrier.expect(values_ready.index(here), _KEYS * _SIZE * 2, pred=for_values)
    for part in gl.static_range(PARTS):
        _copy(k_rows, keys.index(behind), keys_ready.index(behind), key_places, part, for_keys, PARTS)
        _copy(v_rows, values.index(here), values_ready.index(here), value_places, part, for_values, PARTS)


@gluon.jit
def _copy(rows, tile, bar, places, part: gl.constexpr, on, PARTS: gl.constexpr):
    """Start copying a part of a tile of keys or values."""
    stage = tile if PARTS == 1 else tile.slice(part * (_KEYS // PARTS), _KEYS // PARTS, 0)
    tma.async_copy_global_to_shared(rows, [places[part], 0], bar, stage, pred=on)


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
    queries, staged, k_rows, v_rows, table_ptr, blocks, head_row, places, weights, mixed, largest, total, position,
    last_tile, begin, end, count, scale, WINDOW: gl.constexpr, PAGED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Tiles number begin .. end - 1 of this program's `count`, number 0 being `last_tile`, and the values of the tile
    in front of each, whose `weights` are made. `places`: of tile begin + 1. What `begin` needs is there."""
    keys, values, keys_ready, values_ready = staged
    MMA: gl.constexpr = mixed.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    for i in range(begin, end):
        later = _places(table_ptr, blocks, head_row, last_tile - i - 2, PAGED)
        scores = gl.zeros([_ROWS, _KEYS], gl.float32, MMA)
        scores = warpgroup_mma(
            queries, keys.index(i % _STAGES).permute((1, 0)), scores, use_acc=False, is_async=True
        )
        mixed = warpgroup_mma(weights, values.index((i - 1) % _STAGES), mixed, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        new, shrink, largest, total = _weigh(
            scores, largest, total, position, (last_tile - i) * _KEYS, scale, WINDOW, MASKED
        )
        # Here, so that there is a loop between the weights and the wait for the sums: the assembler would wait first.
        behind = i + 1
        mbarrier.wait(keys_ready.index(behind % _STAGES), (i // _STAGES) & 1, pred=behind < count)
        mbarrier.wait(values_ready.index(i % _STAGES), (i // _STAGES) & 1)
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        tl.debug_barrier()  # all warps have read the tiles which the next are copied over
        _copy_pair(k_rows, v_rows, staged, i + 1, later, places, count, PAGED)
        places = later
        mixed = mixed * gl.expand_dims(shrink, 1)
        weights = gl.convert_layout(new.to(gl.float16), A, assert_trivial=True)
    return weights, mixed, largest, total, places


@gluon.jit
def _clear_from(stage, first, WARPS: gl.constexpr):
    """Rows of values that nothing has been written to, from `first` on, become 0: a weight of 0 times what is no
    number would be none."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    live = gl.expand_dims(gl.arange(0, _KEYS, layout=gl.SliceLayout(1, L)) < first, 1)
    values = stage.load(L)
    stage.store(gl.where(live, values, 0.0))
    fence_async_shared()


@gluon.jit
def _store(out_ptr, mixed, row, width, copy, rows, ORDERED: gl.constexpr):
    """Store [rows, columns of a head] from `out_ptr` on; ORDERED: in both orders of columns (`half_place`)."""
    if ORDERED:
        # Thread (r, q) of a warp has columns 8 n + 2 q + e: of each place in either order, the lowest three bits lie
        # in one thread.
        L: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0], [64, 0]],
            [],
            [_ROWS, _SIZE],
        )
        near = gl.reshape(gl.permute(gl.reshape(mixed, [_ROWS, 4, 16, 2]), [0, 2, 1, 3]), [_ROWS, _SIZE])
        far = gl.reshape(gl.permute(gl.reshape(mixed, [_ROWS, 2, 4, 8, 2]), [0, 1, 3, 2, 4]), [_ROWS, _SIZE])
        token = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, L))
        place = gl.expand_dims(token * width, 1) + gl.expand_dims(
            gl.arange(0, _SIZE, layout=gl.SliceLayout(0, L)), 0
        )
        live = gl.expand_dims(token < rows, 1)
        gl.store(out_ptr + place, gl.convert_layout(near, L, assert_trivial=True), mask=live)
        gl.store(out_ptr + copy + place, gl.convert_layout(far, L, assert_trivial=True), mask=live)
    else:
        MMA: gl.constexpr = mixed.type.layout
        token = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, MMA))
        column = gl.expand_dims(gl.arange(0, _SIZE, layout=gl.SliceLayout(0, MMA)), 0)
        gl.store(
            out_ptr + (gl.expand_dims(token * width, 1) + column), mixed, mask=gl.expand_dims(token < rows, 1)
        )


@partial(Relaunched, layout=STAGED)
@gluon.jit(do_not_specialize=["start", "rows", "context", "blocks"])
def attention_wgmma_kernel(
    out_ptr, table_ptr, tile_ptr, q_rows, k_rows, v_rows, scale, start, rows, context, blocks, copy,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, WINDOW: gl.constexpr, PAGED: gl.constexpr, TILED: gl.constexpr,
    ORDERED: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs (query head, TILE_ROWS rows of a chunk). q_rows [T, heads * head size], k_rows and v_rows [rows of all
    heads, head size] are copied in blocks of [TILE_ROWS or TILE_KEYS, or BLOCK where PAGED, head size]."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, _SIZE, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WIDTH: gl.constexpr = HEADS * _SIZE
    queries = gl.allocate_shared_memory(gl.float16, [_ROWS, _SIZE], q_rows.layout)
    keys = gl.allocate_shared_memory(gl.float16, [_STAGES, _KEYS, _SIZE], k_rows.layout)
    values = gl.allocate_shared_memory(gl.float16, [_STAGES, _KEYS, _SIZE], v_rows.layout)
    first_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    staged = (keys, values, keys_ready, values_ready)
    mbarrier.init(first_ready, count=1)
    for i in gl.static_range(_STAGES):
        mbarrier.init(keys_ready.index(i), count=1)
        mbarrier.init(values_ready.index(i), count=1)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = gl.program_id(0)
    head_row = (head // (HEADS // KV_HEADS)) * context
    chunk_row = 0
    if TILED:
        tile_ptr += gl.program_id(1) * _FIELDS
        chunk_row = gl.load(tile_ptr)
        out_ptr += chunk_row.to(gl.int64) * WIDTH
        first_row = gl.load(tile_ptr + 1)
        rows = gl.load(tile_ptr + 2)
        start = gl.load(tile_ptr + 3)
        table_ptr += gl.load(tile_ptr + 4) * blocks
    else:
        # The last rows see the most keys: they start first, so that no long program is left over at the end.
        first_row = (gl.num_programs(1) - 1 - gl.program_id(1)) * _ROWS
    # Positions: the program's queries are first..last. Tiles of keys `high` .. below `last_tile`, and in a window those
    # from number `low` on, are seen by some rows only.
    first = start + first_row
    last = gl.minimum(first + _ROWS, start + rows) - 1
    last_tile = last >> _BITS
    count = last_tile + 1
    high = gl.maximum(last_tile - ((first + 1) >> _BITS) + 1, 1)
    low = count
    if WINDOW > 0:
        count = last_tile - (gl.maximum(first - (WINDOW - 1), 0) >> _BITS) + 1
        low = last_tile - ((gl.maximum(last - (WINDOW - 1), 0) + _KEYS - 1) >> _BITS) + 1
        high = gl.minimum(high, count)
        low = gl.maximum(gl.minimum(low, count), high)
    places = _places(table_ptr, blocks, head_row, last_tile, PAGED)
    mbarrier.expect(first_ready, (_ROWS + _KEYS) * _SIZE * 2)
    tma.async_copy_global_to_shared(q_rows, [chunk_row + first_row, head * _SIZE], first_ready, queries)
    for part in gl.static_range(_KEYS // BLOCK if PAGED else 1):
        _copy(k_rows, keys.index(0), first_ready, places, part, True, _KEYS // BLOCK if PAGED else 1)
    behind = _places(table_ptr, blocks, head_row, last_tile - 1, PAGED)
    _copy_pair(k_rows, v_rows, staged, 0, behind, places, count, PAGED)
    later = _places(table_ptr, blocks, head_row, last_tile - 2, PAGED)

    position = first + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, MMA))
    largest = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    total = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, MMA))
    mixed = gl.zeros([_ROWS, _SIZE], gl.float32, MMA)
    mbarrier.wait(first_ready, 0)
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), mixed, use_acc=False)
    weights, _, largest, total = _weigh(
        scores, largest, total, position, last_tile * _KEYS, scale, WINDOW, True
    )
    weights = gl.convert_layout(weights.to(gl.float16), A, assert_trivial=True)
    mbarrier.wait(keys_ready.index(1), 0, pred=count > 1)
    mbarrier.wait(values_ready.index(0), 0)
    written = start + rows - last_tile * _KEYS
    if written < _KEYS:
        _clear_from(values.index(0), written, WARPS)
    tl.debug_barrier()
    _copy_pair(k_rows, v_rows, staged, 1, later, behind, count, PAGED)

    weights, mixed, largest, total, later = _attend(
        queries, staged, k_rows, v_rows, table_ptr, blocks, head_row, later, weights, mixed, largest, total, position,
        last_tile, 1, high, count, scale, WINDOW, PAGED, True,
    )  # fmt: skip
    weights, mixed, largest, total, later = _attend(
        queries, staged, k_rows, v_rows, table_ptr, blocks, head_row, later, weights, mixed, largest, total, position,
        last_tile, high, low, count, scale, WINDOW, PAGED, False,
    )  # fmt: skip
    if WINDOW > 0:
        weights, mixed, largest, total, later = _attend(
            queries, staged, k_rows, v_rows, table_ptr, blocks, head_row, later, weights, mixed, largest, total,
            position, last_tile, low, count, count, scale, WINDOW, PAGED, True,
        )  # fmt: skip
    mixed = warpgroup_mma(weights, values.index((count - 1) % _STAGES), mixed)
    mixed = (mixed / gl.expand_dims(total, 1)).to(out_ptr.dtype.element_ty)
    _store(out_ptr + head * _SIZE, mixed, first_row, WIDTH, copy, rows, ORDERED)
