"""Latent attention on the CPU, over the latents as stored; defined in kernels/latent_attention.py.

Each head's query is first multiplied by one matrix of the head, and its weighted sum of latents by another at the end.
Attention then has one key of rank + rotated elements per position, whose first `rank` elements are the value. In decode
the cache is viewed as if every head had its own, so that heads are tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quengine.errors import CannotRunError
from quengine.kernels.backend import KVLayer
from quengine.kernels.cpu.attention.prefill_attention import WIDEST, prefill_attention
from quengine.kernels.cpu.gemm.tile_matmul import tile_matmul_launches
from quengine.kernels.cpu.gemv.matmul import matvec_launch, quantize_launch
from quengine.kernels.cpu.gemv.quantized_rows import quantized_row_bytes
from quengine.kernels.cpu.moe.experts import CpuExperts
from quengine.kernels.cpu.ops.latent_store import latent_store_launch
from quengine.kernels.cpu.ops.rope_store import checked_slots
from quengine.kernels.cpu.runtime.threads import Launch, run
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.latent_spec import LatentSpec


def prompt_latent_attention(
    batch: ForwardBatch, q: Tensor, latent: Tensor, spec: LatentSpec, layer: KVLayer
) -> Tensor:
    """Latent attention of chunks of prompts: fp32 [T, heads * values]. q [T, heads * (plain + rotated)] and latent [T,
    rank + rotated] are overwritten.
    """
    positions, slots = checked_slots(batch, spec.cache_group, len(spec.cos), layer)
    queries = torch.empty(len(q), spec.heads, spec.row)
    run([latent_store_launch(q, latent, spec, layer, positions, slots, queries)])
    plain = q.view(len(q), spec.heads, spec.query)[..., : spec.plain]
    _multiply_heads(plain, spec.absorb, queries[..., : spec.rank])
    one = views_of_heads(layer, spec, heads=1)
    chunks = [
        prefill_attention(queries[rows], one, start, spec.scale, None, table)
        for rows, start, table in batch.chunks(spec.cache_group)
    ]
    out = torch.empty(len(q), spec.heads, spec.values)
    _multiply_heads(chunks[0] if len(chunks) == 1 else torch.cat(chunks), spec.expand, out)
    return out.view(len(q), -1)


def check_latent(spec: LatentSpec) -> None:
    """Raises CannotRunError for rows wider than the kernels have room for."""
    if spec.row > WIDEST:
        what = f"latents of {spec.rank} and {spec.rotated} rotated elements"
        raise CannotRunError(f"{what} are not supported on the CPU, only {WIDEST} together")


def views_of_heads(layer: KVLayer, spec: LatentSpec, heads: int | None = None) -> KVLayer:
    """The cached rows as keys and values of each of `heads` heads, by default all."""
    count = heads or spec.heads
    k = layer.k.expand(-1, count, -1)
    if layer.k_scale is None:
        return KVLayer(k, k[..., : spec.rank])
    scale = layer.k_scale.expand(-1, count, -1)
    return KVLayer(k, k[..., : spec.rank], scale, scale[..., : spec.rank // 32])


def head_launches(
    x: Tensor, matrices: CpuExperts, out: Tensor, records: Tensor | None
) -> tuple[list[Launch], list[Launch]]:
    """The kernels of out [T, heads, N] = each head's matrix [N, K] times x [T, heads, K], by q-dot: those that quantize
    and those that multiply, one of each per head. records: uint8 [T, heads, quantized_row_bytes(K)], for quantized
    weights, else None: no kernels quantize.
    """
    (part,) = matrices.parts
    quantizes, products = list[Launch](), list[Launch]()
    for head, w in enumerate(part.matrices):
        source = x[:, head]
        if records is not None:
            quantizes.append(quantize_launch(source, records[:, head]))
            source = records[:, head]
        products.append(matvec_launch(source, w, out[:, head], 0, after_previous=False))
    return quantizes, products


def record_bytes(matrices: CpuExperts) -> int:
    """Bytes of a quantized row of one head; 0 where its matrix is not quantized."""
    w = matrices.parts[0].first
    return quantized_row_bytes(w.cols) if w.format.is_quantized else 0


def _multiply_heads(x: Tensor, matrices: CpuExperts, out: Tensor) -> None:
    """As `head_launches`, by the prefill kernels."""
    (part,) = matrices.parts
    for head, w in enumerate(part.matrices):
        run(tile_matmul_launches(x[:, head], [w], out[:, head]))
