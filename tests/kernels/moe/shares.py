"""Some of a layer's experts on a backend, and what they make of rows whose other experts are elsewhere."""

from typing import Any

import torch
from torch import Tensor

from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.glu import Activation
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.router import Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight

HIDDEN, INNER, COUNT, EPS = 64, 32, 6, 1e-6
REFERENCE = ReferenceBackend(keep=True)
SHARES = {"first": range(2), "middle": range(2, 5), "last": range(5, 6)}
FORMATS = {
    "paired": (("Q8_0", "Q8_0", "Q4_0"), "silu", False),
    "biases, clamped": (("MXFP4", "MXFP4", "MXFP4"), "clamped_swish", True),
    "unpaired": (("Q4_0", "Q5_1", "Q4_1"), "gelu_tanh", True),
    "floats": (("F16", "F16", "BF16"), "silu", False),
}


class Share:
    """Some experts of a layer on a backend; `held` None: all."""

    def __init__(self, backend: Any, name: str, held: range | None) -> None:
        (gate, up, down), self.activation, bias = FORMATS[name]
        self.backend = backend
        like = {"dtype": backend.dtype, "device": backend.device}
        random = torch.Generator().manual_seed(5)
        own = range(COUNT) if held is None else held
        biases = [torch.randn(COUNT, n, generator=random)[list(own)].to(**like) for n in (2 * INNER, HIDDEN)]
        given = [biases[0] if bias else None, biases[1] if bias else None]
        share = () if held is None else (ExpertShare(held.start, COUNT),)
        gates, ups, downs = (
            [matrix for number, matrix in enumerate(experts_of(kind, *shape, seed)) if number in own]
            for seed, (kind, shape) in enumerate(
                ((gate, (INNER, HIDDEN)), (up, (INNER, HIDDEN)), (down, (HIDDEN, INNER)))
            )
        )
        self.gate_up = backend.gate_up_experts(gates, ups, given[0], *share)
        self.down = backend.down_experts(downs, given[1], *share)
        self.norm = RMSNorm((torch.rand(HIDDEN, generator=random) + 0.5).to(**like), EPS)

    def __call__(self, x: Tensor, routing: Routing, phase: str) -> Tensor:
        """The weighted sums [T, HIDDEN], without a residual."""
        device, dtype = self.backend.device, self.backend.dtype
        batch = batch_of(len(x), phase, device)
        moved = Routing(routing.experts.to(device), routing.weights.to(device, dtype))
        activation: Activation = self.activation  # type: ignore[assignment]
        x = x.to(device, dtype)
        gated = self.backend.experts_glu(batch, x, self.norm, moved, self.gate_up, activation)
        poison(gated, routing, self.gate_up)
        y: Tensor = self.backend.experts_add(batch, gated, moved, self.down, torch.zeros_like(x))
        return y.cpu()


def experts_of(kind: str, rows: int, cols: int, seed: int) -> list[QuantTensor]:
    return ordinary_weight(kind, COUNT * rows, cols, seed).row_slices(rows)


def poison(gated: Any, routing: Routing, weights: Any) -> None:
    """What nobody has computed becomes no number: nothing may read it."""
    if isinstance(gated, Tensor) or not hasattr(gated, "scale"):
        return
    held = range(weights.first, weights.first + weights.count)
    away = torch.tensor([expert not in held for expert in routing.experts.flatten().tolist()])
    gated.scale[away.to(gated.scale.device)] = float("nan")


def batch_of(rows: int, phase: str, device: torch.device) -> ForwardBatch:
    ids = list(range(rows))
    if phase == "prefill":
        return prefill_batch([ids], [0], [[[0]]], device, all_logits=True)
    return decode_batch(ids, [0] * rows, [[[row]] for row in ids], device)


def routing_of(*experts: list[int]) -> Routing:
    chosen = torch.tensor(experts, dtype=torch.int32)
    weights = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(3)) + 0.1
    return Routing(chosen, weights)


ROUTINGS = {
    "a row": routing_of([0, 2, 4]),
    "a row, none in the middle": routing_of([0, 1, 5]),
    "a row, all in the middle": routing_of([2, 3, 4]),
    "rows": routing_of([2, 3, 4], [0, 1, 5], [1, 2, 5], [0, 3, 4], [0, 1, 2]),
    "rows, none in the middle": routing_of([0, 1, 5], [0, 1, 5], [0, 1, 5]),
}


def check(backend: Any, name: str, held: range, routing: str, phase: str, most: float) -> None:
    chosen = ROUTINGS[routing]
    x = 0.1 * ordinary_activations(len(chosen.experts), HIDDEN)
    found = Share(backend, name, held)(x, chosen, phase)
    wanted = Share(REFERENCE, name, held)(x, chosen, phase)
    assert bool(found.isfinite().all())
    assert nmse(found, wanted) < most if wanted.any() else not found.any()
