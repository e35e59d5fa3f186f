"""Prefill attention on CUDA: tiles of query rows, each of one chunk, attend to the cache up to and including the
chunk.

Online softmax over key tiles on the matrix units, with fp16 operands and fp32 sums. Only key tiles that the diagonal
or the window's edge crosses are masked (causal, window), and tiles wholly outside are skipped. With `batch_invariant`,
where a row's bits must not depend on its chunk, all tiles run through one loop: compilers order the sums of a masked
and an unmasked loop differently. Rotation and the cache write come before (rope_store.py).

There are two kernels: attention_prefill_wgmma.py wins on Hopper for fp16 caches, heads of 128 and 256 and chunks of
more than 128 rows; the one here serves every other GPU, head, cache and chunk, and all of them with `batch_invariant`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cuda.attention.attention_arguments import LOG2_E, checked_sinks
from quengine.kernels.cuda.attention.attention_prefill_wgmma import (
    KEYS_OF,
    TILE_ROWS,
    launch_wgmma,
)
from quengine.kernels.cuda.attention.hadamard import transform_heads
from quengine.kernels.cuda.attention.kv_store import (
    cache_pointers,
    check_block_tables,
    dequantize_codes,
    dequantize_packed,
    load_tile,
    row_width,
    table_rows,
)
from quengine.kernels.cuda.attention.output_gate import gate_arguments, gate_rows, load_gates
from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS, cut_tiles
from quengine.kernels.cuda.gemm.fp16_operand import OperandLayout, ScaledProduct, store_operand
from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.softcap import soft_capped
from quengine.kernels.forward_batch import ForwardBatch, PrefillTiles
from quengine.kernels.kv.cache_types import BLOCK_SIZE

_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_LOG2_E = tl.constexpr(LOG2_E)

BATCH_INVARIANT_ROWS = 512
"""The chunk length whose tile shape all chunks use with `batch_invariant`."""


class PrefillShape(NamedTuple):
    """Query rows of a program (a divisor of a tile's rows), keys per tile, warps per block, key tiles in flight.
    `wgmma`: with an fp16 cache the Hopper kernel is used, unless `batch_invariant`.
    """

    block_rows: int
    block_keys: int
    warps: int
    stages: int
    wgmma: bool = False


@triton.jit
def _attend_tiles(
    q, state, heads, table_ptr, blocks, position, begin, end, first_key, keys, scale,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov & Gimelshein 2018) over key tiles begin..end, starting from `state`: the rows' row_max,
    row_sum and acc. `heads`: pointers to a head's k, v and their scales.

    Only with MASKED may tiles hold keys that some row at `position` does not see: keys from `keys` on, after the row,
    or before its window. With a window, cache rows of keys before `first_key`, which no row sees, may have been
    released: the row of `first_key` is read instead.
    """
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = heads
    row_max, row_sum, acc = state
    for start in tl.range(begin, end, TILE.block_keys, num_stages=TILE.stages):
        key = start + tl.arange(0, TILE.block_keys)
        live = key < keys
        if WINDOW > 0:
            at = table_rows(table_ptr, blocks, tl.maximum(key, first_key), ASM)
        else:
            at = table_rows(table_ptr, blocks, key, ASM)
        k, k_scale = load_tile(k_ptr, k_scale_ptr, at, live, HEAD_DIM, PADDED, BITS)
        if BITS == 8:
            k, _ = dequantize_codes(k, k_scale, ASM)
        elif BITS == 4:
            k = dequantize_packed(k, k_scale)
        scores = tl.dot(q, tl.trans(k))
        if CAP > 0.0:  # in base 2 from here on
            scores = soft_capped(scores * scale, CAP) * _LOG2_E
            factor = 1.0
        else:
            factor = scale
        if MASKED:
            visible = live[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
            base = new_max
        rescale = tl.exp2(row_max - base)
        weights = tl.exp2(scores * factor - base[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        v, v_scale = load_tile(v_ptr, v_scale_ptr, at, live, HEAD_DIM, PADDED, BITS)
        if BITS == 8:
            v, _ = dequantize_codes(v, v_scale, ASM)
        elif BITS == 4:
            v = dequantize_packed(v, v_scale)
        acc = tl.dot(weights.to(tl.float16), v, acc * rescale[:, None])
        row_max = new_max
    return row_max, row_sum, acc


@DirectLaunch
@triton.jit(do_not_specialize=["cache_rows", "blocks", "gate_stride"])
def _attention_prefill_kernel(
    q_ptr, cache, table_ptr, tile_ptr, out_ptr, sink_ptr, gate_ptr, gate_scale_ptr,
    scale, cache_rows, blocks, gate_stride, gate_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    BITS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, BATCH_INVARIANT: tl.constexpr, ASM: tl.constexpr,
    LAYOUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (query head, part of a tile of rows, of PARTS). LAYOUT: of the result. sink_ptr: [heads], or None.
    gate_ptr: rows of qkv with gates, or None; they are scaled by rows, gate_scale_ptr or None, and by gate_scale."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    BLOCK_ROWS: tl.constexpr = TILE.block_rows
    BLOCK_KEYS: tl.constexpr = TILE.block_keys
    head = tl.program_id(0)
    tile_ptr += tl.program_id(1) // PARTS * _TILE_FIELDS
    chunk_row = tl.load(tile_ptr).to(tl.int64)
    first_row = tl.load(tile_ptr + 1) + tl.program_id(1) % PARTS * BLOCK_ROWS
    rows = tl.load(tile_ptr + 2)
    if first_row >= rows:
        return
    start = tl.load(tile_ptr + 3)
    table_ptr += tl.load(tile_ptr + 4) * blocks
    head_rows = (head // (HEADS // KV_HEADS)).to(tl.int64) * cache_rows
    k_scale_ptr = cache.k_scale
    v_scale_ptr = cache.v_scale
    if BITS < 16:
        k_scale_ptr += head_rows * (HEAD_DIM // 32)
        v_scale_ptr += head_rows * (HEAD_DIM // 32)
    head_rows *= row_width(HEAD_DIM, BITS)
    heads = (cache.k + head_rows, cache.v + head_rows, k_scale_ptr, v_scale_ptr)
    row = first_row + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (d < HEAD_DIM)[None, :]
    token = chunk_row + row
    at = (token[:, None] * HEADS + head) * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)

    # Positions: the tile's queries are first..last; keys first_key..last are seen by some of them, and key tiles
    # within full_low..full_high by all of them.
    keys = start + rows
    first = start + first_row
    last = tl.minimum(first + BLOCK_ROWS, keys) - 1
    position = start + row
    first_key = 0
    low = 0
    if WINDOW > 0:
        first_key = tl.maximum(first - (WINDOW - 1), 0)
        low = first_key // BLOCK_KEYS * BLOCK_KEYS
    state = (
        tl.full([BLOCK_ROWS], float("-inf"), tl.float32),
        tl.zeros([BLOCK_ROWS], tl.float32),
        tl.zeros([BLOCK_ROWS, PADDED], tl.float32),
    )
    if sink_ptr is not None:  # the softmax starts from the sink, a logit without a value
        sink = tl.load(sink_ptr + head) * _LOG2_E
        state = (
            tl.zeros([BLOCK_ROWS], tl.float32) + sink,
            tl.full([BLOCK_ROWS], 1.0, tl.float32),
            tl.zeros([BLOCK_ROWS, PADDED], tl.float32),
        )
    full_high = low
    if not BATCH_INVARIANT:
        full_low = low
        full_high = (first + 1) // BLOCK_KEYS * BLOCK_KEYS
        if WINDOW > 0:
            full_low = tl.cdiv(tl.maximum(last - (WINDOW - 1), 0), BLOCK_KEYS) * BLOCK_KEYS
            full_low = tl.minimum(full_low, tl.cdiv(last + 1, BLOCK_KEYS) * BLOCK_KEYS)
            full_high = tl.maximum(full_low, full_high)
            state = _attend_tiles(
                q, state, heads, table_ptr, blocks, position, low, full_low, first_key, keys, scale,
                HEAD_DIM, WINDOW, CAP, BITS, TILE, True, ASM,
            )  # fmt: skip
        state = _attend_tiles(
            q, state, heads, table_ptr, blocks, position, full_low, full_high, first_key, keys, scale,
            HEAD_DIM, WINDOW, CAP, BITS, TILE, False, ASM,
        )  # fmt: skip
    _, row_sum, acc = _attend_tiles(
        q, state, heads, table_ptr, blocks, position, full_high, last + 1, first_key, keys, scale,
        HEAD_DIM, WINDOW, CAP, BITS, TILE, True, ASM,
    )  # fmt: skip
    out = acc / row_sum[:, None]
    if gate_ptr is not None:
        gates = load_gates(gate_ptr + token[:, None] * gate_stride, head, d[None, :], inside, HEAD_DIM)
        if gate_scale_ptr is not None:
            gates *= (tl.load(gate_scale_ptr + token, mask=row < rows, other=0.0) * gate_scale)[:, None]
        out *= tl.sigmoid(gates)
    column = head * HEAD_DIM + d[None, :]
    store_operand(out_ptr, token[:, None], column, HEADS * HEAD_DIM, out, inside, LAYOUT)


def attention_prefill(
    q: Tensor,
    spec: AttentionSpec,
    layer: KVLayer,
    block_tables: Tensor,
    tiles: PrefillTiles,
    out: Tensor,
    batch_invariant: bool = False,
    wgmma_layout: bool = False,
    pdl: bool = False,
    gates: Tensor | ScaledProduct | None = None,
) -> Tensor:
    """Causal attention of the T query rows of a step's chunks over each sequence's cache up to the row itself.

    q: [T, heads, head_dim] fp16, rotated, from `rope_store`, which has stored the chunks' keys and values.
    block_tables: int32 [sequences, blocks]. tiles: from `prefill_tiles`. out: [T, heads * head_dim], fp16 or fp32,
    written and returned; fp16 may be q itself, since a program reads only the queries whose results it writes.
    `batch_invariant`: a row's bits are the same in every chunk, because key tiles have one size and begin at its
    multiples, and a tile in which a row sees no key leaves the row's state unchanged. `wgmma_layout`: `out` is the
    values of an fp16 operand in that layout (fp16_operand.py), where `stores_wgmma_layout` allows it. gates: where the
    spec is gated, the rows of qkv that `rope_store` was given.
    Source: Dao 2023 (FlashAttention-2).
    """
    tokens, heads, head_dim = q.shape
    kv_heads = layer.k.shape[1]
    assert q.is_contiguous() and q.dtype == torch.float16 and heads == spec.heads and heads % kv_heads == 0
    assert tiles.sequences.shape == (tokens,) and tiles.deepest <= block_tables.shape[1] * BLOCK_SIZE
    check_block_tables(block_tables)
    shape = _shape_of(tiles.longest, head_dim, q.device, batch_invariant)
    assert tiles.block_rows % shape.block_rows == 0
    gate_ptr, gate_scale_ptr, gate_stride, gate_scale = gate_arguments(gates, spec)
    layout = OperandLayout.WGMMA if wgmma_layout else OperandLayout.ROW_MAJOR
    if _takes_wgmma(shape, spec, layer, batch_invariant):
        launch_wgmma(q, spec, layer, block_tables, tiles.tiles, out, wgmma_layout, pdl)
        if gates is not None:
            gate_rows(out, gates, spec, layout, pdl)
        return out
    apart = layer.format.hadamard  # the kernel's sums would spill registers if it transformed them too
    gate_ptr = None if apart else gate_ptr
    parts = tiles.block_rows // shape.block_rows
    _attention_prefill_kernel[(heads, parts * tiles.tiles.shape[0])](
        q, cache_pointers(layer), block_tables, tiles.tiles, out, checked_sinks(spec), gate_ptr, gate_scale_ptr,
        spec.scale if spec.softcap else spec.scale * LOG2_E, layer.k.shape[0], block_tables.shape[1],
        gate_stride, gate_scale,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, WINDOW=spec.window or 0, CAP=spec.softcap,
        BITS=layer.format.bits, TILE=shape, PARTS=parts, BATCH_INVARIANT=batch_invariant, ASM=uses_assembly(),
        LAYOUT=int(layout), PDL=pdl,
        num_warps=shape.warps, launch_pdl=pdl,
    )  # fmt: skip
    if apart:
        transform_heads(out, spec.head_dim, pdl)
        if gates is not None:
            gate_rows(out, gates, spec, pdl=pdl)
    return out


def stores_wgmma_layout(spec: AttentionSpec, layer: KVLayer, tiles: PrefillTiles) -> bool:
    """Whether `attention_prefill` can write the WGMMA layout for these chunks. It cannot where a separate launch
    transforms rows (q4_0): these stay row-major."""
    shape = _shape_of(tiles.longest, spec.head_dim, layer.k.device)
    return _takes_wgmma(shape, spec, layer) or not layer.format.hadamard


def prefill_tiles(batch: ForwardBatch, batch_invariant: bool = False) -> PrefillTiles:
    """The tiles of a step's chunks, for `rope_store` and `attention_prefill` of all layers."""
    return cut_tiles(batch, tile_rows(max(batch.query_lens), batch.device, batch_invariant))


def tile_rows(rows: int, device: torch.device, batch_invariant: bool = False) -> int:
    """Rows per tile for chunks of up to `rows` rows, whatever the heads."""
    rows = BATCH_INVARIANT_ROWS if batch_invariant else rows
    return TILE_ROWS if rows > TILE_ROWS and is_hopper(device) else TILE_ROWS // 2


def _shape_of(rows: int, head_dim: int, device: torch.device, batch_invariant: bool = False) -> PrefillShape:
    return prefill_shape(head_dim, BATCH_INVARIANT_ROWS if batch_invariant else rows, is_hopper(device))


def _takes_wgmma(
    shape: PrefillShape, spec: AttentionSpec, layer: KVLayer, batch_invariant: bool = False
) -> bool:
    # The wgmma kernel copies the first visible block in place of the blocks before it. All of it must therefore have
    # been written, which is certain only for windows longer than a block.
    narrow = spec.window is not None and spec.window <= BLOCK_SIZE
    return shape.wgmma and not batch_invariant and layer.k_scale is None and not narrow and not spec.softcap


def prefill_shape(head_dim: int, rows: int, hopper: bool) -> PrefillShape:
    """The tile shape by head size and rows of the longest chunk, from benchmarks/cuda/attention.py on an H200 (heads
    of 128).

    Hopper has 227 KiB of shared memory per block and matrix units that need 128 rows to be busy; elsewhere all tiles
    must fit 99 KiB (sm_89). On Hopper a tile has as many keys as a head of up to 128 has elements: both products then
    have the same layout, and the weights between them are not moved.
    """
    if head_dim > 256:
        return PrefillShape(64, 32, 8, 2) if hopper else PrefillShape(32, 16, 8, 2)
    if head_dim > 128:
        return PrefillShape(64, 32, 4, 2, hopper and rows > TILE_ROWS and head_dim in KEYS_OF)
    if not hopper:
        return PrefillShape(64, 64, 4, 2)
    if head_dim <= 64:
        return PrefillShape(64, 64, 4, 3)
    if rows <= TILE_ROWS:
        return PrefillShape(64, 128, 8, 2)
    return PrefillShape(TILE_ROWS, 128, 8, 2, head_dim in KEYS_OF)
