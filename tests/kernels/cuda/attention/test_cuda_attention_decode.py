"""Decode attention in one launch, against rotating, storing and attending by the definitions in fp64."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.attention import attention
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.attention_arguments import DecodeWorkspace
from quengine.kernels.cuda.attention.attention_decode import attention_decode
from quengine.kernels.cuda.attention.attention_tiles import combine_heads
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.hadamard import hadamard
from quengine.kernels.kv.cache_types import CacheType
from quengine.kernels.kv.kv_codes import dequantize_rows, quantize_rows, round_scales
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope import apply_rope
from tests.kernels.cuda.attention.attention_cases import PagedCache, filled_cache, make_spec, sinks_near

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT = 700
ROUNDED: dict[CacheType, float] = {"f16": 2e-3, "q8_0": 0.03, "q4_0": 0.06}
"""One fp16 step, or one code, where rotation rounds across a boundary; a transformed head has a part of it."""


def spec_of(
    heads: int,
    kv_heads: int,
    head_dim: int,
    layout: str = "pairs",
    window: int | None = None,
    rope_dim: int | None = None,
    normed: bool = False,
) -> AttentionSpec:
    weights = torch.rand(2, head_dim, generator=torch.Generator().manual_seed(99)) + 0.5
    norms = (weights[0].to(DEVICE), weights[1].to(DEVICE)) if normed else (None, None)
    return make_spec(DEVICE, CONTEXT, heads, kv_heads, head_dim, window, layout, rope_dim, norms)


def cache_of(sequences: int, kv_heads: int, head_dim: int, cache_type: CacheType = "f16") -> PagedCache:
    return filled_cache(DEVICE, sequences, CONTEXT, kv_heads, head_dim, cache_type)


def stored(x: torch.Tensor, cache_type: CacheType) -> torch.Tensor:
    """x as the cache gives it back."""
    if cache_type == "f16":
        return x.half().double()
    if cache_type == "q8_0":
        return dequantize_rows(*quantize_rows(x)).double()
    return hadamard(dequantize_rows(*quantize_rows(hadamard(x), 4)).double())


def normed(q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    if spec.q_norm is None or spec.k_norm is None:
        return q, k
    return rms_norm(q, spec.q_norm.double(), spec.eps), rms_norm(k, spec.k_norm.double(), spec.eps)


def expected_row(
    qkv: torch.Tensor,
    spec: AttentionSpec,
    k_old: torch.Tensor,
    v_old: torch.Tensor,
    position: int,
    cache_type: CacheType,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence by definition, fp64: the output [heads * head_dim] and the new rows of the cache."""
    q, k, v = qkv.double().view(1, -1, spec.head_dim).split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
    if not spec.norms_rotated:
        q, k = normed(q, k, spec)
    cos, sin = spec.cos[position : position + 1], spec.sin[position : position + 1]
    q, k = apply_rope(q, cos, sin, spec.rope_layout), apply_rope(k, cos, sin, spec.rope_layout)
    if spec.norms_rotated:
        q, k = normed(q, k, spec)
    if spec.v_norm:
        v = rms_norm(v, v.new_ones(spec.head_dim), spec.eps)
    k_new, v_new = stored(k, cache_type), stored(v, cache_type)
    first = 0 if spec.window is None else max(0, position + 1 - spec.window)
    keys, values = torch.cat((k_old[first:position], k_new)), torch.cat((v_old[first:position], v_new))
    sinks = None if spec.sinks is None else spec.sinks.double()
    y = attention(q, keys, values, None, spec.scale, sinks, spec.softcap)
    return y.flatten(), k_new[0], v_new[0]


def check(
    spec: AttentionSpec,
    positions: list[int],
    cache_type: CacheType = "f16",
    qkv_dtype: torch.dtype = torch.float32,
    coarse: bool = False,
) -> None:
    batch = len(positions)
    cache = cache_of(batch, spec.kv_heads, spec.head_dim, cache_type)
    k_old, v_old = cache.read()
    generator = torch.Generator().manual_seed(sum(positions))
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    qkv = torch.randn(batch, width, generator=generator).to(DEVICE, qkv_dtype)
    workspace = DecodeWorkspace.allocate(batch, spec.heads, spec.kv_heads, spec.head_dim, DEVICE)
    out = torch.full((batch, spec.heads * spec.head_dim), float("nan"), device=DEVICE)
    at = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    attention_decode(qkv, spec, cache.layer, at, cache.tables, workspace, out, coarse)
    assert not workspace.arrivals.any(), "the arrival counters must be zero for the next launch"
    k_after, v_after = cache.read()
    for b, position in enumerate(positions):
        expected, k_new, v_new = expected_row(qkv[b], spec, k_old[b], v_old[b], position, cache_type)
        error = (out[b].double() - expected).norm() / expected.norm().clamp(min=1e-30)
        most = 3e-6 if cache_type == "f16" else 2e-5
        assert error < most, f"sequence {b} at {position}: relative error {error:.2e}"
        tolerance = ROUNDED[cache_type]
        torch.testing.assert_close(k_after[b, position], k_new, rtol=0, atol=tolerance)
        torch.testing.assert_close(v_after[b, position], v_new, rtol=0, atol=tolerance)
        k_after[b, position], v_after[b, position] = k_old[b, position], v_old[b, position]
    assert torch.equal(k_after, k_old) and torch.equal(v_after, v_old), "a row of another position changed"


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,rope_dim",
    [
        (4, 1, 64, 64),
        (6, 2, 80, 32),
        (2, 2, 96, 96),
        (8, 2, 128, 128),
        (7, 1, 128, 64),
        (8, 1, 64, 64),
        (4, 2, 256, 64),
    ],
)
@pytest.mark.parametrize("position", [0, 37])
def test_head_sizes_and_positions(
    heads: int, kv_heads: int, head_dim: int, rope_dim: int, position: int
) -> None:
    check(spec_of(heads, kv_heads, head_dim, rope_dim=rope_dim), [position])


@pytest.mark.parametrize("position", [0, 70])
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_heads_of_512_with_normalized_values(position: int, cache_type: CacheType) -> None:
    spec = spec_of(8, 1, 512, "halves", normed=True)
    check(replace(spec, v_norm=True, scale=512**-0.5), [position], cache_type)


@pytest.mark.parametrize("position", [3, 140])
def test_soft_capped_scores(position: int) -> None:
    check(replace(spec_of(4, 2, 64, "halves"), scale=1.0, softcap=3.0), [position])


@pytest.mark.parametrize("position", [128, 129, 200])
def test_more_keys_than_one_split_takes(position: int) -> None:
    check(spec_of(4, 2, 64), [position])


@pytest.mark.parametrize("position", [0, 130])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_a_cache_of_codes(position: int, head_dim: int, cache_type: CacheType) -> None:
    check(spec_of(4, 2, head_dim, "halves"), [position], cache_type)


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,window,coarse",
    [(8, 2, 128, None, False), (6, 1, 128, 300, False), (8, 2, 128, None, True), (8, 1, 64, None, True)],
)
@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_codes_of_many_splits(
    heads: int, kv_heads: int, head_dim: int, window: int | None, coarse: bool, cache_type: CacheType
) -> None:
    check(spec_of(heads, kv_heads, head_dim, "pairs", window), [699, 1, 300], cache_type, coarse=coarse)


@pytest.mark.parametrize(("head_dim", "heads"), [(64, 4), (128, 4), (64, 16)])
def test_q4_0_values_of_any_size(head_dim: int, heads: int) -> None:
    """Scales of keys and values of either sign from 1e-7, which fp16 rounds: every product with a code is exact."""
    spec, position = spec_of(heads, 1, head_dim), 400
    cache = cache_of(1, 1, head_dim, "q4_0")
    for scales in (cache.layer.k_scale, cache.layer.v_scale):
        assert scales is not None
        order = torch.randperm(scales.numel(), generator=torch.Generator().manual_seed(3)).to(DEVICE)
        exponents = torch.linspace(-7.0, 1.0, scales.numel(), device=DEVICE)[order]
        signs = torch.where(order % 3 == 0, -1.0, 1.0)
        scales.copy_(round_scales(signs * 10.0**exponents).view(scales.shape))
    k_old, v_old = cache.read()
    qkv = torch.randn(1, (heads + 2) * head_dim, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 0.1
    workspace = DecodeWorkspace.allocate(1, heads, 1, head_dim, DEVICE)
    at = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    out = torch.empty(1, heads * head_dim, device=DEVICE)
    attention_decode(qkv, spec, cache.layer, at, cache.tables, workspace, out)
    expected, _, _ = expected_row(qkv[0], spec, k_old[0], v_old[0], position, "q4_0")
    assert (out[0].double() - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize(("head_dim", "heads"), [(64, 4), (128, 8), (96, 4)])
def test_q4_0_values_near_the_largest_of_fp16(head_dim: int, heads: int) -> None:
    """Values are stored transformed, and so are their sums until the end."""
    spec, position = spec_of(heads, 1, head_dim), 300
    cache = cache_of(1, 1, head_dim, "q4_0")
    assert cache.layer.v_scale is not None
    cache.layer.v_scale.fill_(8160.0)
    k_old, v_old = cache.read()
    qkv = torch.randn(1, (heads + 2) * head_dim, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    workspace = DecodeWorkspace.allocate(1, heads, 1, head_dim, DEVICE)
    at = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    out = torch.empty(1, heads * head_dim, device=DEVICE)
    attention_decode(qkv, spec, cache.layer, at, cache.tables, workspace, out)
    expected, _, _ = expected_row(qkv[0], spec, k_old[0], v_old[0], position, "q4_0")
    assert hadamard(expected.view(-1, head_dim)).abs().max() > 4094
    assert (out[0].double() - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("head_dim", [64, 128])
def test_q8_0_values_of_any_size(head_dim: int) -> None:
    """Scales from 1e-7, which fp16 rounds, to 400: where scores are equal, the large values are what is left."""
    spec, position = spec_of(4, 1, head_dim), 400
    cache = cache_of(1, 1, head_dim, "q8_0")
    assert cache.layer.v_scale is not None
    exponents = torch.linspace(-7.0, 2.6, cache.layer.v_scale.numel())
    order = torch.randperm(exponents.numel(), generator=torch.Generator().manual_seed(3))
    cache.layer.v_scale.copy_((10.0**exponents)[order].view(cache.layer.v_scale.shape))
    k_old, v_old = cache.read()
    qkv = torch.randn(1, 6 * head_dim, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 0.1
    workspace = DecodeWorkspace.allocate(1, 4, 1, head_dim, DEVICE)
    at = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    out = torch.empty(1, 4 * head_dim, device=DEVICE)
    attention_decode(qkv, spec, cache.layer, at, cache.tables, workspace, out)
    expected, _, _ = expected_row(qkv[0], spec, k_old[0], v_old[0], position, "q8_0")
    assert (out[0].double() - expected).norm() / expected.norm() < 3e-6


@pytest.mark.parametrize("window", [1, 2, 100])
def test_sliding_window(window: int) -> None:
    check(spec_of(4, 2, 64, "halves", window), [130])


def test_per_head_norms_and_half_precision_input() -> None:
    check(spec_of(4, 2, 64, "halves", normed=True), [150], qkv_dtype=torch.float16)


@pytest.mark.parametrize("layout", ["halves", "pairs"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_norms_of_rotated_heads(layout: str, head_dim: int) -> None:
    spec = replace(spec_of(4, 2, head_dim, layout, normed=True), norms_rotated=True)
    check(spec, [150])


def test_sixteen_query_heads_share_one_key_head() -> None:
    check(spec_of(16, 1, 64), [137])


def test_a_batch_of_different_lengths() -> None:
    check(spec_of(4, 2, 64), [3, 250, 0])


def test_many_splits() -> None:
    check(spec_of(2, 2, 64), [699])


def with_sinks(spec: AttentionSpec, sink: float) -> AttentionSpec:
    return replace(spec, sinks=sinks_near(sink, spec.heads).to(DEVICE))


@pytest.mark.parametrize("sink", [-1e30, -2.0, 0.6, 1e4])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_sinks_are_in_the_denominator(window: int | None, sink: float) -> None:
    """Of one split and of several, whose sums are one; with a window of 1 beside the new key alone."""
    check(with_sinks(spec_of(8, 2, 64, "halves", window), sink), [3, 400])


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,window,cache_type,coarse",
    [
        (8, 1, 64, None, "f16", False),
        (8, 1, 64, 128, "f16", True),
        (6, 2, 128, None, "f16", True),
        (16, 1, 64, None, "f16", False),
        (5, 1, 96, None, "f16", False),
        (2, 1, 256, None, "f16", False),
        (8, 1, 64, 128, "q8_0", False),
        (6, 2, 128, None, "q8_0", True),
        (2, 1, 256, None, "q8_0", False),
        (6, 2, 128, None, "q4_0", True),
        (8, 1, 64, 128, "q4_0", False),
        (16, 1, 64, None, "q4_0", False),
    ],
)
def test_sinks_of_other_heads_and_caches(
    heads: int, kv_heads: int, head_dim: int, window: int | None, cache_type: CacheType, coarse: bool
) -> None:
    spec = with_sinks(spec_of(heads, kv_heads, head_dim, "halves", window), 0.8)
    check(spec, [0, 450], cache_type, coarse=coarse)


def test_a_sink_far_below_all_scores_leaves_the_bits() -> None:
    spec, results = spec_of(4, 2, 64), []
    qkv = torch.randn(2, 8 * 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    positions = torch.tensor([0, 260], dtype=torch.int32, device=DEVICE)
    workspace = DecodeWorkspace.allocate(2, 4, 2, 64, DEVICE)
    for variant in (spec, with_sinks(spec, -1e30)):
        cache, out = cache_of(2, 2, 64), torch.empty(2, 256, device=DEVICE)
        results.append(attention_decode(qkv, variant, cache.layer, positions, cache.tables, workspace, out))
    assert torch.equal(*results)


def test_result_does_not_depend_on_the_batch() -> None:
    spec = spec_of(4, 2, 64)
    qkv = torch.randn(3, 8 * 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    positions = torch.tensor([100, 260, 41], dtype=torch.int32, device=DEVICE)
    together = torch.empty(3, 256, device=DEVICE)
    workspace = DecodeWorkspace.allocate(3, 4, 2, 64, DEVICE)
    cache = cache_of(3, 2, 64)
    attention_decode(qkv, spec, cache.layer, positions, cache.tables, workspace, together)
    cache = cache_of(3, 2, 64)
    for b in range(3):
        alone = torch.empty(1, 256, device=DEVICE)
        own = cache.sequence(b)
        attention_decode(qkv[b : b + 1], spec, cache.layer, positions[b : b + 1], own, workspace, alone)
        assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize("heads,kv_heads,head_dim", [(4, 2, 64), (6, 2, 96), (2, 2, 80)])
def test_rounded_output_is_the_output_rounded(heads: int, kv_heads: int, head_dim: int) -> None:
    spec = spec_of(heads, kv_heads, head_dim)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(2, width, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    positions = torch.tensor([140, 3], dtype=torch.int32, device=DEVICE)
    workspace = DecodeWorkspace.allocate(2, heads, kv_heads, head_dim, DEVICE)
    plain = torch.empty(2, heads * head_dim, device=DEVICE)
    cache = cache_of(2, kv_heads, head_dim)
    attention_decode(qkv, spec, cache.layer, positions, cache.tables, workspace, plain)
    rounded = QuantizedActivations.empty(2, heads * head_dim, DEVICE)
    cache = cache_of(2, kv_heads, head_dim)
    attention_decode(qkv, spec, cache.layer, positions, cache.tables, workspace, rounded)
    step = rounded.scale.repeat_interleave(32, dim=1)
    assert bool(((rounded.dequantize() - plain).abs() <= step * 0.51).all())
    sums = rounded.ints().int().view(2, -1, 16).sum(-1)
    assert torch.equal(rounded.sums, sums.int())


def test_queries_are_scaled_by_their_position() -> None:
    spec = spec_of(2, 1, 64)
    scales = torch.linspace(1.0, 2.0, CONTEXT, device=DEVICE)
    workspace = DecodeWorkspace.allocate(1, 2, 1, 64, DEVICE)
    qkv = torch.randn(1, 256, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    position = torch.tensor([50], dtype=torch.int32, device=DEVICE)
    outputs = []
    for variant in (replace(spec, query_scale=scales), replace(spec, scale=spec.scale * float(scales[50]))):
        out, cache = torch.empty(1, 128, device=DEVICE), cache_of(1, 1, 64)
        outputs.append(attention_decode(qkv, variant, cache.layer, position, cache.tables, workspace, out))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)


def test_combined_tiles_fit_the_registers() -> None:
    assert combine_heads(4, 16, 128) == 4
    assert combine_heads(8, 64, 256) == 1
    assert combine_heads(3, 4, 64) == 4
