"""Attention with output gates: every path gives what it gives of the rows without gates, times their sigmoids."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.attention import gate_output, split_gates
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.attention_arguments import DecodeWorkspace
from quengine.kernels.cuda.attention.attention_decode import attention_decode
from quengine.kernels.cuda.attention.attention_prefill import attention_prefill, prefill_tiles
from quengine.kernels.cuda.attention.output_gate import gate_rows, qkv_width
from quengine.kernels.cuda.attention.qk_row_norm import qk_row_norm
from quengine.kernels.cuda.attention.rope_store import rope_store
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, ScaledProduct
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.kv.cache_types import CacheType
from tests.kernels.cuda.attention.attention_cases import PagedCache, filled_cache, make_spec
from tests.kernels.cuda.attention.test_cuda_attention_decode import ROUNDED, expected_row
from tests.kernels.cuda.attention.test_cuda_attention_prefill import expected_rows

CONTEXT = 256


def gated_spec(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, rope_dim: int | None = None
) -> AttentionSpec:
    norm = (torch.rand(head_dim, generator=torch.Generator().manual_seed(3)) + 0.5).to(device)
    spec = make_spec(device, CONTEXT, heads, kv_heads, head_dim, None, "halves", rope_dim, (norm, norm))
    return replace(spec, gated=True)


def rows_of(count: int, spec: AttentionSpec) -> torch.Tensor:
    rows = torch.randn(count, qkv_width(spec), generator=torch.Generator().manual_seed(count))
    return rows.to(spec.cos.device)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rope_dim", "cache_type", "coarse"),
    [
        (8, 1, 256, 64, "f16", False),
        (4, 2, 64, None, "f16", True),
        (3, 1, 96, None, "q8_0", False),
        (4, 2, 64, None, "q4_0", False),
    ],
)
def test_decode(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rope_dim: int | None,
    cache_type: CacheType,
    coarse: bool,
    device: torch.device,
) -> None:
    """Of one split and of several, which the last of them combines; plain and quantized."""
    spec, positions = gated_spec(device, heads, kv_heads, head_dim, rope_dim), [5, 170]
    cache = filled_cache(device, len(positions), CONTEXT, kv_heads, head_dim, cache_type)
    k, v = cache.read()
    qkv = rows_of(len(positions), spec)
    plain, gates = split_gates(qkv.double(), heads, head_dim)
    workspace = DecodeWorkspace.allocate(len(positions), heads, kv_heads, head_dim, device)
    at = torch.tensor(positions, dtype=torch.int32, device=device)
    out = torch.full((len(positions), heads * head_dim), float("nan"), device=device)
    attention_decode(qkv, spec, cache.layer, at, cache.tables, workspace, out, coarse)
    quantized = QuantizedActivations.empty(len(positions), heads * head_dim, device)
    attention_decode(qkv, spec, cache.layer, at, cache.tables, workspace, quantized, coarse)
    for row, position in enumerate(positions):
        attended, k_new, v_new = expected_row(plain[row], spec, k[row], v[row], position, cache_type)
        expected = gate_output(attended, gates[row])
        assert relative(out[row], expected) < (4e-6 if cache_type == "f16" else 3e-5)
        assert relative(quantized.dequantize()[row], expected) < 1e-4
        stored_k, stored_v = cache.read()
        torch.testing.assert_close(stored_k[row, position], k_new, rtol=0, atol=ROUNDED[cache_type])
        torch.testing.assert_close(stored_v[row, position], v_new, rtol=0, atol=ROUNDED[cache_type])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rope_dim", "batch_invariant", "products", "cache_type"),
    [
        (2, 1, 256, 64, False, True, "f16"),
        (2, 1, 256, 64, True, False, "f16"),
        (4, 2, 64, None, False, False, "f16"),
        (4, 2, 64, None, False, True, "q4_0"),
    ],
)
def test_prompts(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rope_dim: int | None,
    batch_invariant: bool,
    products: bool,
    cache_type: CacheType,
    device: torch.device,
) -> None:
    """In fp32, and written over the queries; of rows, and of products that are not scaled yet."""
    spec = gated_spec(device, heads, kv_heads, head_dim, rope_dim)
    qkv = rows_of(70, spec)
    given: torch.Tensor | ScaledProduct = qkv
    if products:
        scale = torch.tensor([2.0, 0.5, 8.0], device=device)[torch.arange(70, device=device) % 3]
        given = ScaledProduct(qkv / (4.0 * scale)[:, None], scale, 0.25)
    cache = PagedCache.empty(device, 1, CONTEXT, kv_heads, head_dim, cache_type)
    batch = prefill_batch([[0] * 70], [0], [[table] for table in cache.tables.tolist()], device)
    tiles = prefill_tiles(batch, batch_invariant)
    q = rope_store(given, spec, cache.layer, batch.positions, cache.tables, tiles.sequences)
    plain, gates = split_gates(qkv, heads, head_dim)
    expected = gate_output(expected_rows(spec, cache, plain), gates.double())
    out = torch.full((70, heads * head_dim), float("nan"), device=device)
    attention_prefill(q, spec, cache.layer, cache.tables, tiles, out, batch_invariant, gates=given)
    assert relative(out, expected) < 6e-4
    over = q.view(70, -1)
    attention_prefill(q, spec, cache.layer, cache.tables, tiles, over, batch_invariant, gates=given)
    assert relative(over, expected) < 7e-4


@pytest.mark.parametrize("layout", list(OperandLayout))
def test_results_are_gated_where_they_lie(layout: OperandLayout, device: torch.device) -> None:
    """As after Hopper's kernel for prompts."""
    spec = gated_spec(device, 2, 1, 128)
    qkv = rows_of(9, spec)
    y = torch.randn(9, 256, generator=torch.Generator().manual_seed(1)).half().to(device)
    rows = Fp16Operand(y.clone(), torch.ones(9, device=device))
    if layout is OperandLayout.MMA:
        rows = rows.as_mma()
    elif layout is OperandLayout.WGMMA:
        rows = rows.as_wgmma()
    gate_rows(rows.values, qkv, spec, layout)
    expected = gate_output(y.double(), split_gates(qkv.double(), 2, 128)[1])
    torch.testing.assert_close(rows.dequantize(256).double(), expected, rtol=1e-3, atol=1e-6)


def test_norms_of_whole_rows_are_refused(device: torch.device) -> None:
    norms = (torch.ones(128, device=device), torch.ones(64, device=device))
    spec = replace(make_spec(device, CONTEXT, 2, 1, 64, norms=norms), gated=True)
    with pytest.raises(AssertionError, match="beside output gates"):
        qk_row_norm(rows_of(2, spec), spec)
