"""Attention of an encoder, in which positions of a text see those before and after them: the torch definition.

No state of a text is kept: all its rows are in one step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.attention import attention
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope import apply_rope

_QUERIES_AT_A_TIME = 512
"""Query rows computed at once in a text with a reach; scores beyond the reach are not computed."""


@dataclass(frozen=True)
class EncoderAttentionSpec:
    """The constants of an encoder's attention.

    heads, kv_heads: `heads` query heads share `kv_heads` key/value heads; None: each has its own. head_dim: elements of
    a head. scale: multiplies scores. cos, sin: as in AttentionSpec, one element of a rotated pair in each half; None:
    nothing is rotated. q_norm, k_norm: weights [head_dim] of the norms of each head, with `eps`; None: there are none.
    reach: how far a position sees to either side; None: to both ends of its text.
    """

    heads: int
    head_dim: int
    scale: float
    cos: Tensor | None = None
    sin: Tensor | None = None
    kv_heads: int | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    reach: int | None = None


def split_heads(
    batch: ForwardBatch, qkv: Tensor, spec: EncoderAttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of rows [T, (heads + 2 * kv_heads) * head_dim], the first two normed and rotated:
    [T, heads or kv_heads, head_dim] each."""
    shared = spec.kv_heads or spec.heads
    rows = qkv.view(len(qkv), spec.heads + 2 * shared, spec.head_dim)
    q, k, v = torch.split(rows, [spec.heads, shared, shared], 1)
    if spec.q_norm is not None and spec.k_norm is not None:
        q, k = rms_norm(q, spec.q_norm, spec.eps), rms_norm(k, spec.k_norm, spec.eps)
    if spec.cos is None or spec.sin is None:
        return q, k, v
    cos, sin = (table[batch.positions.long()].to(qkv.dtype) for table in (spec.cos, spec.sin))
    return apply_rope(q, cos, sin, "halves"), apply_rope(k, cos, sin, "halves"), v


def within_reach(queries: range, keys: range, reach: int, device: torch.device) -> Tensor:
    """Whether each query position sees each key position: bool [queries, keys]."""
    q, k = (torch.arange(each.start, each.stop, device=device) for each in (queries, keys))
    return (q[:, None] - k[None, :]).abs() <= reach


def encoder_attention(batch: ForwardBatch, qkv: Tensor, spec: EncoderAttentionSpec) -> Tensor:
    """`softmax(q k^T * scale) v` of each head among the rows of each text: [T, heads * head_dim].

    qkv: [T, (heads + 2 * kv_heads) * head_dim], queries, keys, values, in the dtype that is computed in. Sources:
    Vaswani et al. 2017; Devlin et al. 2018, "BERT"; Warner et al. 2024, "ModernBERT" (with a reach).
    """
    q, k, v = split_heads(batch, qkv, spec)
    texts = []
    for rows, _, _ in batch.chunks(0):
        seen = None
        if spec.reach is not None:
            every = range(len(q[rows]))
            seen = within_reach(every, every, spec.reach, qkv.device)
        texts.append(attention(q[rows], k[rows], v[rows], seen, spec.scale))
    return torch.cat(texts).flatten(1)


def fused_attention(
    batch: ForwardBatch, qkv: Tensor, spec: EncoderAttentionSpec, dtype: torch.dtype | None = None
) -> Tensor:
    """`encoder_attention` by torch's scaled_dot_product_attention, on qkv's device, in `dtype`; None: qkv's dtype."""
    q, k, v = (part.to(dtype or qkv.dtype).transpose(0, 1) for part in split_heads(batch, qkv, spec))
    if len(k) < len(q):  # kernels with a mask share no heads
        k, v = (part.repeat_interleave(len(q) // len(k), 0) for part in (k, v))
    texts = [
        part
        for rows, _, _ in batch.chunks(0)
        for part in _of_text(q[None, :, rows], k[None, :, rows], v[None, :, rows], spec)
    ]
    return torch.cat(texts).flatten(1)


def _of_text(q: Tensor, k: Tensor, v: Tensor, spec: EncoderAttentionSpec) -> Iterator[Tensor]:
    """Yields results [rows, heads, head_dim] of a text's queries in order: all at once, or with a reach in parts."""
    length = q.shape[2]
    reach = length if spec.reach is None else spec.reach
    step = length if reach >= length - 1 else _QUERIES_AT_A_TIME
    for first in range(0, length, step):
        queries = range(first, min(length, first + step))
        keys = range(max(0, first - reach), min(length, queries.stop + reach))
        seen = within_reach(queries, keys, reach, q.device) if reach < length - 1 else None
        at = slice(keys.start, keys.stop)
        found = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, first : queries.stop],
            k[:, :, at],
            v[:, :, at],
            seen,
            scale=spec.scale,
        )
        yield found[0].transpose(0, 1)
