"""Rotary embedding on CUDA, and the launch that rotates a chunk of tokens and writes its keys and values.

Heads are rotated while they are loaded. A decode step's, and those of which only a part is turned: an element's
partner is loaded beside it (from L1), so no layout needs a shuffle and both layouts, partial rotation and per-head
norms (Qwen 3) are one code path. A prompt's, whose bytes are what takes time: both elements of a pair are loaded once,
several side by side. Knows the merged QKV row, the angle table and the cache; not attention.
"""

import torch
import triton
import triton.language as tl

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.kv_store import BLOCK, KVStore, store_rows, table_rows
from quengine.kernels.cuda.gemm.fp16_operand import ScaledProduct
from quengine.kernels.cuda.launch.relaunch import Relaunched
from quengine.kernels.kv.cache_types import BLOCK_SIZE


@triton.jit
def load_angles(cos_ptr, sin_ptr, PADDED: tl.constexpr, ROPE_DIM: tl.constexpr, HALVES: tl.constexpr):
    """One position's rotation of a head, from its table rows [ROPE_DIM / 2]: cos, signed sin, partner [PADDED].

    Element d becomes `x[d] * cos[d] + x[partner[d]] * sin[d]`; from ROPE_DIM on it is its own partner and stays.
    """
    HALF: tl.constexpr = ROPE_DIM // 2
    d = tl.arange(0, PADDED)
    turned = d < ROPE_DIM
    if HALVES:
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        angle = tl.where(d < HALF, d, d - HALF)
        sign = tl.where(d < HALF, -1.0, 1.0)
    else:
        partner = d ^ 1
        angle = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0) * sign
    return cos, sin, tl.where(turned, partner, d)


@triton.jit
def load_rotated(
    head_ptr,
    live,
    cos,
    sin,
    partner,
    norm_ptr,
    eps,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads at pointers `head_ptr` [R], normalised where NORM, rotated by `load_angles`' result: fp32 [R, PADDED].

    Rows where `live` [R] is false and columns from HEAD_DIM on are 0.
    """
    d = tl.arange(0, PADDED)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    x = tl.load(head_ptr[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(head_ptr[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inside = d < HEAD_DIM
        weight = tl.load(norm_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        partner_weight = tl.load(norm_ptr + partner, mask=inside, other=0.0).to(tl.float32)[None, :]
        inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * inverse_rms * weight
        y = y * inverse_rms * partner_weight
    return x * cos[None, :] + y * sin[None, :]


@triton.jit
def _load_turned(
    head_ptr, live, cos_ptr, sin_ptr, norm_ptr, eps, HEAD_DIM: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """As `load_rotated`, of heads that are turned whole, a power of two: fp32 [R, HEAD_DIM]. cos_ptr, sin_ptr: the
    position's rows of the table."""
    R: tl.constexpr = head_ptr.shape[0]
    HALF: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, HALF)
    if HALVES:
        near = tl.load(head_ptr[:, None] + i[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        far = tl.load(head_ptr[:, None] + (HALF + i)[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    else:
        both = load_heads(head_ptr, live, HEAD_DIM, HEAD_DIM)
        near, far = tl.split(tl.reshape(both, [R, HALF, 2]))
    cos = tl.load(cos_ptr + i)[None, :]
    sin = tl.load(sin_ptr + i)[None, :]
    if NORM:
        near_at = i if HALVES else 2 * i
        far_at = HALF + i if HALVES else 2 * i + 1
        inverse_rms = tl.rsqrt(tl.sum(near * near + far * far, 1) / HEAD_DIM + eps)[:, None]
        near = near * inverse_rms * tl.load(norm_ptr + near_at).to(tl.float32)[None, :]
        far = far * inverse_rms * tl.load(norm_ptr + far_at).to(tl.float32)[None, :]
    turned = tl.join(near * cos - far * sin, far * cos + near * sin)
    if HALVES:
        turned = tl.permute(turned, [0, 2, 1])
    return tl.reshape(turned, [R, HEAD_DIM])


@triton.jit
def load_heads(head_ptr, live, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Heads at pointers `head_ptr` [R] as they are: fp32 [R, PADDED], 0 where not live."""
    d = tl.arange(0, PADDED)[None, :]
    return tl.load(head_ptr[:, None] + d, mask=live[:, None] & (d < HEAD_DIM), other=0.0).to(tl.float32)


@Relaunched
@triton.jit(do_not_specialize=["context", "blocks"])
def _rope_store_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    query_scale_ptr,
    row_scale_ptr,
    position_ptr,
    sequence_ptr,
    table_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    eps,
    inverse_weight_scale,
    context,
    blocks,
    qkv_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    UNSCALE: tl.constexpr,
    Q8: tl.constexpr,
    PAGED: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_HEADS
    position = tl.load(position_ptr + token).to(tl.int64)
    head = first_head + tl.arange(0, BLOCK_HEADS)
    live = head < HEADS + 2 * KV_HEADS
    head_ptr = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    offset = position * (ROPE_DIM // 2)
    WHOLE: tl.constexpr = ROPE_DIM == HEAD_DIM and HEAD_DIM == PADDED
    if not WHOLE:
        cos, sin, partner = load_angles(cos_ptr + offset, sin_ptr + offset, PADDED, ROPE_DIM, HALVES)
    scale = 1.0
    if UNSCALE:
        scale = tl.load(row_scale_ptr + token) * inverse_weight_scale
        if NORM:  # a normed head has no scale, but its eps has
            eps /= scale * scale
    if first_head < HEADS:
        if WHOLE:
            q = _load_turned(
                head_ptr, live, cos_ptr + offset, sin_ptr + offset, q_norm_ptr, eps, HEAD_DIM, HALVES, NORM
            )
        else:
            q = load_rotated(head_ptr, live, cos, sin, partner, q_norm_ptr, eps, HEAD_DIM, PADDED, NORM)
        if UNSCALE and not NORM:
            q *= scale
        if QUERY_SCALE:
            q *= tl.load(query_scale_ptr + position)
        d = tl.arange(0, PADDED)[None, :]
        out = q_ptr + (token * HEADS + head[:, None]) * HEAD_DIM + d
        tl.store(out, q.to(q_ptr.dtype.element_ty), mask=live[:, None] & (d < HEAD_DIM))
    else:
        # A block holds heads of one section only: BLOCK_HEADS divides both HEADS and KV_HEADS.
        if PAGED:
            if SEQUENCES:
                table_ptr += tl.load(sequence_ptr + token) * blocks
            at = table_rows(table_ptr, blocks, position, False)
            inside = position < blocks * BLOCK
        else:
            at = position
            inside = position < context
        row = (head - HEADS).to(tl.int64) * context + at
        if first_head < HEADS + KV_HEADS:
            if WHOLE:
                k = _load_turned(
                    head_ptr,
                    live,
                    cos_ptr + offset,
                    sin_ptr + offset,
                    k_norm_ptr,
                    eps,
                    HEAD_DIM,
                    HALVES,
                    NORM,
                )
            else:
                k = load_rotated(head_ptr, live, cos, sin, partner, k_norm_ptr, eps, HEAD_DIM, PADDED, NORM)
            if UNSCALE and not NORM:
                k *= scale
            store_rows(k, row, live & inside, k_ptr, k_scale_ptr, HEAD_DIM, PADDED, Q8)
        else:
            v = load_heads(head_ptr, live, HEAD_DIM, PADDED) * scale
            row -= context * KV_HEADS
            store_rows(v, row, live & inside, v_ptr, v_scale_ptr, HEAD_DIM, PADDED, Q8)


def rope_warps(elements: int) -> int:
    """Warps of a block that rotates so many elements: a power of two, as Triton wants, 1 to 4."""
    return max(1, min(4, 1 << max(0, (elements // 256).bit_length() - 1)))


def rope_store(
    qkv: torch.Tensor | ScaledProduct,
    spec: AttentionSpec,
    cache: KVStore,
    sequence: int,
    positions: torch.Tensor,
    pdl: bool = False,
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    sequences: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys of T tokens of one sequence and write its keys and values to the cache.

    qkv: [T, (heads + 2 * kv_heads) * head_dim], fp32 or fp16, unit inner stride, or products of that shape that are
    not yet scaled here; positions: int32 [T] on the device (a position past the context is not written). With
    `block_table`, int32 on the device, `cache` is a pool and `sequence` 0: position p is row
    `block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE`. With `sequences`, int32 [T] on the device, the tokens
    are those of several, and `block_table` [sequences, blocks] has a row for each. Returns the rotated queries
    [T, heads, head_dim] fp16, in `out` where that is given, contiguous.
    With `pdl` the launch may overlap the end of the one before it (sm_90 and later only).
    """
    weight_scale, row_scale = 1.0, None
    if isinstance(qkv, ScaledProduct):
        weight_scale, row_scale, qkv = qkv.weight_scale, qkv.row_scale, qkv.values
    tokens = qkv.shape[0]
    kv_heads, context, head_dim = cache.k.shape[1:]
    assert qkv.stride(1) == 1 and qkv.shape[1] == (spec.heads + 2 * kv_heads) * head_dim
    assert positions.shape == (tokens,) and positions.dtype == torch.int32
    assert sequences is None or (sequences.shape == (tokens,) and sequences.dtype == torch.int32)
    assert spec.cos.is_contiguous() and spec.sin.is_contiguous()
    table, blocks = table_arguments(cache, block_table, positions)
    shape = (tokens, spec.heads, head_dim)
    q = torch.empty(shape, dtype=torch.float16, device=qkv.device) if out is None else out.view(shape)
    block_heads = heads_per_block(spec.heads, kv_heads)
    k, v, k_scale, v_scale = sequence_pointers(cache, sequence)
    grid = (tokens, (spec.heads + 2 * kv_heads) // block_heads)
    _rope_store_kernel[grid](
        qkv,
        *rotation_arguments(spec),
        spec.cos if row_scale is None else row_scale,
        positions,
        positions if sequences is None else sequences,
        table,
        q,
        k,
        v,
        k_scale,
        v_scale,
        spec.eps,
        1.0 / weight_scale,
        context,
        blocks,
        qkv.stride(0),
        HEADS=spec.heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PADDED=1 << (head_dim - 1).bit_length(),
        **rotation_constants(spec),
        UNSCALE=row_scale is not None,
        Q8=cache.q8_0,
        PAGED=block_table is not None,
        SEQUENCES=sequences is not None,
        BLOCK_HEADS=block_heads,
        PDL=pdl,
        num_warps=rope_warps(block_heads * head_dim),
        launch_pdl=pdl,
    )
    return q


def heads_per_block(heads: int, kv_heads: int) -> int:
    """The largest power of two, at most 8, that divides both counts: a block then holds one section."""
    block = 8
    while heads % block or kv_heads % block:
        block //= 2
    return block


def rotation_arguments(spec: AttentionSpec) -> tuple[torch.Tensor, ...]:
    """What a kernel takes to rotate: cos, sin, the weights of the queries' and of the keys' norm, the queries' scales.

    Where a layer has no norms or scales its cosines stand in, never read.
    """
    optional = (spec.q_norm, spec.k_norm, spec.query_scale)
    return spec.cos, spec.sin, *(spec.cos if given is None else given for given in optional)


def rotation_constants(spec: AttentionSpec) -> dict[str, int | bool]:
    """What it is compiled for."""
    return {
        "ROPE_DIM": 2 * spec.cos.shape[1],
        "HALVES": spec.rope_layout == "halves",
        "NORM": spec.q_norm is not None,
        "QUERY_SCALE": spec.query_scale is not None,
    }


def table_arguments(
    cache: KVStore, block_tables: torch.Tensor | None, unused: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """What a kernel takes for block tables: int32 [blocks] or [sequences, blocks], and `blocks`.

    Without them `unused` stands in, never read.
    """
    if block_tables is None:
        return unused, 0
    assert cache.k.shape[0] == 1 and cache.k.shape[2] % BLOCK_SIZE == 0
    assert cache.k.shape[2] * cache.k.shape[3] < 2**31, "a kernel counts a head's elements in 32 bits"
    assert block_tables.dtype == torch.int32 and block_tables.is_contiguous()
    return block_tables, block_tables.shape[-1]


def sequence_pointers(
    cache: KVStore, sequence: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """k, v, k_scale, v_scale of one sequence; an fp16 cache has no scales and stands in, never read."""
    k, v = cache.k[sequence], cache.v[sequence]
    if cache.k_scale is None or cache.v_scale is None:
        return k, v, k, v
    return k, v, cache.k_scale[sequence], cache.v_scale[sequence]
