"""Norms of all query heads, and of all key heads, of a row together: through the backend, against the definition."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.attention import attention, causal_mask_band, mask_slice
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.attention.qk_row_norm import has_row_norms, qk_row_norm
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, ScaledProduct
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope_store import rope_store
from tests.kernels.cuda.attention.attention_cases import PagedCache, make_spec

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64
WIDTH, K_WIDTH = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
CONTEXT = 96


def row_spec(device: torch.device) -> AttentionSpec:
    generator = torch.Generator().manual_seed(3)
    norms = tuple((torch.rand(width, generator=generator) + 0.5).to(device) for width in (WIDTH, K_WIDTH))
    return make_spec(device, CONTEXT, HEADS, KV_HEADS, HEAD_DIM, None, "halves", None, norms)


def random_qkv(device: torch.device, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (3 * torch.randn(rows, WIDTH + 2 * K_WIDTH, generator=generator)).to(device)


def test_rows_are_normalized_in_place_and_values_are_left(device: torch.device) -> None:
    spec = row_spec(device)
    assert has_row_norms(spec) and not has_row_norms(replace(spec, q_norm=None, k_norm=None))
    wide = torch.cat((random_qkv(device, 3), torch.ones(3, 8, device=device)), dim=1)
    qkv = wide[:, :-8]  # rows of a wider buffer
    q, k, v = qkv.double().split([WIDTH, K_WIDTH, K_WIDTH], dim=1)
    assert spec.q_norm is not None and spec.k_norm is not None
    expected = rms_norm(q, spec.q_norm.double(), spec.eps), rms_norm(k, spec.k_norm.double(), spec.eps)
    left = qk_row_norm(qkv, spec)
    assert left.q_norm is None and left.k_norm is None
    torch.testing.assert_close(
        qkv[:, : WIDTH + K_WIDTH].double(), torch.cat(expected, 1), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(qkv[:, WIDTH + K_WIDTH :].double(), v) and bool((wide[:, -8:] == 1).all())


def expected_rows(
    qkv: torch.Tensor, spec: AttentionSpec, cache: PagedCache, batch: ForwardBatch
) -> torch.Tensor:
    """Of one sequence from position 0 on, by definition; the definition has written the cache."""
    q = rope_store(qkv.double(), spec, cache.layer, batch)
    tokens = len(qkv)
    k, v = (tensor[0, :tokens] for tensor in cache.read())
    band = causal_mask_band(tokens, 0, None, qkv.device)
    return attention(q, k, v, mask_slice(band, 0, tokens), spec.scale).flatten(1)


@pytest.mark.parametrize("products", [False, True])
def test_attention_of_a_backend(
    products: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, then a token of it once more, both as the definition has them."""
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    backend, spec, tokens = CudaBackend(device), row_spec(device), 40
    qkv = random_qkv(device, tokens)
    cache = PagedCache.empty(device, 1, CONTEXT, KV_HEADS, HEAD_DIM)
    batch = prefill_batch([[0] * tokens], [0], [[table] for table in cache.tables.tolist()], device)
    expected = expected_rows(qkv, spec, PagedCache.empty(device, 1, CONTEXT, KV_HEADS, HEAD_DIM), batch)
    row_scale = torch.full((tokens,), 2.0, device=device)
    given = ScaledProduct(qkv * 2, row_scale, 4.0) if products else qkv.clone()
    out = backend.attention(batch, given, spec, cache.layer)
    assert isinstance(out, Fp16Operand) == is_hopper(device)
    values = out.dequantize(WIDTH) if isinstance(out, Fp16Operand) else out
    assert isinstance(values, torch.Tensor)
    error = (values.double() - expected).norm() / expected.norm()
    assert error < 1e-3, f"relative error {error:.2e}"

    tables = [[table] for table in cache.tables.tolist()] * 2
    step = decode_batch([0, 0], [tokens - 2, tokens - 1], tables, device, shares_sequences=True)
    rows = backend.attention(step, qkv[-2:].clone(), spec, cache.layer)
    assert isinstance(rows, Fp16Operand)
    error = (rows.dequantize(WIDTH).double() - expected[-2:]).norm() / expected[-2:].norm()
    assert error < 1e-3, f"relative error {error:.2e} of decode"
