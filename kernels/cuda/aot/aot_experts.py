"""The cases of ahead-of-time compilation for mixture of experts in decode, at the shapes of released models."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.aot.meta_backend import META, empty, stored
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, RmsPartials
from quengine.kernels.cuda.moe.router import route
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import GATELESS, Activation
from quengine.kernels.moe.router import Router
from quengine.kernels.moe.router_kind import RouterKind
from quengine.kernels.rms_norm import RMSNorm

ExpertCase: TypeAlias = tuple[str, bool, tuple[int, ...], Callable[[CudaBackend], object]]
"""The fields of a Case (aot_cases.py)."""

_EPS = 1e-6


@dataclass(frozen=True)
class RoutedExperts:
    """One layer's experts: hidden size, feed-forward length, number of experts, and how a router selects them. joined:
    a shared expert is one more."""

    hidden: int
    ffn: int
    count: int
    router: RouterKind
    activation: Activation = "silu"
    bias: bool = False
    shared_gate: bool = False
    expert_scale: bool = False
    joined: bool = False


MODELS = {
    "qwen3-30b-a3b": RoutedExperts(2048, 768, 128, RouterKind(8)),
    "mixtral-8x7b": RoutedExperts(4096, 14336, 8, RouterKind(2, "softmax_of_chosen")),
    "gpt-oss-20b": RoutedExperts(2880, 2880, 32, RouterKind(4, "softmax_of_chosen"), "clamped_swish", True),
    "qwen3.6-35b-a3b": RoutedExperts(2048, 512, 256, RouterKind(8), shared_gate=True, joined=True),
}
ROUTERS = {
    **MODELS,
    "qwen2-57b": RoutedExperts(3584, 2560, 64, RouterKind(8, normalized=False), shared_gate=True),
    "glm-4.5": RoutedExperts(5120, 1536, 160, RouterKind(8, "sigmoid", scale=2.5)),
    "gemma-4-26b-a4b": RoutedExperts(2816, 704, 128, RouterKind(8), "gelu_tanh", expert_scale=True),
    "deepseek-v3": RoutedExperts(
        7168, 2048, 256, RouterKind(8, "sigmoid", scale=2.5, groups=8, groups_used=4)
    ),
}
_TYPES = {
    "qwen3-30b-a3b": ("Q4_K", "Q6_K"),
    "gpt-oss-20b": ("MXFP4",),
    "qwen3.6-35b-a3b": ("Q4_K", "Q6_K"),
}
"""The types in files of these models; every type is compiled at _TYPES_WIDTH columns. (Mixtral's wide
matrices are the slowest to compile and need fewer registers than these.)
"""

_TYPES_WIDTH = 1024
_BATCHED = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
"""The routers, of few, many and very many experts, that are compiled for more than one row."""


def expert_cases() -> Iterator[ExpertCase]:
    for model, names in _TYPES.items():
        for name in names:
            archs = (80, 90) if name == "Q4_K" else (90,)
            call = partial(_layer, MODELS[model], (name, name, name))
            yield f"{model}, experts of {name}, decode", True, archs, call
    small = RoutedExperts(_TYPES_WIDTH, _TYPES_WIDTH, 8, RouterKind(2), bias=True)
    for name in FORMATS:
        call = partial(_layer, small, (name, name, name))
        yield f"experts of {name}, decode", True, (90,), call
    uneven = replace(small, router=RouterKind(6))
    yield "6 experts of 8, decode", True, (90,), partial(_layer, uneven, ("Q4_K",) * 3, alone=True)
    yield "unpaired experts, decode", True, (90,), partial(_layer, small, ("Q4_K", "Q6_K", "F16"))
    gateless = RoutedExperts(2688, 1856, 128, RouterKind(6, "sigmoid", normalized=False), "relu2")
    yield "nemotron-3-nano, experts of Q5_0, decode", True, (90,), partial(_layer, gateless, ("Q5_0",) * 3)
    for model, experts in ROUTERS.items():
        for rows in (1, 16, 64, 128) if model in _BATCHED else (1,):
            yield f"router of {model}, {rows} rows", True, (90,), partial(_router, experts, rows)


def _layer(
    experts: RoutedExperts, types: tuple[str, str, str], backend: CudaBackend, *, alone: bool = False
) -> None:
    """Gate, up and down of one row, whose norm the launch before has started; the last launch starts the next norm.
    alone: also without a norm after it."""
    batch = ForwardBatch("decode", empty(1), empty(1), empty(1, 1, 1))
    hidden, ffn, count = experts.hidden, experts.ffn, experts.count + experts.joined
    gate, up = ([stored(name, ffn, hidden)] * count for name in types[:2])
    bias = (empty(count, 2 * ffn), empty(count, hidden)) if experts.bias else (None, None)
    gate_up = backend.gate_up_experts(None if experts.activation in GATELESS else gate, up, bias[0])
    down = backend.down_experts([stored(types[2], hidden, ffn)] * count, bias[1])
    norm = RMSNorm(empty(hidden), _EPS)
    row = QuantizedActivations.empty(1, hidden, META)
    row = QuantizedActivations(
        row.high, row.low, row.scale, row.sums, RmsPartials(empty(1, hidden // 32), _EPS)
    )
    x = RmsNormed(empty(1, hidden), row)
    routing = backend.route(batch, x, norm, _router_of(experts))
    gated = backend.experts_glu(batch, x, norm, routing, gate_up, experts.activation)
    backend.experts_add(batch, gated, routing, down, x, norm)
    if alone:
        backend.experts_add(batch, gated, routing, down, x)


def _router(experts: RoutedExperts, rows: int, backend: CudaBackend) -> None:
    """The router, and the router with given experts."""
    x, norm, router = empty(rows, experts.hidden), RMSNorm(empty(experts.hidden), _EPS), _router_of(experts)
    routing = route(x, norm, router, pdl=backend.pdl)
    route(x, norm, router, routing.selected.contiguous(), pdl=backend.pdl)


def _router_of(experts: RoutedExperts) -> Router:
    bias = empty(experts.count) if experts.bias else None
    selection = empty(experts.count) if experts.router.scores == "sigmoid" else None
    gate = empty(experts.hidden) if experts.shared_gate else None
    scale = empty(experts.count) if experts.expert_scale else None
    weight = empty(experts.count, experts.hidden)
    return Router(experts.router, weight, bias, selection, gate, scale, experts.joined)
