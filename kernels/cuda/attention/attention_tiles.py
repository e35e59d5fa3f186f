"""Decode attention by tiles in shared memory: the kernel for every kind of head and cache.

A program serves one key-value head and one slice of the cache, so the query heads of a group share each read of K and
V. Tiles of keys and values pass through shared memory, some of them ahead of the one that is attended to.

Accuracy without fp32 matrix units: an fp32 operand is split into two fp16 terms (value and remainder, 22
bits), which share one 16-row matrix instruction, the terms of up to 8 heads above each other.
Does not know: which launches come here (attention_decode.py).
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from quengine.kernels.cuda.attention.attention_arguments import DecodeArguments
from quengine.kernels.cuda.attention.kv_store import BLOCK, expand_codes, load_tile, store_rows, table_rows
from quengine.kernels.cuda.attention.rope import load_angles, load_heads, load_rotated
from quengine.kernels.cuda.gemm.fp16_operand import store_operand
from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.gemv.activations import quantize_group, store_quantized

ALONE = tl.constexpr(128)
"""Up to so many keys are one slice: reading them takes no longer than combining slices."""

GRAIN = 32
"""A slice is a multiple of this many keys, which are also its first tile."""

COARSE = 416
"""Keys of a coarse slice at least: a first tile and whole tiles more. Where other sequences fill the device, slices of
one only cost."""


@triton.jit
def _add_halves(x):
    """[2 * R, N] -> [2 * R, N]: rows r and r + R both become their sum (the two terms of one head)."""
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    total = tl.sum(tl.reshape(x, [2, ROWS // 2, N]), 0)
    return tl.reshape(tl.broadcast_to(total[None, :, :], [2, ROWS // 2, N]), [ROWS, N])


@triton.jit
def _two_terms(x, upper):
    """fp32 [R, N] with equal halves -> fp16: rounded values in the upper half's rows, remainders below."""
    value = x.to(tl.float16)
    remainder = (x - value.to(tl.float32)).to(tl.float16)
    return tl.where(upper[:, None], value, remainder)


@triton.jit
def _first_rows(x, COUNT: tl.constexpr):
    """[R, N] -> [COUNT, N]: the first COUNT rows, COUNT a divisor of R."""
    PARTS: tl.constexpr = x.shape[0] // COUNT
    N: tl.constexpr = x.shape[1]
    first = (tl.arange(0, PARTS) == 0)[:, None, None]
    return tl.sum(tl.where(first, tl.reshape(x, [PARTS, COUNT, N]), 0.0), 0)


@triton.jit
def _attend_tile(
    q, upper, largest, total, mixed, k, k_scale, v, v_scale, live, scale, Q8: tl.constexpr, ASM: tl.constexpr
):
    """One step of the online softmax (Milakov & Gimelshein 2018): keys and values [N, PADDED] onto 2R rows."""
    if Q8:  # codes times scale need 19 bits: two fp16 terms as well
        k, k_rest = expand_codes(k, k_scale, ASM)
        scores = tl.dot(q, tl.trans(k))
        scores = tl.dot(q, tl.trans(k_rest), scores)
    else:
        scores = tl.dot(q, tl.trans(k))
    scores = tl.where(live[None, :], _add_halves(scores) * scale, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shrink = tl.exp2(largest - new_largest)
    weights = tl.exp2(scores - new_largest[:, None])
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None]
    p = _two_terms(weights, upper)
    if Q8:
        v, v_rest = expand_codes(v, v_scale, ASM)
        mixed = tl.dot(p, v, mixed)
        mixed = tl.dot(p, v_rest, mixed)
    else:
        mixed = tl.dot(p, v, mixed)
    return new_largest, total, mixed


@triton.jit
def _store_heads(
    out,
    head,
    live,
    out_ptr,
    low_ptr,
    scale_ptr,
    sums_ptr,
    sequence,
    stride,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    ROUND: tl.constexpr,
    FORM: tl.constexpr,
):
    """Write rows [ROWS, PADDED] as heads `head` [ROWS] of the output where `live`: fp32, rounded for the q-dot, or,
    where FORM is not negative, fp16 in row `sequence` of half rows of that form."""
    if ROUND:
        high, low, scale, sums = quantize_group(tl.reshape(out, [ROWS * PADDED // 32, 32]))
        PER_HEAD: tl.constexpr = PADDED // 32
        n = tl.arange(0, PER_HEAD)[None, :]
        group = tl.reshape(head[:, None] * (HEAD_DIM // 32) + n, [ROWS * PER_HEAD])
        inside = tl.reshape(live[:, None] & (n < HEAD_DIM // 32), [ROWS * PER_HEAD])
        store_quantized(out_ptr, low_ptr, scale_ptr, sums_ptr, group, inside, high, low, scale, sums)
    else:
        d = tl.arange(0, PADDED)[None, :]
        column = head[:, None] * HEAD_DIM + d
        inside = live[:, None] & (d < HEAD_DIM)
        if FORM >= 0:
            store_operand(out_ptr, sequence, column, stride, out, inside, FORM)
        else:
            tl.store(out_ptr + column, out, mask=inside)


@triton.jit
def _combine(
    mixed_ptr,
    state_ptr,
    out_ptr,
    low_ptr,
    scale_ptr,
    sums_ptr,
    sequence,
    stride,
    first_head,
    slices,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    SLICES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROUND: tl.constexpr,
    FORM: tl.constexpr,
):
    """Merge the slices of a group's heads in order; write the outputs as `_store_heads` does."""
    s = tl.arange(0, SLICES)
    d = tl.arange(0, PADDED)
    for start in tl.static_range(0, GROUP, AT_ONCE):
        member = start + tl.arange(0, AT_ONCE)
        head = first_head + member
        live = (member < GROUP)[:, None] & (s < slices)[None, :]
        place = head[:, None] * SLICES + s[None, :]
        # .cg: other multiprocessors wrote these during this launch, so L1 must not answer
        largest = tl.load(state_ptr + place * 2, mask=live, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(state_ptr + place * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        address = mixed_ptr + place[:, :, None] * HEAD_DIM + d[None, None, :]
        tile = live[:, :, None] & (d < HEAD_DIM)[None, None, :]
        mixed = tl.load(address, mask=tile, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(largest - tl.max(largest, 1)[:, None])
        out = tl.sum(mixed * weight[:, :, None], 1) / tl.sum(total * weight, 1)[:, None]
        _store_heads(
            out, head, member < GROUP, out_ptr, low_ptr, scale_ptr, sums_ptr, sequence, stride,
            HEAD_DIM, PADDED, AT_ONCE, ROUND, FORM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["context", "blocks"])
def _attention_tiles_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    query_scale_ptr,
    position_ptr,
    table_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    mixed_ptr,
    state_ptr,
    arrived_ptr,
    out_ptr,
    low_ptr,
    out_scale_ptr,
    sums_ptr,
    eps,
    scale,
    context,
    blocks,
    qkv_stride,
    out_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    Q8: tl.constexpr,
    PAGED: tl.constexpr,
    SLICES: tl.constexpr,
    GRAIN: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROUND: tl.constexpr,
    FORM: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    position = tl.load(position_ptr + sequence)
    # Keys before the new one, cut into `slices` slices of `per_slice`.
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    old_keys = position - first
    per_slice = tl.cdiv(tl.cdiv(old_keys, SLICES), GRAIN) * GRAIN
    if LEAST > 0:
        per_slice = tl.maximum(per_slice, LEAST)
    else:
        per_slice = tl.maximum(per_slice, tl.where(old_keys <= ALONE, ALONE, GRAIN))
    slices = tl.minimum(tl.maximum(tl.cdiv(old_keys, per_slice), 1), tl.num_programs(1))
    if part >= slices:
        return
    HEADS: tl.constexpr = KV_HEADS * GROUP
    if PAGED:
        head_rows = kv_head.to(tl.int64) * context
        table_ptr += sequence * blocks
        room = blocks * BLOCK
    else:
        head_rows = (sequence * KV_HEADS + kv_head) * context
        room = context
    k_ptr += head_rows * HEAD_DIM
    v_ptr += head_rows * HEAD_DIM
    if Q8:
        k_scale_ptr += head_rows * (HEAD_DIM // 32)
        v_scale_ptr += head_rows * (HEAD_DIM // 32)
    offset = position.to(tl.int64) * (ROPE_DIM // 2)
    cos, sin, partner = load_angles(cos_ptr + offset, sin_ptr + offset, PADDED, ROPE_DIM, HALVES)
    # The first tile is on its way before the launch in front has delivered the queries.
    begin = first + part * per_slice
    end = tl.minimum(begin + per_slice, position)
    first_key = begin + tl.arange(0, GRAIN)
    first_live = first_key < end
    one = tl.arange(0, 1)
    if PAGED:
        first_row = table_rows(table_ptr, blocks, first_key, ASM)
        new_row = table_rows(table_ptr, blocks, position + one, ASM).to(tl.int64)
    else:
        first_row = first_key
        new_row = position.to(tl.int64) + one
    first_k, first_k_scale = load_tile(k_ptr, k_scale_ptr, first_row, first_live, HEAD_DIM, PADDED, Q8)
    first_v, first_v_scale = load_tile(v_ptr, v_scale_ptr, first_row, first_live, HEAD_DIM, PADDED, Q8)
    if PDL:
        tl.extra.cuda.gdc_wait()

    r = tl.arange(0, ROWS)
    g = r % (ROWS // 2)
    upper = r < ROWS // 2
    qkv = qkv_ptr + sequence * qkv_stride
    q_rows = qkv + (kv_head * GROUP + g) * HEAD_DIM
    q = load_rotated(q_rows, g < GROUP, cos, sin, partner, q_norm_ptr, eps, HEAD_DIM, PADDED, NORM)
    if QUERY_SCALE:
        q *= tl.load(query_scale_ptr + position)
    k_row = qkv + (HEADS + kv_head + one) * HEAD_DIM
    v_row = qkv + (HEADS + KV_HEADS + kv_head + one) * HEAD_DIM
    k_new = load_rotated(k_row, one == 0, cos, sin, partner, k_norm_ptr, eps, HEAD_DIM, PADDED, NORM)
    v_new = load_heads(v_row, one == 0, HEAD_DIM, PADDED)
    # Slice 0 writes the new key and value and starts its state with them; nobody reads them back in this
    # launch.
    owner = part == 0
    write = (one == 0) & owner & (position < room)
    k_new = store_rows(k_new, new_row, write, k_ptr, k_scale_ptr, HEAD_DIM, PADDED, Q8)
    v_new = store_rows(v_new, new_row, write, v_ptr, v_scale_ptr, HEAD_DIM, PADDED, Q8)
    new_score = tl.sum(q * k_new, 1) * scale
    largest = tl.where(owner, new_score, float("-inf"))
    total = tl.where(owner & (r >= 0), 1.0, 0.0)
    mixed = tl.where(owner & upper[:, None], v_new, 0.0)

    q = _two_terms(q, upper)
    largest, total, mixed = _attend_tile(
        q, upper, largest, total, mixed, first_k, first_k_scale, first_v, first_v_scale, first_live, scale, Q8, ASM
    )  # fmt: skip
    for start in tl.range(begin + GRAIN, end, BLOCK_KEYS, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_KEYS)
        live = key < end
        if PAGED:
            row = table_rows(table_ptr, blocks, key, ASM)
        else:
            row = key
        k, k_scale = load_tile(k_ptr, k_scale_ptr, row, live, HEAD_DIM, PADDED, Q8)
        v, v_scale = load_tile(v_ptr, v_scale_ptr, row, live, HEAD_DIM, PADDED, Q8)
        largest, total, mixed = _attend_tile(
            q, upper, largest, total, mixed, k, k_scale, v, v_scale, live, scale, Q8, ASM
        )
    if PDL:
        # Not earlier: blocks of the next launch beside these would leave the multiprocessors unevenly filled.
        tl.extra.cuda.gdc_launch_dependents()
    # Of the rows keep the HEADS_PADDED that stand for a head, their two terms added.
    mixed = _first_rows(tl.sum(tl.reshape(mixed, [2, ROWS // 2, PADDED]), 0), HEADS_PADDED)
    total = tl.reshape(_first_rows(total[:, None], HEADS_PADDED), [HEADS_PADDED])
    largest = tl.reshape(_first_rows(largest[:, None], HEADS_PADDED), [HEADS_PADDED])
    d = tl.arange(0, PADDED)
    member = tl.arange(0, HEADS_PADDED)
    live = member < GROUP
    tile = live[:, None] & (d < HEAD_DIM)[None, :]
    head = kv_head * GROUP + member
    if FORM < 0:
        out_ptr += sequence * (HEADS * HEAD_DIM)
    low_ptr += sequence * (HEADS * HEAD_DIM)
    out_scale_ptr += sequence * (HEADS * HEAD_DIM // 32)
    sums_ptr += sequence * (HEADS * HEAD_DIM // 16)
    if slices == 1:
        out = mixed / total[:, None]
        _store_heads(
            out, head, live, out_ptr, low_ptr, out_scale_ptr, sums_ptr, sequence, out_stride,
            HEAD_DIM, PADDED, HEADS_PADDED, ROUND, FORM,
        )  # fmt: skip
    else:
        mixed_ptr += sequence * (HEADS * SLICES * HEAD_DIM)
        state_ptr += sequence * (HEADS * SLICES * 2)
        place = head * SLICES + part
        tl.store(mixed_ptr + place[:, None] * HEAD_DIM + d[None, :], mixed, mask=tile)
        tl.store(state_ptr + place * 2, largest, mask=live)
        tl.store(state_ptr + place * 2 + 1, total, mask=live)
        tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
        arrived = arrived_ptr + sequence * KV_HEADS + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == slices - 1:
            tl.store(arrived, 0)
            _combine(
                mixed_ptr,
                state_ptr,
                out_ptr,
                low_ptr,
                out_scale_ptr,
                sums_ptr,
                sequence,
                out_stride,
                kv_head * GROUP,
                slices,
                GROUP,
                HEAD_DIM,
                PADDED,
                SLICES,
                AT_ONCE,
                ROUND,
                FORM,
            )


def launch_tiles(given: DecodeArguments) -> None:
    """The launch, in this kernel's slices."""
    cache, group, head_dim = given.cache, given.group, given.spec.head_dim
    padded = triton.next_power_of_2(head_dim)
    shape = tile_launch(head_dim, group, cache.q8_0, given.coarse)
    least = COARSE if given.coarse else 0
    _attention_tiles_kernel[given.grid(max(least, GRAIN))](
        *given.leading(),
        cache.k,
        cache.v,
        cache.k_scale if cache.k_scale is not None else cache.k,
        cache.v_scale if cache.v_scale is not None else cache.v,
        *given.trailing(),
        **given.constants(),
        HEADS_PADDED=triton.next_power_of_2(group),
        ROWS=max(16, 2 * triton.next_power_of_2(group)),
        PADDED=padded,
        Q8=cache.q8_0,
        GRAIN=GRAIN,
        LEAST=least,
        BLOCK_KEYS=shape.block_keys,
        STAGES=shape.stages,
        AT_ONCE=combine_heads(group, given.slices, padded),
        ASM=uses_assembly(),
        num_warps=shape.warps,
        maxnreg=255
        if head_dim > 128 and shape.warps == 4
        else None,  # ptxas stops at 168 by itself, and spills
        launch_pdl=given.pdl,
    )


def combine_heads(group: int, slices: int, padded: int) -> int:
    """How many heads' slices are merged at a time: as many as 64 registers a thread hold, a power of two."""
    return int(max(1, min(triton.next_power_of_2(group), 8192 // (slices * padded))))


@dataclass(frozen=True)
class TileLaunch:
    """Keys a tile, warps a block, tiles in flight."""

    block_keys: int
    warps: int
    stages: int


def tile_launch(head_dim: int, group: int, q8_0: bool, coarse: bool = False) -> TileLaunch:
    """Launch shape by head size, query heads a group, cache type and slices, from benchmarks/attention.py on an H200.

    The tiles of all stages must fit 99 KiB of shared memory (sm_89), and nothing may spill.
    """
    if head_dim > 128:
        return TileLaunch(32, 8 if q8_0 else 4, 2)
    if coarse and group <= 8:
        return TileLaunch(64, 4, 2) if q8_0 else TileLaunch(128, 8, 2)
    if not q8_0:
        return TileLaunch(64, 8, 3)
    return TileLaunch(128 if group <= 8 else 64, 8, 2)
