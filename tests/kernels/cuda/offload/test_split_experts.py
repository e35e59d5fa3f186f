"""Experts in host memory, some of them on the device too: logits are the definition's, wherever experts are."""

import pytest
import torch

from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.moe.held_experts import Replacement
from quengine.kernels.offload.split_experts import SplitExperts
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from tests.forward import forward
from tests.kernels.cuda.moe.test_moe_decoder import IDS, model
from tests.kernels.cuda.weights import nmse

ROWS = 8


@pytest.fixture(autouse=True)
def without_dependent_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)


class Split:
    """A decoder on the device with experts in host memory, `held` of each layer on the device."""

    def __init__(self, name: str, kind: str, device: torch.device, held: int) -> None:
        self.config, self.tensors = model(name, kind)
        assert self.config.experts is not None
        backend, width = CudaBackend(device), self.config.embedding_length
        layers, used = self.config.block_count, self.config.experts.router.used
        count = self.config.experts.count
        self.experts = SplitExperts(backend, CpuBackend(2), layers, ROWS, width, used, count, held)
        self.decoder = Decoder(self.config, self.tensors, backend, 32, 32, self.experts)

    def logits(self, chunks: list[int]) -> torch.Tensor:
        return logits(self.decoder, chunks)

    def exact(self, chunks: list[int]) -> torch.Tensor:
        return logits(Decoder(self.config, self.tensors, ReferenceBackend(keep=True), 32, 32), chunks)

    def replace(self, changes: list[Replacement]) -> bool:
        """In all layers; whether captured steps are stale then."""
        stale = []
        for layer in self.experts.on_device.values():
            layer.begin(changes)
            stale.append(layer.copy(changes))
            layer.end(changes)
        return any(stale)


def logits(decoder: Decoder, chunks: list[int]) -> torch.Tensor:
    cache = KVCache.allocate(decoder.config, 32, decoder.backend.device)
    parts, start = [], 0
    for length in chunks:
        parts.append(forward(decoder, IDS[start : start + length], cache.layers, start, all_logits=True))
        start += length
    return torch.cat(parts).cpu()


@pytest.mark.parametrize(
    ("name", "kind", "chunks", "held"),
    [
        ("dense layer first", "Q8_0", [1, 1], 0),
        ("dense layer first", "Q8_0", [3, 1], 2),
        ("biases, clamped", "F16", [3, 1], 2),
        ("biases, clamped", "Q8_0", [1, 1], 3),
        ("weighed inputs", "Q8_0", [3, 1], 1),
        ("a shared expert", "Q8_0", [3, 1], 4),
    ],
)
def test_a_decoder_is_the_reference(
    name: str, kind: str, chunks: list[int], held: int, device: torch.device
) -> None:
    split = Split(name, kind, device, held)
    assert nmse(split.logits(chunks), split.exact(chunks)) < (1e-6 if chunks[0] == 1 else 5e-5)


def test_replaced_experts_are_those_of_the_file(device: torch.device) -> None:
    split = Split("dense layer first", "Q8_0", device, 2)
    before = split.logits([1, 1])
    split.replace([Replacement(0, 0, 3), Replacement(1, 1, 2)])
    held = list(split.experts.on_device.values())
    assert held and all(each.experts == [3, 2] for each in held)
    assert [each.held.places.tolist() for each in held] == [[2, 2, 1, 0]] * len(held)
    after = split.logits([1, 1])
    assert nmse(after, split.exact([1, 1])) < 1e-6 and nmse(after, before) < 1e-6
    assert not torch.equal(after, before)
