"""Attention to keys and values that another layer of the step has written, on the CUDA backend."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.kernels.rope import RopeSpec, rope_table

HEADS, KV_HEADS, SIZE, CONTEXT = 4, 2, 32, 64


def spec_on(device: torch.device, window: int | None) -> AttentionSpec:
    cos, sin = rope_table(RopeSpec(SIZE, 1e4, "halves"), CONTEXT, device)
    norm = 0.1 * torch.ones(SIZE, device=device)
    return AttentionSpec(
        HEADS, KV_HEADS, SIZE, 1.0, window, "halves", cos, sin, mask_band=cos, q_norm=norm, k_norm=norm, eps=1e-6,
        v_norm=True,
    )  # fmt: skip


def batch_of(kind: str, device: torch.device) -> ForwardBatch:
    tables = [[[1, 2]], [[3, 4]]]
    if kind == "prompt":
        return prefill_batch([list(range(5))], [37], tables[:1], device)
    if kind == "last row":
        return prefill_batch([[5]], [37], tables[:1], device)
    if kind == "row":
        return decode_batch([5], [37], tables[:1], device)
    if kind == "rows":
        return decode_batch([5, 6], [37, 3], tables, device)
    return decode_batch([5, 6], [37, 38], [tables[0], tables[0]], device, shares_sequences=True)


@pytest.mark.parametrize("kind", ["prompt", "last row", "row", "rows", "drafts"])
@pytest.mark.parametrize(("cache_type", "window"), [("f16", None), ("q8_0", 20), ("q4_0", None)])
def test_the_same_queries_give_the_same_bits(
    kind: str, cache_type: str, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With queries of their own and nothing else, layers get what the layer that wrote the keys gets for these."""
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    torch.manual_seed(0)
    backend, own = CudaBackend(device), spec_on(device, window)
    layer = allocate_layer(5 * 32, KV_HEADS, SIZE, device, cache_type)  # type: ignore[arg-type]
    for tensor in layer.tensors:
        tensor.copy_(
            torch.rand(tensor.shape)
            if tensor.dtype == torch.float16
            else torch.randint(0, 100, tensor.shape) - 50 * (cache_type == "q8_0")
        )
    batch = batch_of(kind, device)
    qkv = torch.randn(len(batch), (HEADS + 2 * KV_HEADS) * SIZE, device=device)
    queries = qkv[:, : HEADS * SIZE].clone()
    expected = _rows(backend.attention(batch, qkv, own, layer))
    held = [tensor.clone() for tensor in layer.tensors]
    shared = _rows(backend.attention(batch, queries, replace(own, shared=True, k_norm=None), layer))
    assert torch.equal(shared, expected) and expected.abs().max() > 0.0
    assert all(torch.equal(*pair) for pair in zip(layer.tensors, held, strict=True))


def _rows(y: object) -> torch.Tensor:
    return y if isinstance(y, torch.Tensor) else y.dequantize()  # type: ignore[attr-defined, no-any-return]
