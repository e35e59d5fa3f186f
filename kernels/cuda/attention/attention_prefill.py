"""Prefill attention on CUDA: a chunk of query rows against the cache up to and including the chunk.

Online softmax over key tiles on the matrix units, fp16 operands and fp32 sums. The causal mask (and the
window's) is the band built once at load; it is read only in the tiles that the diagonal or the window's edge
crosses, and tiles wholly outside are not visited. Where a row's bits may not depend on its chunk (`fixed`), all tiles
run through one loop, which compares positions: to compilers, a loop with a mask and one without are two, with sums in
two orders. On Hopper, most prompts go to a kernel of its own, in attention_prefill_wgmma.py. Knows a chunk of one
sequence, whose cache may lie in blocks, or of several; rotation and the cache write come before.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.attention_prefill_wgmma import (
    GROUP_ROWS,
    HEAD_DIM,
    TILE_KEYS,
    TILE_ROWS,
    attention_wgmma_kernel,
)
from quengine.kernels.cuda.attention.kv_store import KVStore, expand_codes, load_tile, table_rows
from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS, cut_tiles
from quengine.kernels.cuda.attention.rope import sequence_pointers, table_arguments
from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.launch.relaunch import Copied, Relaunched
from quengine.kernels.forward_batch import ForwardBatch, PrefillTiles
from quengine.kernels.kv.cache_types import BLOCK_SIZE

_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


@triton.jit
def _sees(mask_ptr, place, ASM: tl.constexpr):
    """Entries `place` [R, N], int32, of the mask, as bool."""
    if ASM:
        # Seeing a load, the compiler would lay it out for itself and bring it to the scores through shared memory, for
        # which registers spill.
        entry = tl.inline_asm_elementwise(
            "{ .reg .b64 a; cvt.u64.u32 a, $1; add.u64 a, a, $2; ld.global.nc.u8 $0, [a]; }",
            "=r,r,l",
            [place, mask_ptr.to(tl.int64)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        entry = tl.load(mask_ptr + place)
    return entry != 0


@triton.jit
def _attend_tiles(
    q,
    largest,
    total,
    mixed,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    mask_ptr,
    mask_at,
    table_ptr,
    blocks,
    position,
    begin,
    end,
    keys,
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    Q8: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    FIXED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Online softmax (Milakov & Gimelshein 2018) over key tiles begin..end, onto the rows' running state.

    `mask_at` [rows]: where each row's mask of key 0 lies; only MASKED tiles read it, and only they may hold keys from
    `keys` on or rows that see nothing yet. FIXED: they compare the keys with the rows' `position` instead.
    """
    for start in tl.range(begin, end, BLOCK_KEYS, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_KEYS)
        live = key < keys
        if PAGED:
            at = table_rows(table_ptr, blocks, key, ASM)
        else:
            at = key
        k, k_scale = load_tile(k_ptr, k_scale_ptr, at, live, HEAD_DIM, PADDED, Q8)
        if Q8:
            k, _ = expand_codes(k, k_scale, ASM)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            if FIXED:
                visible = live[None, :] & (key[None, :] <= position[:, None])
                if WINDOW > 0:
                    visible = visible & (key[None, :] > position[:, None] - WINDOW)
            else:
                place = mask_at[:, None] + tl.minimum(key, keys - 1)[None, :]
                visible = live[None, :] & _sees(mask_ptr, place, ASM)
            scores = tl.where(visible, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        else:
            new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
            base = new_largest
        shrink = tl.exp2(largest - base)
        weights = tl.exp2(scores * scale - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v, v_scale = load_tile(v_ptr, v_scale_ptr, at, live, HEAD_DIM, PADDED, Q8)
        if Q8:
            v, _ = expand_codes(v, v_scale, ASM)
        mixed = tl.dot(weights.to(tl.float16), v, mixed * shrink[:, None])
        largest = new_largest
    return largest, total, mixed


@Relaunched
@triton.jit(do_not_specialize=["start", "rows", "context", "blocks", "mask_stride", "mask_origin"])
def _attention_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    mask_ptr,
    table_ptr,
    tile_ptr,
    out_ptr,
    scale,
    start,
    rows,
    context,
    blocks,
    mask_stride,
    mask_origin,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    Q8: tl.constexpr,
    PAGED: tl.constexpr,
    TILED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    FIXED: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    if TILED:
        tile_ptr += tl.program_id(1) * _TILE_FIELDS
        chunk_row = tl.load(tile_ptr).to(tl.int64) * HEADS * HEAD_DIM
        q_ptr += chunk_row
        out_ptr += chunk_row
        first_row = tl.load(tile_ptr + 1)
        rows = tl.load(tile_ptr + 2)
        start = tl.load(tile_ptr + 3)
        mask_origin -= start
        table_ptr += tl.load(tile_ptr + 4) * blocks
    else:
        # The last rows see the most keys: they start first, so that no long block is left over at the end.
        first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_ROWS
    kv_head = head // (HEADS // KV_HEADS)
    k_ptr += kv_head.to(tl.int64) * context * HEAD_DIM
    v_ptr += kv_head.to(tl.int64) * context * HEAD_DIM
    if Q8:
        k_scale_ptr += kv_head.to(tl.int64) * context * (HEAD_DIM // 32)
        v_scale_ptr += kv_head.to(tl.int64) * context * (HEAD_DIM // 32)
    row = first_row + tl.arange(0, BLOCK_ROWS)
    row_live = row < rows
    d = tl.arange(0, PADDED)
    inside = row_live[:, None] & (d < HEAD_DIM)[None, :]
    at = (row[:, None].to(tl.int64) * HEADS + head) * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    # Rows behind the last one, which are not stored, see what it sees.
    mask_at = tl.minimum(row, rows - 1) * mask_stride + mask_origin

    # Positions: the block's queries are first..last; keys `low`..`keys` are seen by some of them, and tiles
    # within `full_low`..`full_high` by all of them.
    keys = start + rows
    first = start + first_row
    last = tl.minimum(first + BLOCK_ROWS, keys) - 1
    end = last + 1
    full_high = (first + 1) // BLOCK_KEYS * BLOCK_KEYS
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    mixed = tl.zeros([BLOCK_ROWS, PADDED], tl.float32)
    position = start + row
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first - (WINDOW - 1), 0) // BLOCK_KEYS * BLOCK_KEYS
    if FIXED:
        full_high = low
    else:
        full_low = 0
        if WINDOW > 0:
            full_low = tl.cdiv(tl.maximum(last - (WINDOW - 1), 0), BLOCK_KEYS) * BLOCK_KEYS
            full_low = tl.minimum(full_low, tl.cdiv(end, BLOCK_KEYS) * BLOCK_KEYS)
            full_high = tl.maximum(full_low, full_high)
            largest, total, mixed = _attend_tiles(
                q, largest, total, mixed, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                mask_ptr, mask_at, table_ptr, blocks, position, low, full_low, keys, scale,
                HEAD_DIM, PADDED, WINDOW, Q8, PAGED, BLOCK_KEYS, STAGES, True, False, ASM,
            )  # fmt: skip
        largest, total, mixed = _attend_tiles(
            q, largest, total, mixed, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
            mask_ptr, mask_at, table_ptr, blocks, position, full_low, full_high, keys, scale,
            HEAD_DIM, PADDED, WINDOW, Q8, PAGED, BLOCK_KEYS, STAGES, False, False, ASM,
        )  # fmt: skip
    largest, total, mixed = _attend_tiles(
        q, largest, total, mixed, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
        mask_ptr, mask_at, table_ptr, blocks, position, full_high, end, keys, scale,
        HEAD_DIM, PADDED, WINDOW, Q8, PAGED, BLOCK_KEYS, STAGES, True, FIXED, ASM,
    )  # fmt: skip
    tl.store(out_ptr + at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def attention_prefill(
    q: torch.Tensor,
    spec: AttentionSpec,
    cache: KVStore,
    sequence: int,
    start: int,
    out_dtype: torch.dtype = torch.float16,
    pdl: bool = False,
    block_table: torch.Tensor | None = None,
    fixed: bool = False,
    in_place: bool = False,
    prompts: PrefillTiles | None = None,
    ordered: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of T query rows at positions start..start+T of one sequence over cache rows 0..start+T.

    q: [T, heads, head_dim] fp16, rotated (`rope_store` makes it and has written the chunk's keys and values);
    `spec.mask_band` must have at least T rows and reach `start`. `block_table`: as in `rope_store`. Returns
    [T, heads * head_dim] of `out_dtype`; `in_place`: where q was; or `ordered`, the values of ordered rows (half.py),
    where `stores_ordered` says so. `fixed`: a row's bits are the same whatever chunk it is in: key tiles of one size
    lie at its multiples, and one in which a row sees nothing leaves its state as it is. `prompts`
    (`prefill_tiles` makes it): the rows are chunks of several sequences, `block_table` has a row for each, and `start`
    is 0.
    Source: Dao 2023 (FlashAttention-2).
    """
    tokens, heads, head_dim = q.shape
    if prompts is None:
        rows, latest, end = tokens, start, start + tokens
    else:
        rows, latest, end = prompts.longest, prompts.latest, prompts.deepest
    kv_heads = cache.k.shape[1]
    chunk, width = spec.mask_band.shape
    assert q.is_contiguous() and q.dtype == torch.float16 and heads == spec.heads and heads % kv_heads == 0
    room = cache.k.shape[2] if block_table is None else block_table.shape[-1] * BLOCK_SIZE
    assert 0 < rows <= chunk and 0 <= latest <= width - chunk and end <= room
    assert spec.mask_band.dtype == torch.bool and spec.mask_band.stride(1) == 1
    row_step = -spec.mask_band.stride(0)  # the band begins with the last row
    launch = prefill_launch(head_dim, FIXED_ROWS if fixed else rows, is_hopper(q.device))
    assert prompts is None or prompts.block_rows == launch.block_rows
    if ordered is not None:
        out = ordered
    elif in_place:  # a program reads the queries whose results it writes, and no others
        out = q.view(tokens, heads * head_dim)
        assert out_dtype == q.dtype
    else:
        out = torch.empty(tokens, heads * head_dim, dtype=out_dtype, device=q.device)
    if launch.wgmma and not fixed and not cache.q8_0:
        _launch_wgmma(
            q, spec, cache, sequence, start, rows, pdl, block_table, prompts, out, ordered is not None
        )  # fmt: skip
        return out
    assert ordered is None
    k, v, k_scale, v_scale = sequence_pointers(cache, sequence)
    table, blocks = table_arguments(cache, block_table, spec.mask_band)
    blocks_of_rows = -(-rows // launch.block_rows) if prompts is None else prompts.tiles.shape[0]
    _attention_prefill_kernel[(heads, blocks_of_rows)](
        q,
        k,
        v,
        k_scale,
        v_scale,
        spec.mask_band,
        table,
        table if prompts is None else prompts.tiles,
        out,
        spec.scale * 1.4426950408889634,  # scores in base 2: exp2 is one instruction
        start,
        rows,
        cache.k.shape[2],
        blocks,
        row_step,
        width - chunk - start - (chunk - 1) * row_step,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PADDED=1 << (head_dim - 1).bit_length(),
        WINDOW=spec.window or 0,
        Q8=cache.q8_0,
        PAGED=block_table is not None,
        TILED=prompts is not None,
        BLOCK_ROWS=launch.block_rows,
        BLOCK_KEYS=launch.block_keys,
        STAGES=launch.stages,
        FIXED=fixed,
        ASM=uses_assembly(),
        PDL=pdl,
        num_warps=launch.warps,
        launch_pdl=pdl,
    )
    return out


def _launch_wgmma(
    q: torch.Tensor,
    spec: AttentionSpec,
    cache: KVStore,
    sequence: int,
    start: int,
    rows: int,
    pdl: bool,
    block_table: torch.Tensor | None,
    prompts: PrefillTiles | None,
    out: torch.Tensor,
    ordered: bool,
) -> None:
    """`attention_prefill` to `out`, plain or ordered rows, by the kernel for Hopper."""
    tokens, heads, head_dim = q.shape
    kv_heads, context = cache.k.shape[1:3]
    table, blocks = table_arguments(cache, block_table, out)
    k, v = cache.k[sequence].view(-1, head_dim), cache.v[sequence].view(-1, head_dim)
    part = (TILE_KEYS if block_table is None else BLOCK_SIZE, head_dim)
    attention_wgmma_kernel[(heads, -(-rows // TILE_ROWS) if prompts is None else prompts.tiles.shape[0])](
        out,
        table,
        table if prompts is None else prompts.tiles,
        Copied(q.view(tokens, heads * head_dim), (GROUP_ROWS, head_dim)),
        Copied(k, part),
        Copied(v, part),
        spec.scale * 1.4426950408889634,  # scores in base 2: exp2 is one instruction
        start,
        rows,
        context,
        blocks,
        HEADS=heads,
        KV_HEADS=kv_heads,
        WINDOW=spec.window or 0,
        PAGED=block_table is not None,
        TILED=prompts is not None,
        ORDERED=ordered,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def stores_ordered(cache: KVStore, prompts: PrefillTiles | None, tokens: int) -> bool:
    """Whether `attention_prefill` of so many rows, or of `prompts`, can write `ordered` ones."""
    rows = tokens if prompts is None else prompts.longest
    return prefill_launch(cache.k.shape[3], rows, is_hopper(cache.k.device)).wgmma and not cache.q8_0


def prefill_tiles(batch: ForwardBatch, head_dim: int, fixed: bool = False) -> PrefillTiles:
    """What `rope_store` and `attention_prefill` read of chunks of several sequences."""
    return cut_tiles(batch, tile_rows(head_dim, max(batch.query_lens), batch.device, fixed))


def tile_rows(head_dim: int, rows: int, device: torch.device, fixed: bool = False) -> int:
    """Rows of a tile of chunks of up to `rows` rows."""
    return prefill_launch(head_dim, FIXED_ROWS if fixed else rows, is_hopper(device)).block_rows


FIXED_ROWS = 512
"""The chunk whose launch shape all chunks have where a row's bits may not depend on the chunk."""


@dataclass(frozen=True)
class PrefillLaunch:
    """Query rows and keys a tile, warps a block, key tiles in flight. `wgmma`: an fp16 cache is read by the kernel for
    Hopper, unless a row's bits may not depend on its chunk."""

    block_rows: int
    block_keys: int
    warps: int
    stages: int
    wgmma: bool = False


def prefill_launch(head_dim: int, rows: int, hopper: bool) -> PrefillLaunch:
    """Launch shape by head size and rows, from the sweep in benchmarks/attention.py on an H200 (heads of 128).

    Hopper has 227 KiB of shared memory a block and matrix units that want 128 rows; elsewhere all tiles must fit
    99 KiB (sm_89). On Hopper a tile has as many keys as a head has elements: both products are then laid out
    alike, and the weights between them stay where they are.
    """
    if head_dim > 128:
        return PrefillLaunch(64, 32, 4, 2)
    if not hopper:
        return PrefillLaunch(64, 64, 4, 2)
    if head_dim <= 64:
        return PrefillLaunch(64, 64, 4, 3)
    if rows <= 128:
        return PrefillLaunch(64, 128, 8, 2)
    return PrefillLaunch(TILE_ROWS, TILE_KEYS, 8, 2, head_dim == HEAD_DIM)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
