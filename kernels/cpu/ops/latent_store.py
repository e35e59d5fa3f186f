"""The rows that latent attention caches and its rotated queries, compiled; defined in kernels/latent_attention.py.

Positions and cache rows are read from memory when the kernel runs, so that a compiled list of kernels serves every
token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.cpu.attention.attention import CacheArguments
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import latent_store_kernel
from quengine.kernels.cpu.runtime.threads import Launch
from quengine.kernels.latent_spec import LatentSpec


@dataclass
class LatentStoreArguments(Arguments):
    """q: fp32 rows of heads, `q_stride` bytes apart, [plain | rotated] each; latent: fp32 rows, [rank | rotated].

    queries: fp32 [tokens, heads, rank + rotated]. positions, slots: int64, one per row. cos, sin: fp32 tables, `pairs`
    per position. norm: fp32 [rank]. query_scale: fp32 by position, or 0. rows: of the cache.
    """

    q: int
    q_stride: int
    latent: int
    latent_stride: int
    queries: int
    heads: int
    rank: int
    plain: int
    positions: int
    slots: int
    cos: int
    sin: int
    pairs: int
    norm: int
    eps: Fp32
    query_scale: int
    rows: CacheArguments


def latent_store_launch(
    q: Tensor,
    latent: Tensor,
    spec: LatentSpec,
    layer: KVLayer,
    positions: Tensor,
    slots: Tensor,
    queries: Tensor,
) -> Launch:
    """Norms and rotates latent fp32 [T, rank + rotated] and stores it to the cache. Scales q fp32 [T, heads * (plain +
    rotated)] by its position, rotates it, and copies the rotated elements to the ends of queries fp32 [T, heads, rank +
    rotated]. q and latent have adjacent elements in their rows and are overwritten; queries is contiguous.

    positions, slots: int64 [T], each token's position in its sequence and its row of the cache, read when the kernel
    runs.
    """
    assert q.stride(1) == latent.stride(1) == 1 and queries.is_contiguous()
    assert spec.cos.is_contiguous() and spec.sin.is_contiguous()
    arguments = LatentStoreArguments(
        q=q.data_ptr(),
        q_stride=4 * q.stride(0),
        latent=latent.data_ptr(),
        latent_stride=4 * latent.stride(0),
        queries=queries.data_ptr(),
        heads=spec.heads,
        rank=spec.rank,
        plain=spec.plain,
        positions=positions.data_ptr(),
        slots=slots.data_ptr(),
        cos=spec.cos.data_ptr(),
        sin=spec.sin.data_ptr(),
        pairs=spec.rotated // 2,
        norm=spec.norm.data_ptr(),
        eps=spec.eps,
        query_scale=0 if spec.query_scale is None else spec.query_scale.data_ptr(),
        rows=CacheArguments.of(layer.k, layer.k_scale),
    )
    kernel = latent_store_kernel(spec.rope_layout, layer.cache_type)
    keep = (q, latent, spec, layer, positions, slots, queries)
    return Launch(kernel, arguments, len(q) * (spec.heads + 1), keep=keep)
