"""A whole decoder on the CUDA backend against the reference: token by token, and a prompt with tokens behind it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.block_pool import CachePool
from quengine.kernels.backend import Backend
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.forward_batch import decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import PADDING_BLOCK
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from tests.forward import forward, one_sequence
from tests.kernels.cuda.weights import nmse
from tests.tiny_models import with_sinks_and_output_biases, write_tiny

IDS = [5, 17, 250, 3, 99]


def logits(path: Path, backend: Backend, chunks: list[int]) -> torch.Tensor:
    checkpoint = GGUFCheckpoint(path)
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 64, 64)
    cache = KVCache.allocate(checkpoint.config, 64, backend.device)
    parts, start = [], 0
    for length in chunks:
        ids = IDS[start : start + length]
        parts.append(forward(decoder, ids, cache.layers, start, all_logits=True))
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
    cache = KVCache.allocate(checkpoint.config, 64, backend.device, pools=[CachePool(2 * len(prompts))])
    tables = torch.arange(2 * len(prompts), 0, -1).view(-1, 2).tolist()
    for prompt, table in zip(prompts, tables, strict=True):
        forward(decoder, prompt, cache.layers, table=table)
    results = []
    for number, ids in enumerate(steps):
        positions = [len(prompt) + number for prompt in prompts] + [0]
        padding = [PADDING_BLOCK] * 2
        batch = decode_batch([*ids, 0], positions, [[table] for table in (*tables, padding)], backend.device)
        results.append(decoder.forward(batch, cache.layers)[:-1].cpu())
    return results


@pytest.fixture
def backend(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    return CudaBackend(device)


@pytest.mark.parametrize(
    "architecture", ["qwen2", "qwen3", "openelm", "arcee", "cohere2", *["llama"] * torch.cuda.is_available()]
)
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


@pytest.mark.parametrize("chunks", [[1] * 5, [3, 2]], ids=["decode", "prompt"])
def test_sinks_and_an_output_bias_are_the_reference(
    chunks: list[int], backend: CudaBackend, tmp_path: Path
) -> None:
    """One sequence by itself, then a step of two rows of it and of another sequence's."""
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", "qwen2"))
    config, tensors, _ = with_sinks_and_output_biases(checkpoint.config, checkpoint.tensors)
    results, tables = [], [[2, 0], [1, 3]]
    for each in (backend, ReferenceBackend(keep=True)):
        decoder = Decoder(config, tensors, each, 64, 64)
        cache, start = KVCache.allocate(config, 64, each.device, pools=[CachePool(4)]), 0
        for length in chunks:
            ids = IDS[start : start + length]
            alone = forward(decoder, ids, cache.layers, start, table=tables[0])
            start += length
        rows = [[tables[0]], [tables[0]], [tables[1]]]
        step = decode_batch([7, 9, 8], [start, start + 1, 0], rows, each.device, shares_sequences=True)
        results.append(torch.cat([alone, decoder.forward(step, cache.layers)]).cpu())
    assert nmse(results[0], results[1]) < 5e-5


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
        cache = KVCache.allocate(checkpoint.config, 64, each.device, pools=[CachePool(6)])
        forward(decoder, prompts[2][:20], cache.layers, table=tables[2])
        batch = prefill_batch(
            [*prompts[:2], prompts[2][20:]], (0, 0, 20), [[table] for table in tables], each.device
        )
        results.append(decoder.forward(batch, cache.layers).cpu())
        assert results[-1].shape[0] == 3
    assert nmse(results[0], results[1]) < 5e-5


def test_behind_the_last_layers_attention_only_the_last_row_goes_on(
    backend: CudaBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a decode step's row does, so it is nearer to the reference than among all others."""
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", architecture="llama"))
    widths, linear_add = list[int](), CudaBackend.linear_add

    def noted(
        self: CudaBackend, batch: Any, x: Any, weight: Any, residual: Any, *norm: Any, **more: Any
    ) -> Any:
        stream = residual.hidden if isinstance(residual, RmsNormed) else residual
        widths.append(stream.shape[0])
        return linear_add(self, batch, x, weight, residual, *norm, **more)

    monkeypatch.setattr(CudaBackend, "linear_add", noted)
    results = []
    for each in (backend, ReferenceBackend(keep=True)):
        decoder = Decoder(checkpoint.config, checkpoint.tensors, each, 64, 64)
        cache = KVCache.allocate(checkpoint.config, 64, each.device)
        results += [forward(decoder, IDS, cache.layers, all_logits=every).cpu() for every in (False, True)]
    layers = checkpoint.config.block_count
    assert widths == [len(IDS)] * 2 * (layers - 1) + [1, 1] + [len(IDS)] * 2 * layers
    alone, among, exact = results[0], results[1][-1:], results[2]
    assert nmse(alone, exact) < 5e-5
    assert nmse(alone, among) > 0.0


def test_one_sequence_has_the_same_bits_in_blocks_of_any_order(backend: CudaBackend, tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", architecture="llama"))
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 64, 64)
    one, other = (
        KVCache.allocate(checkpoint.config, 64, backend.device, pools=[CachePool(3)]) for _ in range(2)
    )
    for part, start in ((IDS[:3], 0), (IDS[3:4], 3), (IDS[4:], 4), ([250], 5)):
        expected = forward(decoder, part, one.layers, start, table=[0, 1])
        assert torch.equal(forward(decoder, part, other.layers, start, table=[2, 0]), expected)


@pytest.mark.parametrize("count", [1, 5])
def test_hidden_rows_are_the_reference(count: int, backend: CudaBackend, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(path)
    rows = []
    for each in (backend, ReferenceBackend(keep=True)):
        decoder = Decoder(checkpoint.config, checkpoint.tensors, each, 64, 64)
        cache = KVCache.allocate(checkpoint.config, 64, each.device)
        rows.append(
            decoder.hidden(one_sequence(IDS[:count], device=each.device, blocks=2), cache.layers).cpu()
        )
    assert nmse(rows[0], rows[1]) < 5e-5
