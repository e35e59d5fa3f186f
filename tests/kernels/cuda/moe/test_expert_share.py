"""A device that has some of a layer's experts, on CUDA: one row, batches and prompts against the definition."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.moe import matvec_experts_add as module
from tests.kernels.cuda.weights import nmse, ordinary_activations
from tests.kernels.moe.shares import FORMATS, HIDDEN, REFERENCE, ROUTINGS, SHARES, Share, check, routing_of


@pytest.fixture
def cuda(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    return CudaBackend(device)


@pytest.mark.parametrize(
    ("phase", "routing", "name", "held"),
    [
        *(("decode", routing, "paired", "middle") for routing in ROUTINGS),
        *(("decode", routing, "biases, clamped", "middle") for routing in ROUTINGS if routing != "rows"),
        *(("decode", "a row", name, held) for name in FORMATS for held in SHARES),
        *(("decode", "a row, none in the middle", name, "middle") for name in ("unpaired", "floats")),
        *(("prefill", "rows", name, "middle") for name in FORMATS),
        ("prefill", "rows", "paired", "last"),
        ("prefill", "rows, none in the middle", "floats", "middle"),
    ],
)
def test_on_cuda(phase: str, routing: str, name: str, held: str, cuda: CudaBackend) -> None:
    one = phase == "decode" and len(ROUTINGS[routing].experts) == 1
    check(cuda, name, SHARES[held], routing, phase, 1e-8 if one else 2e-5)


def test_a_row_takes_as_many_turns_as_experts_are_here(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two warps at a time for a row with five experts, of which one to five are here."""
    own = module.experts_add_geometry
    monkeypatch.setattr(module, "experts_add_geometry", lambda *args: (replace(own(*args)[0], k_warps=1), 2))
    routing = routing_of([0, 1, 2, 3, 5])
    x = 0.1 * ordinary_activations(1, HIDDEN)
    for held in (range(4, 5), range(5, 6), range(1, 3), range(1, 5), range(6)):
        found = Share(cuda, "paired", held)(x, routing, "decode")
        wanted = Share(REFERENCE, "paired", held)(x, routing, "decode")
        assert nmse(found, wanted) < 1e-8 if wanted.any() else not found.any()
