"""The launch between the QKV matmul and prefill attention: rotates queries and keys, stores keys and values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cuda.attention.hadamard import hadamard_heads
from quengine.kernels.cuda.attention.kv_store import (
    BLOCK,
    cache_pointers,
    check_block_tables,
    store_rows,
    table_rows,
)
from quengine.kernels.cuda.attention.output_gate import qkv_width
from quengine.kernels.cuda.attention.rope import (
    angle_row,
    load_angles,
    load_rotated,
    load_rotated_pairs,
    load_values,
    rope_variant,
    rotation_pointers,
)
from quengine.kernels.cuda.gemm.fp16_operand import ScaledProduct
from quengine.kernels.cuda.launch.kernel import DirectLaunch


@triton.jit
def _load_queries_or_keys(
    head_ptr, live, cos_ptr, sin_ptr, norm_ptr, eps, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr
):  # fmt: skip
    """Heads at pointers `head_ptr` [R], normalized and rotated: fp32 [R, PADDED]."""
    if ROPE.dim == HEAD_DIM and HEAD_DIM == PADDED:
        x = load_rotated_pairs(head_ptr, live, cos_ptr, sin_ptr, norm_ptr, eps, ROPE)
    else:
        angles = load_angles(cos_ptr, sin_ptr, PADDED, ROPE)
        x = load_rotated(head_ptr, live, angles, norm_ptr, eps, HEAD_DIM, PADDED, ROPE)
    return x


@DirectLaunch
@triton.jit(do_not_specialize=["cache_rows", "blocks"])
def _rope_store_kernel(
    qkv_ptr, rotation, row_scale_ptr, position_ptr, sequence_ptr, table_ptr, q_ptr, cache,
    eps, weight_scale, cache_rows, blocks, qkv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE: tl.constexpr, ROW_SCALE: tl.constexpr,
    BITS: tl.constexpr, BLOCK_HEADS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (token, BLOCK_HEADS heads of one section: queries, keys or values). GATED: queries' gates lie after each
    of their heads."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_HEADS
    position = tl.load(position_ptr + token).to(tl.int64)
    head = first_head + tl.arange(0, BLOCK_HEADS)
    live = head < HEADS + 2 * KV_HEADS
    place = head
    if GATED:
        place = head + tl.minimum(head, HEADS)
    head_ptr = qkv_ptr + token * qkv_stride + place * HEAD_DIM
    offset = angle_row(rotation, token, position, ROPE) * (ROPE.dim // 2)
    cos_ptr = rotation.cos + offset
    sin_ptr = rotation.sin + offset
    scale = 1.0
    v_eps = eps
    if ROW_SCALE:
        scale = tl.load(row_scale_ptr + token) * weight_scale
        if ROPE.norm:  # a normalized head does not depend on the scale, but for eps
            eps /= scale * scale
    if first_head < HEADS:
        q = _load_queries_or_keys(
            head_ptr, live, cos_ptr, sin_ptr, rotation.q_norm, eps, HEAD_DIM, PADDED, ROPE
        )
        if ROW_SCALE and not ROPE.norm:
            q *= scale
        if ROPE.query_scale:
            q *= tl.load(rotation.query_scale + position)
        if BITS == 4:
            q = hadamard_heads(q, HEAD_DIM)
        d = tl.arange(0, PADDED)[None, :]
        out = q_ptr + (token * HEADS + head[:, None]) * HEAD_DIM + d
        tl.store(out, q.to(q_ptr.dtype.element_ty), mask=live[:, None] & (d < HEAD_DIM))
    else:
        table_ptr += tl.load(sequence_ptr + token) * blocks
        inside = position < blocks * BLOCK
        row = (head - HEADS).to(tl.int64) * cache_rows + table_rows(table_ptr, blocks, position, False)
        if first_head < HEADS + KV_HEADS:
            k = _load_queries_or_keys(
                head_ptr, live, cos_ptr, sin_ptr, rotation.k_norm, eps, HEAD_DIM, PADDED, ROPE
            )
            if ROW_SCALE and not ROPE.norm:
                k *= scale
            store_rows(k, row, live & inside, cache.k, cache.k_scale, HEAD_DIM, PADDED, BITS)
        else:
            v = load_values(head_ptr, live, scale, v_eps, HEAD_DIM, PADDED, ROPE)
            row -= cache_rows * KV_HEADS
            store_rows(v, row, live & inside, cache.v, cache.v_scale, HEAD_DIM, PADDED, BITS)


def rope_store(
    qkv: Tensor | ScaledProduct,
    spec: AttentionSpec,
    layer: KVLayer,
    positions: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    out: Tensor | None = None,
    pdl: bool = False,
    angle_rows: Tensor | None = None,
) -> Tensor:
    """Rotates queries and keys of T tokens and stores their keys and values to the cache.

    qkv: [T, (heads + 2 * kv_heads) * head_dim], or [T, qkv_width(spec)] if the spec is gated or shared; fp32 or fp16,
    unit inner stride, or products of that shape, which are scaled here. positions: int32 [T] on the device (a position
    past the block table is not written); block_tables: int32 [sequences, blocks]; sequences: int32 [T], each token's
    row of block_tables. angle_rows: as in ForwardBatch.
    Returns the rotated queries [T, heads, head_dim] fp16, in `out` if given, contiguous; for a q4_0 cache they are
    transformed (kernels/hadamard.py).
    With `pdl` the launch may overlap the end of the one before it (sm_90 and later only).
    """
    weight_scale, row_scale = 1.0, None
    if isinstance(qkv, ScaledProduct):
        weight_scale, row_scale, qkv = 1.0 / qkv.weight_scale, qkv.row_scale, qkv.values
    tokens = qkv.shape[0]
    cache_rows, kv_heads, head_dim = *layer.k.shape[:2], layer.head_dim
    assert qkv.stride(1) == 1 and qkv.shape[1] == qkv_width(spec)
    assert positions.shape == sequences.shape == (tokens,)
    assert positions.dtype == sequences.dtype == torch.int32
    check_block_tables(block_tables)
    shape = (tokens, spec.heads, head_dim)
    q = torch.empty(shape, dtype=torch.float16, device=qkv.device) if out is None else out.view(shape)
    block_heads = heads_per_block(spec.heads, kv_heads)
    grid = (tokens, (spec.heads + (0 if spec.shared else 2 * kv_heads)) // block_heads)
    _rope_store_kernel[grid](
        qkv, rotation_pointers(spec, angle_rows), spec.cos if row_scale is None else row_scale, positions, sequences,
        block_tables, q, cache_pointers(layer),
        spec.eps, weight_scale, cache_rows, block_tables.shape[1], qkv.stride(0),
        HEADS=spec.heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ROPE=rope_variant(spec, angle_rows),
        ROW_SCALE=row_scale is not None, BITS=layer.format.bits, BLOCK_HEADS=block_heads, GATED=spec.gated,
        PDL=pdl,
        num_warps=rope_warps(block_heads * head_dim), launch_pdl=pdl,
    )  # fmt: skip
    return q


def rope_warps(elements: int) -> int:
    """Warps of a block that rotates `elements` elements: a power of two, as Triton requires, 1 to 4."""
    return max(1, min(4, 1 << max(0, (elements // 256).bit_length() - 1)))


def heads_per_block(heads: int, kv_heads: int) -> int:
    """The largest power of two, at most 8, that divides both counts, so that a block's heads are of one section."""
    block = 8
    while heads % block or kv_heads % block:
        block //= 2
    return block
