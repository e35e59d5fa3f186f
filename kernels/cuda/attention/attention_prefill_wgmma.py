"""Prefill attention with Hopper's warp-group matrix instruction (wgmma): fp16 caches, heads of 128 and 256.

The online softmax of attention_prefill.py, with specialized warps. A producer warp copies tiles of keys and values to
shared memory by TMA, ahead of two consumer warp groups that take half of a program's rows each. Producer and consumers
synchronize by mbarriers alone (full and free), so that one group computes softmax weights while the matrix units work
for the other. Within a group, the score product of a tile and the value product of the tile before are issued
together, and only the scores are waited for. Tiles are visited from the last, which the diagonal crosses, to the
first; the mask compares positions. Results may be written in the WGMMA layout (fp16_operand.py): columns that are
adjacent there belong to one thread, which writes 16 bytes at a time.
"""

from functools import partial

import torch
import triton
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

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cuda.attention.attention_arguments import LOG2_E, checked_sinks
from quengine.kernels.cuda.attention.kv_store import BLOCK, BLOCK_BITS, cache_pointers
from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS
from quengine.kernels.cuda.launch.kernel import Copied, DirectLaunch
from quengine.kernels.kv.cache_types import BLOCK_SIZE

KEYS_OF = {128: 128, 256: 64}
"""Keys of a tile by head size: two tiles of keys and of values fill shared memory."""
GROUP_ROWS = 64
TILE_ROWS = 2 * GROUP_ROWS

_FIELDS = gl.constexpr(TILE_FIELDS)
_STAGES = gl.constexpr(2)
_GROUPS = gl.constexpr(2)
_ROWS = gl.constexpr(GROUP_ROWS)
_LOG2_E = gl.constexpr(LOG2_E)

STAGED = gl.NVMMASharedLayout(128, 16, 2)
"""The shared-memory layout of rows."""


@triton.constexpr_function
def _log2(count: int) -> int:
    return count.bit_length() - 1


@gluon.jit
def _copy_tile(rows, stage, bar, table_ptr, blocks, first, head_row, tile, WINDOW: gl.constexpr):
    """Copies key tile `tile` of a head whose rows begin at `head_row`, block by block. Blocks before the one
    where the window of position `first` begins may have been released: that block is copied instead.
    """
    KEYS: gl.constexpr = stage.shape[0]
    SIZE: gl.constexpr = stage.shape[1]
    mbarrier.expect(bar, KEYS * SIZE * 2)
    for part in gl.static_range(KEYS // BLOCK):
        block = tile * (KEYS // BLOCK) + part
        if WINDOW > 0:
            block = gl.maximum(block, gl.maximum(first - (WINDOW - 1), 0) >> BLOCK_BITS)
        entry = gl.load(table_ptr + gl.minimum(block, blocks - 1))
        row = head_row + (entry << BLOCK_BITS)
        tma.async_copy_global_to_shared(rows, [row, 0], bar, stage.slice(part * BLOCK, BLOCK, 0))


@gluon.jit
def _copy_all(
    q_rows, k_rows, v_rows, shared, table_ptr, blocks, first, head_row, query_row, column, last_tile, count,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """The producer warp: copies the queries, then `count` tiles from `last_tile` down."""
    queries, keys, values, query_ready, keys_ready, values_ready, keys_free, values_free, _ = shared
    SIZE: gl.constexpr = queries.shape[2]
    mbarrier.expect(query_ready, _GROUPS * _ROWS * SIZE * 2)
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
            k_rows,
            keys.index(stage),
            keys_ready.index(stage),
            table_ptr,
            blocks,
            first,
            head_row,
            tile,
            WINDOW,
        )
        mbarrier.wait(values_free.index(stage), free)
        _copy_tile(
            v_rows, values.index(stage), values_ready.index(stage), table_ptr, blocks, first, head_row, tile, WINDOW
        )  # fmt: skip


@gluon.jit
def _weigh(scores, row_max, row_sum, position, key0, scale, WINDOW: gl.constexpr, MASKED: gl.constexpr):
    """One step of the online softmax (Milakov & Gimelshein 2018): weights [rows, keys], and the factor
    `rescale` of the sums so far. Only with MASKED may the tile hold keys that some row does not see.
    """
    if MASKED:
        MMA: gl.constexpr = scores.type.layout
        KEYS: gl.constexpr = scores.shape[1]
        key = gl.expand_dims(key0 + gl.arange(0, KEYS, layout=gl.SliceLayout(0, MMA)), 0)
        at = gl.expand_dims(position, 1)
        visible = key <= at
        if WINDOW > 0:
            visible = visible & (key > at - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    base = new_max
    if MASKED:
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = gl.exp2(row_max - base)
    weights = gl.exp2(scores * scale - gl.expand_dims(base, 1))
    row_sum = row_sum * rescale + gl.sum(weights, 1)
    return weights, rescale, new_max, row_sum


@gluon.jit
def _attend(
    queries, shared, weights, acc, row_max, row_sum, position, last_tile, begin, end, count, scale,
    WINDOW: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Attends to tiles begin .. end - 1 of this program's `count`, number 0 being `last_tile`.

    The score product of a tile overlaps with the value product of the tile before, whose softmax weights are
    `weights`. The keys of tile `begin` have arrived.
    """
    _, keys, values, _, keys_ready, values_ready, keys_free, values_free, _ = shared
    KEYS: gl.constexpr = keys.shape[1]
    SUMS: gl.constexpr = acc.type.layout
    SCORES: gl.constexpr = row_max.type.layout.parent
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    for i in range(begin, end):
        this = i % _STAGES
        previous = (i - 1) % _STAGES
        following = (i + 1) % _STAGES
        scores = gl.zeros([_ROWS, KEYS], gl.float32, SCORES)
        scores = warpgroup_mma(
            queries, keys.index(this).permute((1, 0)), scores, use_acc=False, is_async=True
        )
        mbarrier.wait(values_ready.index(previous), ((i - 1) // _STAGES) & 1)
        acc = warpgroup_mma(weights, values.index(previous), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(keys_free.index(this), count=1)
        new, rescale, row_max, row_sum = _weigh(
            scores, row_max, row_sum, position, (last_tile - i) * KEYS, scale, WINDOW, MASKED
        )
        # Placed here so that a loop separates the weights from the wait for the sums: the assembler would wait first.
        mbarrier.wait(keys_ready.index(following), ((i + 1) // _STAGES) & 1, pred=i + 1 < count)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(values_free.index(previous), count=1)
        acc = acc * gl.expand_dims(
            gl.convert_layout(rescale, gl.SliceLayout(1, SUMS), assert_trivial=True), 1
        )
        weights = gl.convert_layout(new.to(gl.float16), A, assert_trivial=True)
    return weights, acc, row_max, row_sum


@gluon.jit
def _clear_from(stage, first):
    """Clears rows [keys / 2] of values from `first` on, which have not been written: a weight of 0 times NaN
    would be NaN.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    COUNT: gl.constexpr = stage.shape[0]
    live = gl.expand_dims(gl.arange(0, COUNT, layout=gl.SliceLayout(1, L)) < first, 1)
    values = stage.load(L)
    stage.store(gl.where(live, values, 0.0))
    fence_async_shared()


@gluon.jit
def _store(out_ptr, acc, row, width, rows, WGMMA_LAYOUT: gl.constexpr):
    """Stores [rows, columns of a head] from `out_ptr` on, as plain rows or in the WGMMA layout (`operand_offset`)."""
    SIZE: gl.constexpr = acc.shape[1]
    if WGMMA_LAYOUT:
        # Thread (r, q) of a warp has columns 8 n + 2 q + e: it holds all values of an offset's lowest three bits.
        L: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]] + [[0, 128]] * (SIZE // 256),
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [_ROWS, SIZE],
        )
        apart = gl.permute(gl.reshape(acc, [_ROWS, SIZE // 128, 4, 16, 2]), [0, 1, 3, 2, 4])
        acc = gl.reshape(apart, [_ROWS, SIZE])
        token = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, L))
        place = gl.expand_dims(token * width, 1) + gl.expand_dims(
            gl.arange(0, SIZE, layout=gl.SliceLayout(0, L)), 0
        )
        acc = gl.convert_layout(acc, L, assert_trivial=True)
        gl.store(out_ptr + place, acc, mask=gl.expand_dims(token < rows, 1))
    else:
        MMA: gl.constexpr = acc.type.layout
        token = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, MMA))
        column = gl.expand_dims(gl.arange(0, SIZE, layout=gl.SliceLayout(0, MMA)), 0)
        gl.store(
            out_ptr + (gl.expand_dims(token * width, 1) + column), acc, mask=gl.expand_dims(token < rows, 1)
        )


@gluon.jit
def _one_group(
    group: gl.constexpr, shared, out_ptr, sink_ptr, scale, start, first_row, rows, last_tile, count,
    width: gl.constexpr, WINDOW: gl.constexpr, WGMMA_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Consumer warp group `group`: half of the program's rows. sink_ptr: the head's sink, or None."""
    queries, keys, values, query_ready, keys_ready, values_ready, keys_free, _, cleared = shared
    KEYS: gl.constexpr = keys.shape[1]
    SIZE: gl.constexpr = keys.shape[2]
    BITS: gl.constexpr = _log2(KEYS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    row = first_row + group * _ROWS
    # Tiles before number `high`, and with a window those from number `low` on, are visible to some rows only.
    first = start + row
    high = gl.minimum(gl.maximum(last_tile - ((first + 1) >> BITS) + 1, 1), count)
    low = count
    if WINDOW > 0:
        last = gl.minimum(first + _ROWS, start + rows) - 1
        low = last_tile - ((gl.maximum(last - (WINDOW - 1), 0) + KEYS - 1) >> BITS) + 1
        low = gl.maximum(gl.minimum(low, count), high)
    position = first + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, MMA))
    row_max = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    row_sum = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, MMA))
    if sink_ptr is not None:  # the softmax starts from the sink, a logit without a value
        row_max = row_sum + gl.load(sink_ptr) * _LOG2_E
        row_sum += 1.0
    acc = gl.zeros([_ROWS, SIZE], gl.float32, SUMS)
    written = start + rows - last_tile * KEYS
    if written < KEYS:
        mbarrier.wait(values_ready.index(0), 0)
        HALF: gl.constexpr = KEYS // _GROUPS
        _clear_from(values.index(0).slice(group * HALF, HALF, 0), written - group * HALF)
        tl.debug_barrier()
        mbarrier.arrive(cleared, count=1)
        mbarrier.wait(cleared, 0)
    mbarrier.wait(query_ready, 0)
    mbarrier.wait(keys_ready.index(0), 0)
    mine = queries.index(group)
    scores = gl.zeros([_ROWS, KEYS], gl.float32, MMA)
    scores = warpgroup_mma(mine, keys.index(0).permute((1, 0)), scores, use_acc=False)
    mbarrier.arrive(keys_free.index(0), count=1)
    weights, _, row_max, row_sum = _weigh(
        scores, row_max, row_sum, position, last_tile * KEYS, scale, WINDOW, True
    )
    weights = gl.convert_layout(weights.to(gl.float16), A, assert_trivial=True)
    mbarrier.wait(keys_ready.index(1), 0, pred=count > 1)
    weights, acc, row_max, row_sum = _attend(
        mine, shared, weights, acc, row_max, row_sum, position, last_tile, 1, high, count, scale, WINDOW, True
    )
    weights, acc, row_max, row_sum = _attend(
        mine, shared, weights, acc, row_max, row_sum, position, last_tile, high, low, count, scale, WINDOW, False
    )  # fmt: skip
    if WINDOW > 0:
        weights, acc, row_max, row_sum = _attend(
            mine, shared, weights, acc, row_max, row_sum, position, last_tile, low, count, count, scale, WINDOW, True
        )  # fmt: skip
    end = count - 1
    mbarrier.wait(values_ready.index(end % _STAGES), (end // _STAGES) & 1)
    acc = warpgroup_mma(weights, values.index(end % _STAGES), acc)
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, SUMS), assert_trivial=True)
    acc = (acc / gl.expand_dims(row_sum, 1)).to(out_ptr.dtype.element_ty)
    _store(out_ptr, acc, row, width, rows, WGMMA_LAYOUT)


@partial(DirectLaunch, layout=STAGED)
@gluon.jit(do_not_specialize=["cache_rows", "blocks"])
def attention_wgmma_kernel(
    out_ptr, table_ptr, tile_ptr, sink_ptr, q_rows, k_rows, v_rows, scale, cache_rows, blocks,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, SIZE: gl.constexpr, KEYS: gl.constexpr, WINDOW: gl.constexpr,
    WGMMA_LAYOUT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs: (query head, tile of TILE_ROWS rows). q_rows [T, heads * head size], k_rows and v_rows [rows
    of all heads, head size] are copied in blocks of [GROUP_ROWS or BLOCK, head size]. sink_ptr: [heads], or
    None. SIZE: elements of a head; KEYS: of a tile.
    """
    WIDTH: gl.constexpr = HEADS * SIZE
    BITS: gl.constexpr = _log2(KEYS)
    queries = gl.allocate_shared_memory(gl.float16, [_GROUPS, _ROWS, SIZE], q_rows.layout)
    keys = gl.allocate_shared_memory(gl.float16, [_STAGES, KEYS, SIZE], k_rows.layout)
    values = gl.allocate_shared_memory(gl.float16, [_STAGES, KEYS, SIZE], v_rows.layout)
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
    head_row = (head // (HEADS // KV_HEADS)) * cache_rows
    tile_ptr += gl.program_id(1) * _FIELDS
    chunk_row = gl.load(tile_ptr)
    out_ptr += chunk_row.to(gl.int64) * WIDTH
    first_row = gl.load(tile_ptr + 1)
    rows = gl.load(tile_ptr + 2)
    start = gl.load(tile_ptr + 3)
    table_ptr += gl.load(tile_ptr + 4) * blocks
    query_row = chunk_row + first_row
    out_ptr += head * SIZE
    if sink_ptr is not None:
        sink_ptr += head
    # Positions: the program's queries are first .. last.
    first = start + first_row
    # A program without rows computes one tile, which is not stored.
    last_tile = (gl.maximum(gl.minimum(first + _GROUPS * _ROWS, start + rows), 1) - 1) >> BITS
    count = last_tile + 1
    if WINDOW > 0:
        count = last_tile - (gl.maximum(first - (WINDOW - 1), 0) >> BITS) + 1
    # Written out, as values taken from a variable would no longer be constexpr.
    gl.warp_specialize(
        [
            (
                _one_group,
                (
                    0, shared, out_ptr, sink_ptr, scale, start, first_row, rows, last_tile, count, WIDTH, WINDOW,
                    WGMMA_LAYOUT,
                ),
            ),
            (
                _one_group,
                (
                    1, shared, out_ptr, sink_ptr, scale, start, first_row, rows, last_tile, count, WIDTH, WINDOW,
                    WGMMA_LAYOUT,
                ),
            ),
            (
                _copy_all,
                (
                    q_rows, k_rows, v_rows, shared, table_ptr, blocks, first, head_row, query_row, head * SIZE,
                    last_tile, count, WINDOW,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def launch_wgmma(
    q: torch.Tensor,
    spec: AttentionSpec,
    layer: KVLayer,
    block_tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    wgmma_layout: bool,
    pdl: bool,
) -> None:
    """Runs `attention_prefill` for tiles int32 [tiles, TILE_FIELDS]; `out` gets plain rows or the WGMMA layout."""
    tokens, heads, head_dim = q.shape
    cache_rows, kv_heads, _ = layer.k.shape
    cache = cache_pointers(layer)
    k, v = (tensor.transpose(0, 1).view(-1, head_dim) for tensor in (cache.k, cache.v))
    attention_wgmma_kernel[(heads, tiles.shape[0])](
        out, block_tables, tiles, checked_sinks(spec),
        Copied(q.view(tokens, heads * head_dim), (GROUP_ROWS, head_dim)),
        Copied(k, (BLOCK_SIZE, head_dim)), Copied(v, (BLOCK_SIZE, head_dim)),
        spec.scale * LOG2_E, cache_rows, block_tables.shape[1],
        HEADS=heads, KV_HEADS=kv_heads, SIZE=head_dim, KEYS=KEYS_OF[head_dim], WINDOW=spec.window or 0,
        WGMMA_LAYOUT=wgmma_layout, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
