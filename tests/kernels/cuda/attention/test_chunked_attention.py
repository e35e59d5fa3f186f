"""Attention within chunks of positions: the CUDA backend and the definition, over the batch of the chunks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quengine.kernels.attention import attention, causal_mask_band
from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.kv.kv_rows import allocate_layer, read_rows
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rope import RopeSpec, rope_table
from quengine.kernels.rope_store import rope_store
from tests.transformers_models import nmse

HEADS, KV_HEADS, SIZE, CONTEXT = 4, 2, 32, 160
TABLES = [[[0] * 5, [3, 1, 2, 6, 4]], [[0] * 5, [5, 8, 7, 10, 9]]]
"""Of two sequences, in a first group whose blocks are none of this layer's, and in the layer's."""


def spec_of(chunk: int, device: torch.device) -> AttentionSpec:
    cos, sin = rope_table(RopeSpec(SIZE, 1e4, "halves"), CONTEXT, device)
    return AttentionSpec(
        HEADS, KV_HEADS, SIZE, SIZE**-0.5, None, "halves", cos, sin,
        mask_band=causal_mask_band(64, CONTEXT, None, device), cache_group=1, chunk=chunk,
    )  # fmt: skip


def batch_of(kind: str, device: torch.device) -> ForwardBatch:
    if kind == "prompts":  # one crosses two ends of chunks of 32, the other begins at one
        return prefill_batch([list(range(50)), list(range(9))], [28, 64], TABLES, device)
    if kind == "a prompt within a chunk":
        return prefill_batch([list(range(7))], [65], TABLES[:1], device)
    if kind == "rows":
        return decode_batch([5, 6, 7], [31, 32, 126], [*TABLES, TABLES[0]], device)
    return decode_batch([5, 6, 7], [62, 63, 64], 3 * [TABLES[1]], device, shares_sequences=True)


def wanted(batch: ForwardBatch, qkv: Tensor, spec: AttentionSpec, layer: KVLayer) -> Tensor:
    """Row by row from the positions of its chunk, without the batch of the chunks."""
    q = rope_store(qkv, spec, layer, batch)
    if batch.phase == "prefill":
        owners = [n for n, length in enumerate(batch.query_lens) for _ in range(length)]
    else:
        owners = list(range(len(batch)))
    found = []
    for row, (owner, position) in enumerate(zip(owners, batch.positions.tolist(), strict=True)):
        seen = torch.arange(position // spec.chunk * spec.chunk, position + 1)
        table = batch.block_tables_of(1)[owner].cpu()
        rows = (table[seen // BLOCK_SIZE] * BLOCK_SIZE + seen % BLOCK_SIZE).to(batch.device)
        keys, values = (part.float() for part in read_rows(layer, rows))
        found.append(attention(q[row : row + 1].float(), keys, values, None, spec.scale).reshape(1, -1))
    return torch.cat(found)


def layer_of(device: torch.device) -> KVLayer:
    layer = allocate_layer(11 * BLOCK_SIZE, KV_HEADS, SIZE, device, "f16")
    for tensor in layer.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    return layer


@pytest.mark.parametrize("kind", ["prompts", "a prompt within a chunk", "rows", "drafts"])
@pytest.mark.parametrize("chunk", [32, 64])
def test_rows_see_their_own_chunk(
    kind: str, chunk: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    torch.manual_seed(0)
    spec, batch, layer = spec_of(chunk, device), batch_of(kind, device), layer_of(device)
    qkv = torch.randn(len(batch), (HEADS + 2 * KV_HEADS) * SIZE, device=device)
    expected = wanted(batch, qkv, spec, layer)
    chunked = batch.with_chunks(chunk).chunked
    assert chunked is not None and int(chunked.positions.max()) < chunk
    found = CudaBackend(device).attention(chunked, qkv, spec, layer)
    rows = found if isinstance(found, Tensor) else found.dequantize()
    assert nmse(rows.cpu(), expected.cpu()) < 1e-5
    whole = CudaBackend(device).attention(batch, qkv, replace(spec, chunk=0), layer)
    assert nmse((whole if isinstance(whole, Tensor) else whole.dequantize()).cpu(), expected.cpu()) > 1e-2
    if device.type == "cpu":
        own = ReferenceBackend(True).attention(chunked, qkv, spec, layer)
        assert nmse(own, expected) < 1e-9
