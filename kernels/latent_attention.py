"""Latent attention: keys and values of all heads are made of one latent vector per position. The torch definition.

A position is cached as one row: the latent c, normalized, then its rotated key elements, which all heads share. The
key of head h is [W_h c | rotated], its value V_h c. Scores and sums can therefore be taken over the rows themselves: a
query [q | r] becomes [W_h^T q | r], whose product with a row is the score, and V_h is applied to the weighted sum of
latents. This is attention with one key head, whose values are the first elements of its keys. Sources: DeepSeek-AI
2024, "DeepSeek-V2", section 2.1; `DeepseekV2Attention` in the `transformers` library.
"""

import torch
from torch import Tensor

from quengine.kernels.attention import attention, mask_slice
from quengine.kernels.backend import KVLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.kv_rows import read_rows, slot_mapping, write_rows
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope import apply_rope
from quengine.kernels.rope_store import row_tables


def latent_attention(
    batch: ForwardBatch,
    q: Tensor,
    latent: Tensor,
    spec: LatentSpec,
    layer: KVLayer,
    absorb: Tensor,
    expand: Tensor,
) -> Tensor:
    """Causal latent attention of the step's tokens; their rows are written to `layer` before they are read.

    q: [T, heads * (plain + rotated)]; latent: [T, rank + rotated], neither normalized nor rotated; fp32 or fp64, the
    computation's type. absorb: [heads, rank, plain], expand: [heads, values, rank]. Returns [T, heads * values].
    """
    positions = batch.positions.long()
    queries = q.view(len(q), spec.heads, spec.query)
    cos, sin = (table[positions].to(q.dtype) for table in (spec.cos, spec.sin))
    turned = apply_rope(queries[..., spec.plain :], cos, sin, spec.rope_layout)
    absorbed = torch.einsum("thp,hrp->thr", queries[..., : spec.plain], absorb)
    queries = torch.cat([absorbed, turned], dim=-1)
    if spec.query_scale is not None:
        queries = queries * spec.query_scale[positions, None, None].to(q.dtype)
    rows = latent_rows(latent, spec, cos, sin)[:, None]
    write_rows(layer, slot_mapping(positions, row_tables(batch, spec.cache_group)), rows, rows)
    sums = torch.cat([_attend(*part, spec, layer) for part in _parts(batch, queries, spec)])
    return torch.einsum("thr,hvr->thv", sums, expand).flatten(1)


def latent_rows(latent: Tensor, spec: LatentSpec, cos: Tensor, sin: Tensor) -> Tensor:
    """The rows [T, rank + rotated] to cache for `latent`. cos, sin: those of each token's position."""
    held = rms_norm(latent[:, : spec.rank], spec.norm, spec.eps)
    return torch.cat(
        [held, apply_rope(latent[:, None, spec.rank :], cos, sin, spec.rope_layout)[:, 0]], dim=1
    )


def _parts(batch: ForwardBatch, queries: Tensor, spec: LatentSpec) -> list[tuple[Tensor, int, Tensor]]:
    """For each chunk in prefill, and each row in decode: its queries, the position of the first, its block table."""
    if batch.phase == "prefill":
        return [(queries[rows], start, table) for rows, start, table in batch.chunks(spec.cache_group)]
    tables = batch.block_tables_of(spec.cache_group)
    return list(zip(queries[:, None], batch.positions.tolist(), tables, strict=True))


def _attend(q: Tensor, start: int, table: Tensor, spec: LatentSpec, layer: KVLayer) -> Tensor:
    """The weighted sums of latents of T tokens of one sequence, from position `start` on: [T, heads, rank]."""
    tokens = len(q)
    mask = mask_slice(spec.mask_band, start, tokens) if tokens > 1 else None
    rows, _ = read_rows(layer, slot_mapping(torch.arange(start + tokens), table))
    rows = rows.to(q.dtype)
    return attention(q, rows, rows[..., : spec.rank], mask, spec.scale)
