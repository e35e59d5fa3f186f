"""Q/K norms, rotary embedding and the cache write, between the QKV matmul and attention: the torch definition.

It defines kernels/cuda/attention/rope_store.py and kernels/cpu/ops/rope_store.py; the reference backend runs it.
"""

import torch
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.hadamard import hadamard
from quengine.kernels.kv.kv_rows import slot_mapping, write_rows
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope import apply_rope


def rope_store(qkv: Tensor, spec: AttentionSpec, layer: KVLayer, batch: ForwardBatch) -> Tensor:
    """Rotates queries and keys of the T tokens of a step, and writes keys and values to `layer`.

    qkv: [T, (heads + 2 * kv_heads) * head_dim], fp32 or fp64; the computation is in that type. A gated attention's qkv
    comes without its gates (`split_gates` of kernels/attention.py). A `shared` attention's qkv has heads * head_dim
    columns, and nothing is written.
    Returns the rotated queries [T, heads, head_dim], transformed where the stored keys are (CacheFormat.hadamard).
    """
    tokens = qkv.shape[0]
    positions = batch.positions.long()
    heads = qkv.reshape(tokens, -1, spec.head_dim)
    first_value = spec.heads + spec.kv_heads
    q, k, v = heads[:, : spec.heads], heads[:, spec.heads : first_value], heads[:, first_value:]
    if not spec.norms_rotated:
        q, k = _qk_norms(q, k, spec)
    angles = positions if batch.angle_rows is None else batch.angle_rows.long()
    cos, sin = (table[angles].to(qkv.dtype) for table in (spec.cos, spec.sin))
    q, k = apply_rope(q, cos, sin, spec.rope_layout), apply_rope(k, cos, sin, spec.rope_layout)
    if spec.norms_rotated:
        q, k = _qk_norms(q, k, spec)
    if spec.v_norm:
        v = rms_norm(v, v.new_ones(spec.head_dim), spec.eps)
    if spec.query_scale is not None:
        q = q * spec.query_scale[positions, None, None].to(qkv.dtype)
    if not spec.shared:
        write_rows(layer, slot_mapping(positions, row_tables(batch, spec.cache_group)), k, v)
    return hadamard(q) if layer.format.hadamard else q


def row_tables(batch: ForwardBatch, group: int) -> Tensor:
    """The block table of each token of a step [T, blocks], or one that all share [blocks]."""
    tables = batch.block_tables_of(group)
    if batch.phase == "decode":
        return tables
    if len(batch.query_lens) == 1:
        return tables[0]
    return tables.repeat_interleave(torch.tensor(batch.query_lens, device=batch.device), 0)


def _qk_norms(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Queries and keys, normalized where the layer has norms of them."""
    if spec.q_norm is None:
        return q, k
    k = k if spec.k_norm is None else _qk_norm(k, spec.k_norm, spec.eps)
    return _qk_norm(q, spec.q_norm, spec.eps), k


def _qk_norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of heads [T, n, head_dim]: of each head by itself if weight is [head_dim], of all heads of a row together
    if it is [n * head_dim].
    """
    if weight.numel() == heads.shape[-1]:
        return rms_norm(heads, weight, eps)
    return rms_norm(heads.flatten(1), weight, eps).view_as(heads)


def first_visible(spec: AttentionSpec, end: int) -> int:
    """The first position that a token at position end - 1 sees."""
    return 0 if spec.window is None else max(0, end - spec.window)
