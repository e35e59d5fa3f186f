"""What parity reads of experts' rows on the CUDA backend, and gives it in their place: the numbers of the reference."""

from typing import Any

import pytest
import torch

from quengine.diagnostics.parity.parity_operations import in_the_form_of, rows_of
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.moe.router import Routing
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm
from tests.kernels.cuda.moe.expert_runs import experts_of
from tests.kernels.cuda.moe.test_expert_operations import make_batch
from tests.kernels.cuda.weights import nmse

HIDDEN, FFN, COUNT = 64, 32, 4
REFERENCE = ReferenceBackend(keep=True)


class Layer:
    """The experts of one layer on a backend, with rows and their routing."""

    def __init__(self, backend: Any, phase: str, rows: int) -> None:
        self.backend, self.batch = backend, make_batch(phase, rows, backend.device)
        like = {"dtype": backend.dtype, "device": backend.device}
        random = torch.Generator().manual_seed(3)
        self.x = torch.randn(rows, HIDDEN, generator=random).to(**like)
        self.norm = RMSNorm((torch.rand(HIDDEN, generator=random) + 0.5).to(**like), 1e-6)
        gate, up, down = (
            experts_of("Q8_0", COUNT, *shape, seed)
            for seed, shape in enumerate([(FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)])
        )
        self.gate_up, self.down = backend.gate_up_experts(gate, up), backend.down_experts(down)
        experts = torch.stack([torch.arange(rows) % 2, 2 + torch.arange(rows) % 2], dim=1)
        weights = torch.rand(rows, 2, generator=random) + 0.5
        self.routing = Routing(experts.to(backend.device, torch.int32), weights.to(**like))

    def gated(self) -> Any:
        return self.backend.experts_glu(self.batch, self.x, self.norm, self.routing, self.gate_up)

    def added(self, gated: Any) -> torch.Tensor:
        return self.backend.experts_add(self.batch, gated, self.routing, self.down, torch.zeros_like(self.x))


@pytest.mark.parametrize(("phase", "rows"), [("decode", 1), ("decode", 5), ("prefill", 9)])
def test_rows_of_experts_are_read_and_replaced(
    phase: str, rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    ours, exact = Layer(CudaBackend(device), phase, rows), Layer(REFERENCE, phase, rows)
    wanted = exact.gated()
    own = ours.gated()
    found = rows_of(own)[..., :FFN].reshape(wanted.shape)
    assert nmse(found.cpu(), wanted) < 2e-5
    given = in_the_form_of(3 * wanted.flip(0), own, ours.backend)
    assert type(given) is type(own)
    assert nmse(rows_of(given)[..., :FFN].reshape(wanted.shape).cpu(), 3 * wanted.flip(0)) < 2e-5
    assert nmse(rows_of(ours.added(given)).cpu(), exact.added(3 * wanted.flip(0))) < 2e-5
