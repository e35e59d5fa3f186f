"""A whole decoder on the CUDA backend against the reference: token by token, and a prompt with tokens behind it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.kernels import cuda_backend
from quengine.kernels.backend import Backend, Chunk, DecodeBatch, PromptBatch
from quengine.kernels.cuda.normed import NormedRows
from quengine.kernels.cuda_backend import CudaBackend
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.models.gguf_checkpoint import GGUFCheckpoint
from tests.kernels.cuda.weights import nmse
from tests.tiny_models import write_tiny

IDS = [5, 17, 250, 3, 99]


def logits(path: Path, backend: Backend, chunks: list[int]) -> torch.Tensor:
    checkpoint = GGUFCheckpoint(path)
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 64, 64)
    cache = KVCache.allocate(checkpoint.config, 64, backend.device)
    parts, start = [], 0
    for length in chunks:
        ids = torch.tensor(IDS[start : start + length], device=backend.device)
        parts.append(decoder.forward(ids, cache.layers, start, last_only=False))
        start += length
    return torch.cat(parts).cpu()


def paged_logits(
    path: Path, backend: Backend, prompts: list[list[int]], steps: list[list[int]]
) -> list[torch.Tensor]:
    """Logits [B, vocab] of each of `steps`, one token a sequence, behind their prompts.

    The blocks lie in a pool the other way round; a last row fills the batch up.
    """
    checkpoint = GGUFCheckpoint(path)
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 64, 64)
    cache = KVCache.allocate(checkpoint.config, 64, backend.device, num_blocks=2 * len(prompts))
    tables = torch.arange(cache.num_blocks - 1, -1, -1, dtype=torch.int32).view(-1, 2).to(backend.device)
    for prompt, table in zip(prompts, tables, strict=True):
        ids = torch.tensor(prompt, device=backend.device)
        decoder.forward(ids, cache.layers, Chunk(0, table))
    spare = torch.full((1, 2), cache.spare_block, dtype=torch.int32, device=backend.device)
    results = []
    for number, ids in enumerate(steps):
        positions = [len(prompt) + number for prompt in prompts] + [0]
        at = torch.tensor(positions, dtype=torch.int32, device=backend.device)
        start = DecodeBatch(at, torch.cat((tables, spare)))
        tokens = torch.tensor([*ids, 0], device=backend.device)
        results.append(decoder.forward(tokens, cache.layers, start, last_only=False)[:-1].cpu())
    return results


@pytest.fixture
def backend(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    return CudaBackend(device)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", *["llama"] * torch.cuda.is_available()])
def test_decode_is_the_reference_within_its_budget(
    architecture: str, backend: CudaBackend, tmp_path: Path
) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture=architecture)
    steps = [1] * len(IDS)
    ours, exact = logits(path, backend, steps), logits(path, ReferenceBackend(keep=True), steps)
    assert nmse(ours, exact) < 1e-6


def test_a_prompt_and_the_tokens_behind_it_are_the_reference(backend: CudaBackend, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture="llama")
    ours, exact = logits(path, backend, [3, 1, 1]), logits(path, ReferenceBackend(keep=True), [3, 1, 1])
    assert nmse(ours, exact) < 5e-5


def test_a_batch_of_sequences_is_the_reference_of_each(backend: CudaBackend, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture="llama")
    prompts, steps = [IDS[:2], [7], list(range(40, 73))], [[9, 8, 7], [250, 1, 2]]
    ours = paged_logits(path, backend, prompts, steps)
    exact = paged_logits(path, ReferenceBackend(keep=True), prompts, steps)
    for mine, theirs in zip(ours, exact, strict=True):
        assert nmse(mine, theirs) < 5e-5


def test_several_prompts_in_one_step_are_the_reference_of_each(backend: CudaBackend, tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", architecture="llama"))
    prompts, tables = [IDS[:2], [7], list(range(40, 73))], [[3], [0], [5, 1]]
    results = []
    for each in (backend, ReferenceBackend(keep=True)):
        decoder = Decoder(checkpoint.config, checkpoint.tensors, each, 64, 64)
        cache = KVCache.allocate(checkpoint.config, 64, each.device, num_blocks=6)
        first = torch.tensor(prompts[2][:20], device=each.device)
        table = torch.tensor(tables[2], dtype=torch.int32, device=each.device)
        decoder.forward(first, cache.layers, Chunk(0, table))
        starts, lengths = (0, 0, 20), [2, 1, 13]
        ids = torch.tensor([*prompts[0], *prompts[1], *prompts[2][20:]], device=each.device)
        start = PromptBatch.of(starts, lengths, tables, each.device)
        results.append(decoder.forward(ids, cache.layers, start).cpu())
        assert results[-1].shape[0] == 3
    assert nmse(results[0], results[1]) < 5e-5


def test_behind_the_last_layers_attention_only_the_last_row_goes_on(
    backend: CudaBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a decode step's row does, so it is nearer to the reference than among all others."""
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", architecture="llama"))
    widths, linear_add = list[int](), CudaBackend.linear_add

    def noted(self: CudaBackend, x: Any, weight: Any, residual: Any, *norm: Any) -> Any:
        stream = residual.hidden if isinstance(residual, NormedRows) else residual
        widths.append(stream.shape[0])
        return linear_add(self, x, weight, residual, *norm)

    monkeypatch.setattr(CudaBackend, "linear_add", noted)
    results = []
    for each in (backend, ReferenceBackend(keep=True)):
        decoder = Decoder(checkpoint.config, checkpoint.tensors, each, 64, 64)
        cache = KVCache.allocate(checkpoint.config, 64, each.device)
        ids = torch.tensor(IDS, device=each.device)
        results += [decoder.forward(ids, cache.layers, 0, last_only=last).cpu() for last in (True, False)]
    layers = checkpoint.config.block_count
    assert widths == [len(IDS)] * 2 * (layers - 1) + [1, 1] + [len(IDS)] * 2 * layers
    alone, among, exact = results[0], results[1][-1:], results[2]
    assert nmse(alone, exact) < 5e-5
    assert nmse(alone, among) > 0.0


def test_one_sequence_in_blocks_has_the_bits_of_one_in_rows(backend: CudaBackend, tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", architecture="llama"))
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 64, 64)
    contiguous = KVCache.allocate(checkpoint.config, 64, backend.device)
    paged = KVCache.allocate(checkpoint.config, 64, backend.device, num_blocks=3)
    table = torch.tensor([2, 0], dtype=torch.int32, device=backend.device)
    ids = torch.tensor(IDS, device=backend.device)
    for part, start in ((ids[:3], 0), (ids[3:4], 3), (ids[4:], 4)):
        expected = decoder.forward(part, contiguous.layers, start)
        assert torch.equal(decoder.forward(part, paged.layers, Chunk(start, table)), expected)
    step = torch.tensor([250], device=backend.device)
    position = torch.tensor([5], dtype=torch.int32, device=backend.device)
    batch = DecodeBatch(position, table[None])
    assert torch.equal(
        decoder.forward(step, paged.layers, batch, last_only=False),
        decoder.forward(step, contiguous.layers, position),
    )


@pytest.mark.parametrize("count", [1, 5])
def test_hidden_rows_are_the_reference(count: int, backend: CudaBackend, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(path)
    rows = []
    for each in (backend, ReferenceBackend(keep=True)):
        decoder = Decoder(checkpoint.config, checkpoint.tensors, each, 64, 64)
        cache = KVCache.allocate(checkpoint.config, 64, each.device)
        rows.append(decoder.hidden(torch.tensor(IDS[:count], device=each.device), cache.layers, 0).cpu())
    assert nmse(rows[0], rows[1]) < 5e-5
