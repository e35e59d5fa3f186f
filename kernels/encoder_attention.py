"""Attention of an encoder, in which every position of a text sees every other: the torch definition.

Nothing is kept of a text: all its rows are of one step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.attention import attention
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.rope import apply_rope


@dataclass(frozen=True)
class EncoderAttentionSpec:
    """`heads` heads of `head_dim`, of queries, keys and values alike. scale: multiplies the scores. cos, sin: as in
    AttentionSpec, one element of a rotated pair in each half; None: nothing is rotated."""

    heads: int
    head_dim: int
    scale: float
    cos: Tensor | None = None
    sin: Tensor | None = None


def split_heads(
    batch: ForwardBatch, qkv: Tensor, spec: EncoderAttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, rotated, and values, [T, heads, head_dim] each, of rows [T, 3 * heads * head_dim]."""
    q, k, v = qkv.view(len(qkv), 3, spec.heads, spec.head_dim).unbind(1)
    if spec.cos is None or spec.sin is None:
        return q, k, v
    cos, sin = (table[batch.positions.long()].to(qkv.dtype) for table in (spec.cos, spec.sin))
    return apply_rope(q, cos, sin, "halves"), apply_rope(k, cos, sin, "halves"), v


def encoder_attention(batch: ForwardBatch, qkv: Tensor, spec: EncoderAttentionSpec) -> Tensor:
    """`softmax(q k^T * scale) v` of each head among the rows of each text: [T, heads * head_dim].

    qkv: [T, 3 * heads * head_dim], queries, keys, values, in the dtype that is computed in. Source: Vaswani et al.
    2017; Devlin et al. 2018, "BERT".
    """
    q, k, v = split_heads(batch, qkv, spec)
    texts = [attention(q[rows], k[rows], v[rows], None, spec.scale) for rows, _, _ in batch.chunks(0)]
    return torch.cat(texts).flatten(1)


def fused_attention(
    batch: ForwardBatch, qkv: Tensor, spec: EncoderAttentionSpec, dtype: torch.dtype | None = None
) -> Tensor:
    """`encoder_attention` by torch's own operation, in `dtype`, qkv's where it is None, and on its device."""
    q, k, v = (part.to(dtype or qkv.dtype).transpose(0, 1) for part in split_heads(batch, qkv, spec))
    texts = [
        torch.nn.functional.scaled_dot_product_attention(
            q[None, :, rows], k[None, :, rows], v[None, :, rows], scale=spec.scale
        )[0].transpose(0, 1)
        for rows, _, _ in batch.chunks(0)
    ]
    return torch.cat(texts).flatten(1)
