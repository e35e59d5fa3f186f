"""Checks a backend's operations of a mixture of experts against the float64 definition: every weight format in a layer
with a shared expert, and every kind of router.

The experts of each row are given, so that the backend computes those of the definition; one expert has no row, and one
has all rows. What routers choose freely is checked separately.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quengine.diagnostics.harness import KernelCheck, checked
from quengine.diagnostics.selftest.self_test import (
    COLS,
    GATED,
    HALF,
    ROUNDED,
    ROWS,
    Run,
    Use,
    check_use,
    floats,
    norm_on,
    random_tensor,
    rows_on,
    step_of,
)
from quengine.kernels.backend import Backend, Hidden
from quengine.kernels.block_formats import FORMATS, BlockFormat, dequantize
from quengine.kernels.glu import Gating
from quengine.kernels.moe.router import Router
from quengine.kernels.moe.router_kind import RouterKind
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm

EXPERTS, USED = 4, 2
SUBJECTS = tuple(f"experts {name}" for name in FORMATS)
ROUTER = "router"

ROUTER_EXPERTS = 128
ROUTERS = {
    "softmax": RouterKind(used=8),
    "of chosen": RouterKind(used=4, scores="softmax_of_chosen", normalized=False),
    "sigmoid": RouterKind(used=8, scores="sigmoid", scale=2.5),
    "groups": RouterKind(used=6, scores="sigmoid", groups=8, groups_used=3),
}
"""The routers that are checked, by the names of the report's columns."""


def _layer(tokens: int, activation: Gating = "silu", biases: bool = False) -> Run:
    """Norm, router, experts, the shared expert, the next norm with a matrix after it; with `biases` no shared one."""

    def run(backend: Backend[Any], fmt: BlockFormat) -> Hidden:
        random = torch.Generator().manual_seed(11)
        gates, ups = ([random_tensor(fmt, GATED, COLS, random) for _ in range(EXPERTS)] for _ in range(2))
        downs = [random_tensor(fmt, COLS, GATED, random) for _ in range(EXPERTS)]
        of_gate_up, of_down = (_bias(backend, width, random) for width in (2 * GATED, COLS))
        gate_up = backend.gate_up_experts(gates, ups, of_gate_up if biases else None)
        down = backend.down_experts(downs, of_down if biases else None)
        router = _router(backend, RouterKind(used=USED), EXPERTS, random)
        output = backend.weight([floats(torch.randn(ROWS, COLS, generator=random))])
        x, batch = rows_on(backend, tokens, COLS, 4), step_of(range(tokens), backend)
        norm = _fitting(norm_on(backend, COLS), gates[0])
        routing = backend.route(batch, x, norm, router, _experts_of(tokens).to(backend.device))
        gated = backend.experts_glu(batch, x, norm, routing, gate_up, activation)
        if not biases:
            shared = backend.gate_up_weight(*(random_tensor(fmt, GATED, COLS, random) for _ in range(2)))
            shared_down = backend.weight([random_tensor(fmt, COLS, GATED, random)])
            rows = backend.norm_glu(batch, x, norm, shared, activation)
            x = backend.linear_add(batch, rows, shared_down, x, row_scale=routing.shared)
        x = backend.experts_add(batch, gated, routing, down, x, norm)
        return backend.logits(batch, x, norm, output)

    return run


def _fitting(norm: RMSNorm, gate: QuantTensor) -> RMSNorm:
    """The norm scaled such that the gate's products are of the size at which an activation bends."""
    spread = dequantize(gate.format, gate.data).float().std()
    return RMSNorm(norm.weight * float(2 / (spread * COLS**0.5)), norm.eps)


def _experts_of(tokens: int) -> Tensor:
    """int32 [tokens, USED], ascending: expert 0 has every row, expert 3 none, the others some."""
    rows = torch.arange(tokens)
    return torch.stack([0 * rows, 1 + rows % 2], dim=1).to(torch.int32)


def _router(
    backend: Backend[Any], kind: RouterKind, experts: int, random: torch.Generator, bias: bool = False
) -> Router:
    weight = torch.randn(experts, COLS, generator=random) * COLS**-0.5
    gate, selection = (
        torch.randn(COLS, generator=random) * COLS**-0.5,
        0.1 * torch.randn(experts, generator=random),
    )
    return Router(
        kind,
        weight=backend.vector([floats(weight.flatten()[None])]).view(experts, COLS),
        selection_bias=backend.vector([floats(selection[None])]) if bias else None,
        shared_gate=backend.vector([floats(gate[None])]),
    )


def _bias(backend: Backend[Any], width: int, random: torch.Generator) -> Tensor:
    values = torch.randn(1, EXPERTS * width, generator=random)
    return backend.vector([floats(values)]).view(EXPERTS, width)


EXPERT_USES = (
    Use("1 token", 5 * ROUNDED, _layer(1)),
    Use("5 tokens", 5 * HALF, _layer(5)),
    Use("160 tokens", 5 * HALF, _layer(160)),
    Use("biases 1 token", 5 * ROUNDED, _layer(1, "clamped_swish", biases=True)),
    Use("biases 40 tokens", 5 * HALF, _layer(40, "clamped_swish", biases=True)),
)
"""In the order of the report's columns; the last two as in gpt-oss."""


def check_experts(backend: Backend[Any], subject: str, use: Use) -> KernelCheck:
    """Checks one use of one of SUBJECTS."""
    return replace(check_use(backend, subject.removeprefix("experts "), use), subject=subject)


def check_router(backend: Backend[Any], subject: str, name: str) -> Iterator[KernelCheck]:
    """The checks of one of ROUTERS: of a token, and of a prompt."""
    for tokens in (1, 160):
        yield checked(subject, f"{name}, {tokens}", ROUNDED, partial(_weights_of_both, backend, name, tokens))


def _weights_of_both(backend: Backend[Any], name: str, tokens: int) -> tuple[Tensor, Tensor]:
    return _weights(backend, name, tokens), _weights(ReferenceBackend(keep=True), name, tokens)


def _weights(backend: Backend[Any], name: str, tokens: int) -> Tensor:
    """The weight of every expert in each row, 0 where it is not chosen, and that of the shared expert: [tokens, experts
    + 1]."""
    kind, random = ROUTERS[name], torch.Generator().manual_seed(12)
    router = _router(backend, kind, ROUTER_EXPERTS, random, bias=kind.scores == "sigmoid")
    x, norm = rows_on(backend, tokens, COLS, 6), norm_on(backend, COLS)
    routing = backend.route(step_of(range(tokens), backend), x, norm, router)
    assert routing.shared is not None
    dense = torch.zeros(tokens, ROUTER_EXPERTS, dtype=routing.weights.dtype, device=routing.weights.device)
    dense.scatter_(1, routing.experts.long(), routing.weights)
    return torch.cat([dense, routing.shared.view(-1, 1)], dim=1)
