"""What happens between the QKV matmul and attention, in torch: head norms, rotation, the write to the cache.

The definition of kernels/cuda/rope.py's `rope_store`, and what the reference and CPU backends run.
"""

import torch
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, Chunk, DecodeBatch, KVLayer, Position, PromptBatch
from quengine.kernels.kv_rows import slot_mapping, token_positions, write_rows
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope import apply_rope


def rope_store(qkv: Tensor, spec: AttentionSpec, layer: KVLayer, start: Position) -> Tensor:
    """Rotate queries and keys of the T tokens that `start` names; write keys and values to `layer`.

    qkv: [T, (heads + 2 * kv_heads) * head_dim], fp32 or fp64, computed in that type. Returns the rotated queries
    [T, heads, head_dim].
    """
    tokens = qkv.shape[0]
    positions = token_positions(start, tokens)
    heads = qkv.reshape(tokens, -1, spec.head_dim)
    first_value = spec.heads + spec.kv_heads
    q, k, v = heads[:, : spec.heads], heads[:, spec.heads : first_value], heads[:, first_value:]
    if spec.q_norm is not None and spec.k_norm is not None:
        q, k = rms_norm(q, spec.q_norm, spec.eps), rms_norm(k, spec.k_norm, spec.eps)
    cos, sin = (table[positions].to(qkv.dtype) for table in (spec.cos, spec.sin))
    q, k = apply_rope(q, cos, sin, spec.rope_layout), apply_rope(k, cos, sin, spec.rope_layout)
    if spec.query_scale is not None:
        q = q * spec.query_scale[positions, None, None].to(qkv.dtype)
    write_rows(layer, slot_mapping(positions, block_table(start)), k, v)
    return q


def block_table(start: Position) -> Tensor | None:
    """The table that `start` carries, or one for each token; None where the one sequence has the whole cache."""
    if isinstance(start, DecodeBatch):
        return start.block_tables
    if isinstance(start, PromptBatch):
        lengths = torch.tensor(start.lengths, device=start.block_tables.device)
        return start.block_tables.repeat_interleave(lengths, 0)
    return start.block_table if isinstance(start, Chunk) else None


def first_visible(spec: AttentionSpec, end: int) -> int:
    """The first position that a token at end - 1 sees."""
    return 0 if spec.window is None else max(0, end - spec.window)
