"""Rotary embedding in CUDA kernels: heads are normalized and rotated as they are loaded.

There are two ways. In a decode step, and for partially rotated heads, each element loads its partner too (from L1). In
prefill, which is bound by bandwidth, both elements of a pair are loaded once, in wide loads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import AttentionSpec


class RotationPointers(NamedTuple):
    """cos and sin [context, rope_dim / 2], norm weights of queries and keys [head_dim], query scales [context], and
    int32 [T], the row of cos and sin of each token.

    Where a layer has no norms or scales, or tokens' rows are their positions, the field repeats the cosines and is not
    read.
    """

    cos: Tensor
    sin: Tensor
    q_norm: Tensor
    k_norm: Tensor
    query_scale: Tensor
    rows: Tensor


class RopeVariant(NamedTuple):
    """What a kernel that rotates is compiled for: rotated elements of a head; whether a pair has one element of each
    half (else neighbours); whether heads are normed, and whether after rotation; whether queries are scaled by
    position, value heads divided by their root mean square, and `RotationPointers.rows` given."""

    dim: int
    halves: bool
    norm: bool
    norm_rotated: bool
    query_scale: bool
    v_norm: bool = False
    rows: bool = False


def rotation_pointers(spec: AttentionSpec, rows: Tensor | None) -> RotationPointers:
    """A layer's tables and norm weights; norms are over single heads (row norms: `qk_row_norm`)."""
    assert spec.cos.is_contiguous() and spec.sin.is_contiguous()
    assert rows is None or rows.dtype == torch.int32
    optional = (spec.q_norm, spec.k_norm, spec.query_scale, rows)
    assert all(norm is None or norm.shape == (spec.head_dim,) for norm in optional[:2])
    return RotationPointers(spec.cos, spec.sin, *(spec.cos if given is None else given for given in optional))


def rope_variant(spec: AttentionSpec, rows: Tensor | None) -> RopeVariant:
    """The kernel variant for a layer, and the rows of its tables."""
    return RopeVariant(
        dim=2 * spec.cos.shape[1],
        halves=spec.rope_layout == "halves",
        norm=spec.q_norm is not None,
        norm_rotated=spec.q_norm is not None and spec.norms_rotated,
        query_scale=spec.query_scale is not None,
        v_norm=spec.v_norm,
        rows=rows is not None,
    )


@triton.jit
def angle_row(rotation, token, position, ROPE: tl.constexpr):
    """The row of the tables that a token at a position is rotated by."""
    row = position
    if ROPE.rows:
        row = tl.load(rotation.rows + token)
    return row.to(tl.int64)


@triton.jit
def load_angles(cos_ptr, sin_ptr, PADDED: tl.constexpr, ROPE: tl.constexpr):
    """One position's rotation of a head, from its table rows [rope_dim / 2]: cos, signed sin, partner [PADDED].

    Element d becomes `x[d] * cos[d] + x[partner[d]] * sin[d]`; elements from rope_dim on are unchanged.
    """
    HALF: tl.constexpr = ROPE.dim // 2
    d = tl.arange(0, PADDED)
    turned = d < ROPE.dim
    if ROPE.halves:
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
    head_ptr, live, angles, norm_ptr, eps, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr
):
    """Heads at pointers `head_ptr` [R], rotated by `load_angles`' result, normalized before or after where ROPE says
    so: fp32 [R, PADDED].

    Rows where `live` [R] is false and columns from HEAD_DIM on are 0.
    """
    cos, sin, partner = angles
    d = tl.arange(0, PADDED)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    x = tl.load(head_ptr[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(head_ptr[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    inside = d < HEAD_DIM
    if ROPE.norm and not ROPE.norm_rotated:
        weight = tl.load(norm_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        partner_weight = tl.load(norm_ptr + partner, mask=inside, other=0.0).to(tl.float32)[None, :]
        inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * inverse_rms * weight
        y = y * inverse_rms * partner_weight
    turned = x * cos[None, :] + y * sin[None, :]
    if ROPE.norm_rotated:
        weight = tl.load(norm_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        turned = turned * tl.rsqrt(tl.sum(turned * turned, 1) / HEAD_DIM + eps)[:, None] * weight
    return turned


@triton.jit
def _normalized(near, far, i, norm_ptr, eps, ROPE: tl.constexpr):
    """Both elements [R, rope_dim / 2] of the pairs i of heads, normalized."""
    near_at = i if ROPE.halves else 2 * i
    far_at = ROPE.dim // 2 + i if ROPE.halves else 2 * i + 1
    inverse_rms = tl.rsqrt(tl.sum(near * near + far * far, 1) / ROPE.dim + eps)[:, None]
    near = near * inverse_rms * tl.load(norm_ptr + near_at).to(tl.float32)[None, :]
    far = far * inverse_rms * tl.load(norm_ptr + far_at).to(tl.float32)[None, :]
    return near, far


@triton.jit
def load_rotated_pairs(head_ptr, live, cos_ptr, sin_ptr, norm_ptr, eps, ROPE: tl.constexpr):
    """`load_rotated` for heads that are fully rotated, of a power-of-two size: fp32 [R, rope_dim]. cos_ptr,
    sin_ptr: the position's rows of the tables.
    """
    R: tl.constexpr = head_ptr.shape[0]
    HEAD_DIM: tl.constexpr = ROPE.dim
    HALF: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, HALF)
    if ROPE.halves:
        near = tl.load(head_ptr[:, None] + i[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        far = tl.load(head_ptr[:, None] + (HALF + i)[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    else:
        both = load_heads(head_ptr, live, HEAD_DIM, HEAD_DIM)
        near, far = tl.split(tl.reshape(both, [R, HALF, 2]))
    cos = tl.load(cos_ptr + i)[None, :]
    sin = tl.load(sin_ptr + i)[None, :]
    if ROPE.norm and not ROPE.norm_rotated:
        near, far = _normalized(near, far, i, norm_ptr, eps, ROPE)
    near, far = near * cos - far * sin, far * cos + near * sin
    if ROPE.norm_rotated:
        near, far = _normalized(near, far, i, norm_ptr, eps, ROPE)
    turned = tl.join(near, far)
    if ROPE.halves:
        turned = tl.permute(turned, [0, 2, 1])
    return tl.reshape(turned, [R, HEAD_DIM])


@triton.jit
def load_values(head_ptr, live, scale, eps, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr):
    """Value heads at pointers `head_ptr` [R], times scale, then normalized where ROPE says so: fp32 [R, PADDED]."""
    v = load_heads(head_ptr, live, HEAD_DIM, PADDED) * scale
    if ROPE.v_norm:
        v *= tl.rsqrt(tl.sum(v * v, 1) / HEAD_DIM + eps)[:, None]
    return v


@triton.jit
def load_heads(head_ptr, live, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Heads at pointers `head_ptr` [R], unrotated: fp32 [R, PADDED], 0 where not live."""
    d = tl.arange(0, PADDED)[None, :]
    return tl.load(head_ptr[:, None] + d, mask=live[:, None] & (d < HEAD_DIM), other=0.0).to(tl.float32)
