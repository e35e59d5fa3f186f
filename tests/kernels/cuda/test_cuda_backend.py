"""A whole decoder on the CUDA backend against the reference: token by token, and a prompt with tokens behind it."""

from pathlib import Path

import pytest
import torch

from quengine.kernels import cuda_backend
from quengine.kernels.backend import Backend
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


@pytest.fixture
def backend(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    return CudaBackend(device)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
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
