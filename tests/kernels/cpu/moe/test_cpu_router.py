"""The CPU's router against its torch definition: every kind, ties, NaN, extreme values, forced experts."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.moe import router as definition
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.moe.router_kind import RouterKind
from tests.kernels.cpu.cpu_runs import route
from tests.kernels.weights import randn

WIDTH, EXPERTS = 72, 24


def make_router(kind: RouterKind, experts: int = EXPERTS, width: int = WIDTH, **parts: Any) -> Router:
    return Router(kind, 0.2 * randn(experts, width, seed=1), **parts)


def in_fp64(router: Router) -> Router:
    names = ("weight", "bias", "selection_bias", "shared_gate", "expert_scale")
    values = {name: getattr(router, name) for name in names}
    return dataclasses.replace(router, **{n: v.double() for n, v in values.items() if v is not None})


def check(x: Tensor, router: Router, experts: Tensor | None = None) -> Routing:
    """The routing of x, which is near the definition in fp64, and has the same experts."""
    made = route(x, router, experts)
    expected = definition.route(x.double(), in_fp64(router), experts)
    assert made.experts.dtype == torch.int32 and torch.equal(made.experts, expected.experts)
    torch.testing.assert_close(made.weights.double(), expected.weights, rtol=2e-5, atol=1e-7)
    assert (made.shared is None) == (expected.shared is None)
    if made.shared is not None and expected.shared is not None:
        torch.testing.assert_close(made.shared.double(), expected.shared, rtol=2e-6, atol=1e-7)
    return made


KINDS = {
    "mixtral": RouterKind(2, "softmax", normalized=True),
    "qwen2moe": RouterKind(4, "softmax", normalized=False),
    "gpt-oss": RouterKind(4, "softmax_of_chosen", normalized=False),
    "glm4moe": RouterKind(8, "sigmoid", normalized=True, scale=2.5),
    "deepseek": RouterKind(6, "sigmoid", normalized=True, scale=2.5, groups=8, groups_used=4),
    "groups of one": RouterKind(3, "softmax", groups=24, groups_used=5),
    "all": RouterKind(EXPERTS, "softmax"),
    "one": RouterKind(1, "softmax_of_chosen", normalized=False),
}


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("extras", ["none", "bias", "selection", "gate", "every"])
@pytest.mark.parametrize("name", list(KINDS))
def test_every_kind_is_its_definition(name: str, extras: str, rows: int) -> None:
    parts: dict[str, Tensor] = {}
    if extras in ("bias", "every"):
        parts["bias"] = randn(EXPERTS, seed=2)
    if extras in ("selection", "every"):
        parts["selection_bias"] = 0.5 * randn(EXPERTS, seed=3)
    if extras in ("gate", "every"):
        parts["shared_gate"] = randn(WIDTH, seed=4)
    if extras == "every":
        parts["expert_scale"] = randn(EXPERTS, seed=6)
    check(randn(rows, WIDTH, seed=5), make_router(KINDS[name], **parts))


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_that_is_joined_is_the_last_of_each_row(gated: bool) -> None:
    parts = {"shared_gate": randn(WIDTH, seed=4)} if gated else {}
    router = dataclasses.replace(make_router(KINDS["qwen2moe"], **parts), joins_shared=True)
    x, forced = randn(3, WIDTH, seed=5), torch.tensor([[0, 3, 5, 7]] * 3, dtype=torch.int32)
    for experts in (None, forced):
        made = check(x, router, experts)
        assert made.joined and made.shared is None and made.experts[:, 4].tolist() == [EXPERTS] * 3
        apart = route(x, dataclasses.replace(router, joins_shared=False), experts)
        weight = torch.ones(3) if apart.shared is None else apart.shared
        assert torch.equal(made.weights, torch.cat([apart.weights, weight[:, None]], 1))


@pytest.mark.parametrize(
    ("experts", "used", "width"), [(1024, 64, 33), (128, 8, 2048), (3, 3, 31), (2, 1, 1)]
)
def test_sizes(experts: int, used: int, width: int) -> None:
    check(randn(3, width, seed=6), make_router(RouterKind(used), experts, width))


@pytest.mark.parametrize("scores", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_of_equal_scores_the_lower_expert_is_chosen(scores: Any) -> None:
    bias = torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0, 2.0, 2.0, 0.0])
    router = Router(RouterKind(4, scores), torch.zeros(8, 5), bias=bias)
    routing = check(torch.ones(2, 5), router)
    assert routing.experts.tolist() == [[1, 2, 3, 4]] * 2


def test_of_equal_groups_the_lower_is_used() -> None:
    bias = torch.tensor([5.0, 0.0, 1.0, 4.0, 3.0, 3.0, 3.0, 2.0])  # sums 5, 5, 6, 5
    kind = RouterKind(2, "softmax_of_chosen", normalized=False, groups=4, groups_used=2)
    routing = check(torch.ones(1, 5), Router(kind, torch.zeros(8, 5), bias=bias))
    assert routing.experts.tolist() == [[0, 4]]


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "glm4moe"])
def test_extreme_logits(name: str) -> None:
    bias = torch.zeros(EXPERTS)
    bias[[3, 9, 20]] = torch.tensor([80.0, -1e30, 85.0])
    check(randn(3, WIDTH, seed=7), make_router(KINDS[name], bias=bias))
    check(1e-20 * randn(3, WIDTH, seed=8), make_router(KINDS[name], bias=-1e4 * torch.ones(EXPERTS)))


def test_nan_is_the_lowest_score() -> None:
    bias = torch.zeros(EXPERTS)
    bias[[0, 1, 2]] = torch.nan
    router = make_router(RouterKind(5, "softmax_of_chosen", normalized=False), bias=bias)
    assert int(check(randn(4, WIDTH, seed=9), router).experts.min()) > 2
    # With softmax all scores are NaN: any experts are chosen, and they are there.
    routing = route(torch.full((1, WIDTH), torch.nan), make_router(RouterKind(3)))
    assert routing.experts.tolist() == [[0, 1, 2]] and bool(routing.weights.isnan().all())


@pytest.mark.parametrize("name", list(KINDS))
def test_forced_experts_are_weighted_without_a_choice(name: str) -> None:
    used = KINDS[name].used
    chosen = [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i))[:used] for i in range(4)]
    forced = torch.stack(chosen).sort(dim=1).values.int()
    selection = 0.5 * randn(EXPERTS, seed=3)
    made = check(randn(4, WIDTH, seed=10), make_router(KINDS[name], selection_bias=selection), forced)
    assert torch.equal(made.experts, forced)


def test_a_row_is_routed_the_same_whatever_is_beside_it_on_any_number_of_threads() -> None:
    x = randn(150, WIDTH, seed=11)
    router = make_router(KINDS["deepseek"], bias=randn(EXPERTS, seed=2), shared_gate=randn(WIDTH, seed=4))
    every = []
    for threads in {1, cpu.max_threads()}:
        cpu.set_threads(threads)
        every += [route(x, router), route(x[63:65].clone(), router), route(x[2:65].clone(), router)]
    for routing in every:
        rows = {2: slice(None), 63: slice(61, 63), 150: slice(63, 65)}[len(routing.experts)]
        assert torch.equal(routing.experts[rows], every[1].experts)
        assert torch.equal(routing.weights[rows], every[1].weights)
        assert routing.shared is not None and every[1].shared is not None
        assert torch.equal(routing.shared[rows], every[1].shared)


def test_what_is_not_there_is_refused() -> None:
    x = torch.ones(1, WIDTH)
    with pytest.raises(ValueError, match="a layer has experts 0 to 23, not \\[3, 24\\]"):
        route(x, make_router(RouterKind(2)), torch.tensor([[3, 24]], dtype=torch.int32))
    with pytest.raises(ValueError, match="25 of 24 experts"):
        route(x, make_router(RouterKind(25)))
