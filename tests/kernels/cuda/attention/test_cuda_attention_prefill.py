"""RoPE with cache write, and prefill attention in chunks, against the torch definitions in fp64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from quengine.kernels.attention import attention, causal_mask_band, mask_slice
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention import attention_prefill as prefill
from quengine.kernels.cuda.attention.attention_prefill import PrefillShape
from quengine.kernels.cuda.attention.rope_store import heads_per_block, rope_store, rope_warps
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, ScaledProduct
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.kv.cache_types import CacheType
from quengine.kernels.kv.kv_rows import slot_mapping
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope import RopeSpec, apply_rope, rope_table
from tests.kernels.cuda.attention.attention_cases import (
    PagedCache,
    make_spec,
    rotate_and_write,
    run_chunks,
    run_prefill,
    sinks_near,
)

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
    "layout,rope_dim,normed",
    [
        *(("pairs", 64, ""), ("halves", 64, "before"), ("halves", 32, "")),
        *(("pairs", 64, "after"), ("halves", 64, "after"), ("halves", 32, "after")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rope_store_rotates_and_writes(
    layout: str, rope_dim: int, normed: str, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(rope_dim)
    norm = (torch.rand(64, generator=generator) + 0.5).to(device) if normed else None
    spec = make_spec(device, CONTEXT, 6, 2, 64, None, layout, rope_dim, (norm, norm))
    spec = replace(spec, norms_rotated=normed == "after")
    wide = torch.randn(5, 10 * 64 + 3, generator=generator).to(device, dtype)
    qkv = wide[:, :640]  # rows of a wider buffer
    cache = PagedCache.empty(device, 2, CONTEXT, 2, 64).shuffled(1)
    for tensor in cache.layer.tensors:
        tensor.fill_(7.0)
    positions = torch.tensor([17, 3, 255, 100, 18], dtype=torch.int32, device=device)
    q = rope_store(qkv, spec, cache.layer, positions, cache.tables, torch.ones_like(positions))
    expected_q, expected_k, expected_v = qkv.double().view(5, 10, 64).split([6, 2, 2], dim=1)
    if norm is not None and normed == "before":
        expected_q = rms_norm(expected_q, norm.double(), 1e-6)
        expected_k = rms_norm(expected_k, norm.double(), 1e-6)
    cos, sin = spec.cos[positions.long()], spec.sin[positions.long()]
    expected_q = apply_rope(expected_q, cos, sin, spec.rope_layout)
    expected_k = apply_rope(expected_k, cos, sin, spec.rope_layout)
    if norm is not None and normed == "after":
        expected_q = rms_norm(expected_q, norm.double(), 1e-6)
        expected_k = rms_norm(expected_k, norm.double(), 1e-6)
    torch.testing.assert_close(q.double(), expected_q, rtol=1e-3, atol=1e-5)
    rows = slot_mapping(positions.long(), cache.tables[1].long())
    untouched = torch.ones(cache.layer.k.shape[0], dtype=torch.bool, device=device)
    untouched[rows] = False
    for held, expected in ((cache.layer.k, expected_k), (cache.layer.v, expected_v)):
        torch.testing.assert_close(held[rows].double(), expected, rtol=1e-3, atol=1e-5)
        assert bool((held[untouched] == 7).all()), "other rows changed"


@pytest.mark.parametrize("scaled", [False, True])
def test_rope_store_normalizes_values(scaled: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    ones = torch.ones(64, device=device)
    spec = replace(make_spec(device, CONTEXT, 2, 2, 64, norms=(ones, ones)), v_norm=True, eps=0.1)
    qkv = torch.randn(3, 6 * 64, generator=generator).to(device)
    cache = PagedCache.empty(device, 1, CONTEXT, 2, 64)
    positions = torch.arange(3, dtype=torch.int32, device=device)
    given: torch.Tensor | ScaledProduct = qkv
    if scaled:
        factors = torch.tensor([0.5, 2.0, 3.0], device=device)
        given = ScaledProduct(qkv / factors[:, None] * 4.0, factors, 4.0)
    rope_store(given, spec, cache.layer, positions, cache.tables, torch.zeros_like(positions))
    values = qkv.double().view(3, 6, 64)[:, 4:]
    expected = values / (values.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(cache.layer.v[:3].double(), expected, rtol=1e-3, atol=1e-5)


def test_soft_capped_scores_of_prompts(device: torch.device) -> None:
    spec = replace(make_spec(device, CONTEXT, 2, 1, 64, 20), scale=1.0, softcap=3.0)
    qkv = torch.randn(70, 4 * 64, generator=torch.Generator().manual_seed(3)).to(device)
    cache = PagedCache.empty(device, 1, CONTEXT, 1, 64)
    out = run_chunks(spec, cache.layer, qkv, [40, 30], cache.tables)
    expected = expected_rows(spec, cache, qkv)
    assert (out.double() - expected).norm() / expected.norm() < 6e-4


@pytest.mark.parametrize("rows", [40, 70, 64])
def test_parts_of_a_tile_are_programs(
    rows: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Of a tile that a chunk does not fill some parts have no rows."""
    monkeypatch.setattr(prefill, "prefill_shape", lambda *_: PrefillShape(32, 16, 4, 2))
    spec = make_spec(device, CONTEXT, 2, 1, 64)
    qkv = torch.randn(rows, 4 * 64, generator=torch.Generator().manual_seed(3)).to(device)
    cache = PagedCache.empty(device, 1, CONTEXT, 1, 64)
    out = run_chunks(spec, cache.layer, qkv, [rows], cache.tables)
    expected = expected_rows(spec, cache, qkv)
    assert (out.double() - expected).norm() / expected.norm() < 6e-4


def test_rows_are_written_in_the_layout_of_the_next_matmul(device: torch.device) -> None:
    spec = make_spec(device, CONTEXT, 4, 2, 64)
    qkv = torch.randn(70, 8 * 64, generator=torch.Generator().manual_seed(3)).to(device)
    cache = PagedCache.empty(device, 1, CONTEXT, 2, 64)
    q, out = run_prefill(spec, cache.layer, qkv, [0], [70], cache.tables)
    batch = prefill_batch([[0] * 70], [0], [cache.tables.tolist()], device)
    half = Fp16Operand.empty(70, 4 * 64, device, OperandLayout.WGMMA)
    attend = partial(prefill.attention_prefill, q, spec, cache.layer, cache.tables)
    attend(prefill.prefill_tiles(batch), half.values, wgmma_layout=True)
    assert torch.equal(half.row_major(4 * 64), out.half())


def test_a_position_past_the_context_is_not_written(device: torch.device) -> None:
    cos, sin = rope_table(RopeSpec(dim=64), CONTEXT + 4, device)
    spec = replace(make_spec(device, CONTEXT, 2, 2, 64), cos=cos, sin=sin)
    cache = PagedCache.empty(device, 2, CONTEXT, 2, 64)
    for tensor in cache.layer.tensors:
        tensor.fill_(7.0)
    past = torch.tensor([CONTEXT], dtype=torch.int32, device=device)
    rope_store(
        torch.ones(1, 6 * 64, device=device), spec, cache.layer, past, cache.tables, torch.zeros_like(past)
    )
    assert all(bool((tensor == 7).all()) for tensor in cache.layer.tensors)


def expected_rows(spec: AttentionSpec, cache: PagedCache, qkv: torch.Tensor) -> torch.Tensor:
    """By definition in fp64 over the cache of one sequence as it now is."""
    tokens = qkv.shape[0]
    q = qkv.double().view(tokens, -1, spec.head_dim)[:, : spec.heads]
    if spec.q_norm is not None:
        q = rms_norm(q, spec.q_norm.double(), spec.eps)
    q = apply_rope(q, spec.cos[:tokens], spec.sin[:tokens], spec.rope_layout).half().double()
    k, v = (tensor[0, :tokens] for tensor in cache.read())
    band = causal_mask_band(tokens, 0, spec.window, qkv.device)
    sinks = None if spec.sinks is None else spec.sinks.double()
    return attention(q, k, v, mask_slice(band, 0, tokens), spec.scale, sinks, spec.softcap).flatten(1)


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,chunks,window,cache_type,rope_dim",
    [
        (4, 2, 64, [1], None, "f16", None),
        (2, 1, 64, [70, 131], None, "f16", None),
        (2, 2, 80, [65, 3], None, "f16", None),
        (2, 1, 96, [33], 20, "f16", None),
        (2, 2, 128, [70, 40], 67, "f16", None),
        (2, 1, 128, [40], None, "f16", 96),
        (1, 1, 256, [40, 30], None, "f16", None),
        (2, 1, 256, [35, 30], 33, "q8_0", None),
        (2, 1, 512, [35, 2], None, "f16", None),
        (2, 1, 64, [66, 20], None, "q8_0", None),
        (2, 1, 64, [66, 20], None, "q4_0", None),
        (2, 1, 96, [35, 30], 33, "q4_0", None),
        (2, 1, 64, [64, 129], 1, "f16", None),
    ],
)
def test_chunked_prefill(
    heads: int,
    kv_heads: int,
    head_dim: int,
    chunks: list[int],
    window: int | None,
    cache_type: CacheType,
    rope_dim: int | None,
    device: torch.device,
) -> None:
    layout = "pairs" if rope_dim is None else "halves"
    spec = make_spec(device, CONTEXT, heads, kv_heads, head_dim, window, layout, rope_dim)
    cache = PagedCache.empty(device, 1, CONTEXT, kv_heads, head_dim, cache_type)
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(sum(chunks), (heads + 2 * kv_heads) * head_dim, generator=generator).to(device)
    rotate = rope_store if sum(chunks) < 128 else rotate_and_write
    out = run_chunks(spec, cache.layer, qkv, chunks, cache.tables, rotate=rotate)
    expected = expected_rows(spec, cache, qkv)
    assert torch.isfinite(out).all()
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 6e-4, f"relative error {error:.2e}"


@pytest.mark.parametrize(
    "heads,head_dim,chunks,window,cache_type,batch_invariant,sinks",
    [
        (4, 64, [70, 60], None, "f16", False, [-1e30, 0.7, 1e4]),
        (4, 64, [70, 60], 1, "f16", False, [-1.0, 1e4]),
        (2, 128, [66, 70], 67, "f16", False, [0.7, 1e4]),
        (4, 64, [66, 5], 30, "q8_0", False, [-1e30, -1.0]),
        (4, 128, [66, 5], None, "q4_0", False, [-1.0]),
        (4, 64, [66, 5], 30, "f16", True, [-1e30, -1.0, 0.7]),
    ],
)
def test_sinks_are_in_the_denominator_of_every_row(
    heads: int,
    head_dim: int,
    chunks: list[int],
    window: int | None,
    cache_type: CacheType,
    batch_invariant: bool,
    sinks: list[float],
    device: torch.device,
) -> None:
    plain = make_spec(device, CONTEXT, heads, 2, head_dim, window)
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(sum(chunks), (heads + 4) * head_dim, generator=generator).to(device)
    cache = PagedCache.empty(device, 1, CONTEXT, 2, head_dim, cache_type)

    def run(spec: AttentionSpec) -> torch.Tensor:
        return run_chunks(spec, cache.layer, qkv, chunks, cache.tables, batch_invariant, rotate_and_write)

    for sink in sinks:
        spec = replace(plain, sinks=sinks_near(sink, heads).to(device))
        out, expected = run(spec), expected_rows(spec, cache, qkv)
        error = (out.double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert torch.isfinite(out).all() and error < 6e-4, f"relative error {error:.2e}, sink {sink}"
        if sink == -1e30:
            assert torch.equal(out, run(plain))


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,window,cache_type,layout,rope_dim",
    [
        (4, 1, 256, 40, "f16", "halves", None),  # gemma3, a local layer
        (2, 1, 256, None, "q8_0", "halves", None),
        (2, 2, 96, 33, "q8_0", "halves", None),  # phi3
        (2, 1, 128, None, "q4_0", "halves", None),
        (3, 1, 128, None, "f16", "halves", 96),  # phi4-mini: a part of the head is rotated
    ],
)
def test_heads_with_norms_of_other_architectures(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    cache_type: CacheType,
    layout: str,
    rope_dim: int | None,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    norms = tuple((torch.rand(head_dim, generator=generator) + 0.5).to(device) for _ in range(2))
    spec = make_spec(device, CONTEXT, heads, kv_heads, head_dim, window, layout, rope_dim, norms)
    cache = PagedCache.empty(device, 1, CONTEXT, kv_heads, head_dim, cache_type).shuffled(2)
    qkv = torch.randn(46, (heads + 2 * kv_heads) * head_dim, generator=generator).to(device)
    out = run_chunks(spec, cache.layer, qkv, [40, 6], cache.tables)
    expected = expected_rows(spec, cache, qkv)
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 6e-4, f"relative error {error:.2e}"
