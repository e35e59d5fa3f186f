"""Latent attention of a prompt's chunks: tiles of rows of one query head, each attending to the rows cached up to it.

Online softmax over tiles of keys on the matrix units, with fp16 operands and fp32 sums; a row's first elements are its
value. Only tiles that the diagonal crosses are masked. With `batch_invariant` all run through the masked loop, so that
a row's bits do not depend on its chunk.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.cuda.attention.attention_arguments import LOG2_E
from quengine.kernels.cuda.attention.kv_store import check_block_tables, dequantize_codes, table_rows
from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, store_operand
from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.latent.decode import load_rows
from quengine.kernels.cuda.latent.shapes import HeadPlaces, LatentShape, latent_pointers
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.forward_batch import PrefillTiles
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.latent_spec import LatentSpec

_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


class PrefillTile(NamedTuple):
    """Query rows and keys per tile, warps per block, tiles of keys in flight."""

    block_rows: int
    block_keys: int
    warps: int
    stages: int


@triton.jit
def _attend(
    q, r, state, cache, table_ptr, blocks, position, begin, end, scale,
    SHAPE: tl.constexpr, Q8: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov & Gimelshein 2018) over keys begin .. end - 1, from `state`: row_max, row_sum, acc. Only
    with MASKED may there be keys that a row at `position` does not see."""
    RANK: tl.constexpr = SHAPE.rank
    ROTATED: tl.constexpr = SHAPE.rotated
    ROW: tl.constexpr = RANK + ROTATED
    row_max, row_sum, acc = state
    for start in tl.range(begin, end, TILE.block_keys, num_stages=TILE.stages):
        key = start + tl.arange(0, TILE.block_keys)
        live = key < end
        row = table_rows(table_ptr, blocks, key, ASM)
        c, c_scale = load_rows(cache, row, live, 0, RANK, ROW, Q8)
        k, k_scale = load_rows(cache, row, live, RANK, ROTATED, ROW, Q8)
        if Q8:
            c, _ = dequantize_codes(c, c_scale, ASM)
            k, _ = dequantize_codes(k, k_scale, ASM)
        scores = tl.dot(q, tl.trans(c), tl.dot(r, tl.trans(k)))
        if MASKED:
            scores = tl.where(live[None, :] & (key[None, :] <= position[:, None]), scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            base = new_max
        rescale = tl.exp2(row_max - base)
        weights = tl.exp2(scores * scale - base[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(tl.float16), c, acc * rescale[:, None])
        row_max = new_max
    return row_max, row_sum, acc


@DirectLaunch
@triton.jit(do_not_specialize=["blocks", "of_head"])
def _latent_prefill_kernel(
    absorbed_ptr, turned_ptr, cache, table_ptr, tile_ptr, out_ptr, out_scale_ptr, scale, blocks, stride, of_head,
    SHAPE: tl.constexpr, Q8: tl.constexpr, TILE: tl.constexpr, FORM: tl.constexpr,
    BATCH_INVARIANT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (head, part of a tile, tile of rows)."""
    wait_then_launch(PDL)
    ROWS: tl.constexpr = TILE.block_rows
    RANK: tl.constexpr = SHAPE.rank
    head = tl.program_id(0)
    tile_ptr += tl.program_id(2) * _TILE_FIELDS
    chunk_row = tl.load(tile_ptr).to(tl.int64)
    first_row = tl.load(tile_ptr + 1) + tl.program_id(1) * TILE.block_rows
    rows = tl.load(tile_ptr + 2)
    if first_row >= rows:
        return
    start = tl.load(tile_ptr + 3)
    table_ptr += tl.load(tile_ptr + 4) * blocks
    row = first_row + tl.arange(0, TILE.block_rows)
    inside = row < rows
    token = chunk_row + row
    place = head * of_head + token
    d = tl.arange(0, SHAPE.rank)[None, :]
    e = tl.arange(0, SHAPE.rotated)[None, :]
    q = tl.load(absorbed_ptr + place[:, None] * SHAPE.rank + d, mask=inside[:, None], other=0.0).to(
        tl.float16
    )
    at = (token * SHAPE.heads + head)[:, None] * SHAPE.rotated + e
    r = tl.load(turned_ptr + at, mask=inside[:, None], other=0.0).to(tl.float16)
    first = start + first_row
    last = tl.minimum(first + TILE.block_rows, start + rows) - 1
    position = start + row
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, RANK], tl.float32),
    )
    full = 0
    if not BATCH_INVARIANT:
        full = (first + 1) // TILE.block_keys * TILE.block_keys
        state = _attend(
            q, r, state, cache, table_ptr, blocks, position, 0, full, scale, SHAPE, Q8, TILE, False, ASM
        )
    _, row_sum, acc = _attend(
        q, r, state, cache, table_ptr, blocks, position, full, last + 1, scale, SHAPE, Q8, TILE, True, ASM
    )
    out = acc / row_sum[:, None]
    tl.store(out_scale_ptr + place, tl.full([ROWS], 1.0, tl.float32), mask=inside)
    store_operand(out_ptr, place[:, None], d, stride, out, inside[:, None], FORM)


def latent_prefill(
    absorbed: Tensor,
    turned: Tensor,
    spec: LatentSpec,
    layer: KVLayer,
    block_tables: Tensor,
    tiles: PrefillTiles,
    places: HeadPlaces,
    out: Fp16Operand,
    batch_invariant: bool = False,
    pdl: bool = False,
) -> None:
    """Writes the weighted sums of the latents that each of a step's T rows sees to `out`, fp16 rows at their places.

    absorbed: fp32 [places, rank], queries times their heads' matrices; turned: fp32 [T, heads, rotated]; from
    `latent_rows`, which has stored the chunks' rows. block_tables: int32 [sequences, blocks].
    Source: Dao 2023 (FlashAttention-2).
    """
    tokens, q8_0 = len(turned), layer.k_scale is not None
    check_block_tables(block_tables)
    assert absorbed.is_contiguous() and absorbed.shape[1] == spec.rank and turned.is_contiguous()
    assert tiles.sequences.shape == (tokens,) and tiles.deepest <= block_tables.shape[1] * BLOCK_SIZE
    assert out.rows == places.places and out.fits(spec.rank)
    tile = prefill_tile(spec.rank, q8_0, tiles.block_rows)
    assert tiles.block_rows % tile.block_rows == 0
    parts = tiles.block_rows // tile.block_rows
    _latent_prefill_kernel[(spec.heads, parts, tiles.tiles.shape[0])](
        absorbed, turned, latent_pointers(layer), block_tables, tiles.tiles, out.values, out.row_scale,
        spec.scale * LOG2_E, block_tables.shape[1], out.stride, places.of_head,
        SHAPE=LatentShape.of(spec), Q8=q8_0, TILE=tile, FORM=int(out.layout),
        BATCH_INVARIANT=batch_invariant, ASM=uses_assembly(), PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip


def prefill_tile(rank: int, q8_0: bool, rows: int) -> PrefillTile:
    """The tile shape by the latent's elements, for a step's tiles of `rows` rows: it fits 99 KiB of shared memory
    (sm_89), and with an fp16 cache does not spill. The codes of a q8_0 cache need room beside the fp16 keys made from
    them."""
    return PrefillTile(min(rows, 64) if rank <= 256 else 32, 32, 8, 1 if q8_0 and rank > 256 else 2)
