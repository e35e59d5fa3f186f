"""RoPE with cache write, and prefill attention in chunks, against the torch definitions in fp64."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.attention import attention, causal_mask_band, mask_slice
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.attention_prefill import attention_prefill
from quengine.kernels.cuda.attention.kv_store import KVStore
from quengine.kernels.cuda.attention.rope import heads_per_block, rope_store, rope_warps
from quengine.kernels.kv.kv_q8_0 import dequantize_rows
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope import RopeSpec, apply_rope, rope_table
from tests.kernels.cuda.attention.attention_cases import make_spec

CONTEXT = 256


def test_warps_are_a_power_of_two_for_every_head_size() -> None:
    for head_dim in (64, 80, 96, 112, 128, 192, 256):
        for heads in (1, 2, 4, 8, 16, 32):
            assert rope_warps(heads * head_dim) in (1, 2, 4)


def test_heads_per_block_divides_every_section() -> None:
    assert heads_per_block(32, 8) == 8
    assert heads_per_block(9, 3) == 1
    assert heads_per_block(6, 2) == 2


@pytest.mark.parametrize(
    "layout,rope_dim,normed", [("pairs", 64, False), ("halves", 64, True), ("halves", 32, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rope_store_rotates_and_writes(
    layout: str, rope_dim: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(rope_dim)
    norm = (torch.rand(64, generator=generator) + 0.5).to(device) if normed else None
    spec = make_spec(device, CONTEXT, 6, 2, 64, None, layout, rope_dim, (norm, norm))
    wide = torch.randn(5, 10 * 64 + 3, generator=generator).to(device, dtype)
    qkv = wide[:, :640]  # rows of a wider buffer
    cache = KVStore.allocate(2, CONTEXT, 2, 64, device)
    cache.k.fill_(7.0)
    cache.v.fill_(7.0)
    positions = torch.tensor([17, 3, 255, 100, 18], dtype=torch.int32, device=device)
    q = rope_store(qkv, spec, cache, 1, positions)
    expected_q, expected_k, expected_v = qkv.double().view(5, 10, 64).split([6, 2, 2], dim=1)
    if norm is not None:
        expected_q = rms_norm(expected_q, norm.double(), 1e-6)
        expected_k = rms_norm(expected_k, norm.double(), 1e-6)
    cos, sin = spec.cos[positions.long()], spec.sin[positions.long()]
    expected_q = apply_rope(expected_q, cos, sin, spec.rope_layout)
    expected_k = apply_rope(expected_k, cos, sin, spec.rope_layout)
    torch.testing.assert_close(q.double(), expected_q, rtol=1e-3, atol=1e-5)
    for held, expected in ((cache.k, expected_k), (cache.v, expected_v)):
        rows = held[1, :, positions.long()].transpose(0, 1)
        torch.testing.assert_close(rows.double(), expected, rtol=1e-3, atol=1e-5)
    assert bool((cache.k[0] == 7).all()), "another sequence's rows changed"
    untouched = torch.ones(CONTEXT, dtype=torch.bool, device=device)
    untouched[positions.long()] = False
    assert bool((cache.k[1, :, untouched] == 7).all() and (cache.v[1, :, untouched] == 7).all())


def test_a_position_past_the_context_is_not_written(device: torch.device) -> None:
    cos, sin = rope_table(RopeSpec(dim=64), CONTEXT + 4, device)
    spec = replace(make_spec(device, CONTEXT, 2, 2, 64), cos=cos, sin=sin)
    cache = KVStore.allocate(2, CONTEXT, 2, 64, device)
    for tensor in (cache.k, cache.v):
        tensor.fill_(7.0)
    past = torch.tensor([CONTEXT], dtype=torch.int32, device=device)
    rope_store(torch.ones(1, 6 * 64, device=device), spec, cache, 0, past)
    assert bool((cache.k == 7).all() and (cache.v == 7).all())


def run_chunks(
    spec: AttentionSpec, cache: KVStore, qkv: torch.Tensor, chunks: list[int], device: torch.device
) -> torch.Tensor:
    """Rotate, store and attend chunk by chunk."""
    outputs, start = [], 0
    for size in chunks:
        positions = torch.arange(start, start + size, dtype=torch.int32, device=device)
        q = rope_store(qkv[start : start + size], spec, cache, 0, positions)
        outputs.append(attention_prefill(q, spec, cache, 0, start, torch.float32))
        start += size
    return torch.cat(outputs)


def expected_rows(spec: AttentionSpec, cache: KVStore, qkv: torch.Tensor) -> torch.Tensor:
    """By definition in fp64 over the cache as it now is."""
    tokens = qkv.shape[0]
    q = qkv.double().view(tokens, -1, spec.head_dim)[:, : spec.heads]
    q = apply_rope(q, spec.cos[:tokens], spec.sin[:tokens], spec.rope_layout).half().double()
    k, v = (
        (codes if scales is None else dequantize_rows(codes, scales))[0, :, :tokens].double().transpose(0, 1)
        for codes, scales in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )
    band = causal_mask_band(tokens, 0, spec.window, qkv.device)
    return attention(q, k, v, mask_slice(band, 0, tokens), spec.scale).flatten(1)


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,chunks,window,q8_0",
    [
        (4, 2, 64, [1], None, False),
        (2, 1, 64, [70, 131], None, False),
        (2, 2, 80, [65, 3], None, False),
        (2, 1, 96, [33], 20, False),
        (2, 2, 128, [130, 64], 67, False),
        (1, 1, 256, [40, 30], None, False),
        (2, 1, 64, [66, 70], None, True),
        (2, 1, 64, [64, 129], 1, False),
    ],
)
def test_chunked_prefill(
    heads: int,
    kv_heads: int,
    head_dim: int,
    chunks: list[int],
    window: int | None,
    q8_0: bool,
    device: torch.device,
) -> None:
    spec = make_spec(device, CONTEXT, heads, kv_heads, head_dim, window)
    cache = KVStore.allocate(1, CONTEXT, kv_heads, head_dim, device, q8_0)
    # Rows that are not written yet must not be read: a NaN there would show.
    for tensor in (cache.k, cache.v) if not q8_0 else (cache.k_scale, cache.v_scale):
        assert tensor is not None
        tensor.fill_(float("nan"))
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(sum(chunks), (heads + 2 * kv_heads) * head_dim, generator=generator).to(device)
    out = run_chunks(spec, cache, qkv, chunks, device)
    expected = expected_rows(spec, cache, qkv)
    assert torch.isfinite(out).all()
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 6e-4, f"relative error {error:.2e}"
