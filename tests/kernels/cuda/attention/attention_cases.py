"""What the tests of attention have in common: a layer's settings, and a cache with something in it."""

import torch

from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.kv_store import KVStore
from quengine.kernels.kv.kv_q8_0 import quantize_rows
from quengine.kernels.rope import RopeSpec, rope_table


def make_spec(
    device: torch.device,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    layout: str = "pairs",
    rope_dim: int | None = None,
    norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> AttentionSpec:
    """`norms`: weights of the queries' and of the keys' norm."""
    cos, sin = rope_table(RopeSpec(dim=rope_dim or head_dim), context, device)
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        rope_layout=layout,
        cos=cos,
        sin=sin,
        mask_band=causal_mask_band(140, context, window, device),
        q_norm=norms[0],
        k_norm=norms[1],
        eps=1e-6,
    )


def filled_cache(
    device: torch.device, sequences: int, context: int, kv_heads: int, head_dim: int, q8_0: bool
) -> KVStore:
    generator = torch.Generator().manual_seed(head_dim + kv_heads)
    cache = KVStore.allocate(sequences, context, kv_heads, head_dim, device, q8_0)
    for codes, scales in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        rows = torch.randn(codes.shape, generator=generator)
        if scales is None:
            codes.copy_(rows)
        else:
            quantized = quantize_rows(rows)
            codes.copy_(quantized[0])
            scales.copy_(quantized[1])
    return cache
