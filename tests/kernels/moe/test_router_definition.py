"""The router's definition against the routers of `transformers`, and by hand where scores are equal or no numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quengine.kernels.moe.router import Router, Routing, chosen, route
from quengine.kernels.moe.router_kind import RouterKind

ROWS, HIDDEN = 64, 24
FP32 = {"rtol": 2e-6, "atol": 2e-6}
"""`transformers` computes softmax and sigmoid in fp32, whatever the logits are."""


def rows_and_weight(experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(experts)
    x = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    return x, torch.randn(experts, HIDDEN, generator=generator, dtype=torch.float64) * 0.5


def theirs(router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Experts, ascending, and their weights, by a router of `transformers`."""
    with torch.no_grad():
        _, weights, experts = router.double()(x)
    order = experts.argsort(dim=-1)
    return experts.gather(1, order), weights.gather(1, order)


def same(ours: Routing, expected: tuple[Tensor, Tensor], **tolerance: float) -> None:
    assert ours.experts.dtype == torch.int32
    assert torch.equal(ours.experts.long(), expected[0])
    torch.testing.assert_close(ours.weights, expected[1].double(), **tolerance)


@pytest.mark.parametrize(("experts", "used"), [(8, 2), (8, 1), (5, 5), (1, 1), (60, 4)])
@pytest.mark.parametrize("normalized", [False, True])
def test_softmax_then_the_highest_is_qwens_and_olmoes(experts: int, used: int, normalized: bool) -> None:
    from transformers import Qwen2MoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    x, weight = rows_and_weight(experts)
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN, num_experts=experts, num_experts_per_tok=used, norm_topk_prob=normalized
    )
    ours = route(x, Router(RouterKind(used, "softmax", normalized), weight))
    for module in (Qwen2MoeTopKRouter, Qwen3MoeTopKRouter, OlmoeTopKRouter):
        router = module(config)
        router.weight.data = weight
        same(ours, theirs(router, x), **FP32)


@pytest.mark.parametrize(("experts", "used"), [(8, 2), (8, 1), (4, 4)])
def test_normalized_softmax_is_mixtrals(experts: int, used: int) -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    x, weight = rows_and_weight(experts)
    router = MixtralTopKRouter(
        MixtralConfig(hidden_size=HIDDEN, num_local_experts=experts, num_experts_per_tok=used)
    )
    router.weight.data = weight
    ours = route(x, Router(RouterKind(used, "softmax", normalized=True), weight))
    same(ours, theirs(router, x), **FP32)
    of_chosen = route(x, Router(RouterKind(used, "softmax_of_chosen", normalized=False), weight))
    same(of_chosen, (ours.experts.long(), ours.weights), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("experts", "used"), [(32, 4), (4, 1), (3, 3)])
def test_softmax_of_the_chosen_with_a_bias_is_gpt_oss(experts: int, used: int) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    x, weight = rows_and_weight(experts)
    bias = torch.linspace(-1.0, 1.0, experts, dtype=torch.float64)
    router = GptOssTopKRouter(
        GptOssConfig(hidden_size=HIDDEN, num_local_experts=experts, num_experts_per_tok=used)
    )
    router.weight.data, router.bias.data = weight, bias
    ours = route(x, Router(RouterKind(used, "softmax_of_chosen", normalized=False), weight, bias))
    same(ours, theirs(router, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("groups", "groups_used"), [(1, 1), (4, 2), (4, 1), (8, 3), (4, 4)])
@pytest.mark.parametrize("normalized", [False, True])
def test_sigmoids_with_a_selection_bias_and_groups_are_deepseeks_and_glms(
    groups: int, groups_used: int, normalized: bool
) -> None:
    from transformers import Glm4MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    experts, used = 32, 4
    x, weight = rows_and_weight(experts)
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * 0.3
    config = Glm4MoeConfig(
        hidden_size=HIDDEN,
        n_routed_experts=experts,
        num_experts_per_tok=used,
        n_group=groups,
        topk_group=groups_used,
        norm_topk_prob=normalized,
        routed_scaling_factor=2.5,
    )
    kind = RouterKind(used, "sigmoid", normalized, 2.5, groups, groups_used)
    ours = route(x, Router(kind, weight, selection_bias=bias))
    without_bias = route(x, Router(kind, weight))
    assert not torch.equal(ours.experts, without_bias.experts)
    for module in (Glm4MoeTopkRouter, DeepseekV3TopkRouter):
        router = module(config)
        router.weight.data, router.e_score_correction_bias.data = weight, bias
        same(ours, theirs(router, x), **FP32)


def test_given_experts_are_weighted_as_they_would_be_if_chosen() -> None:
    x, weight = rows_and_weight(8)
    router = Router(RouterKind(2, "softmax", normalized=True), weight)
    free = route(x, router)
    again = route(x, router, free.experts)
    assert torch.equal(again.experts, free.experts) and torch.equal(again.weights, free.weights)
    forced = route(x, router, torch.tensor([[3, 6]], dtype=torch.int32).expand(ROWS, 2))
    expected = (x @ weight[[3, 6]].T).softmax(-1)
    torch.testing.assert_close(forced.weights, expected, rtol=1e-12, atol=1e-12)


def test_the_shared_experts_gate_is_a_sigmoid_of_its_own() -> None:
    x, weight = rows_and_weight(4)
    gate = torch.linspace(-1.0, 1.0, HIDDEN, dtype=torch.float64)
    shared = route(x, Router(RouterKind(2), weight, shared_gate=gate)).shared
    assert shared is not None
    torch.testing.assert_close(shared, 1.0 / (1.0 + (-(x * gate).sum(-1)).exp()), rtol=1e-12, atol=1e-12)
    assert route(x, Router(RouterKind(2), weight)).shared is None


def experts_of(scores: list[float], kind: RouterKind, bias: list[float] | None = None) -> list[int]:
    """Those chosen of one row by its scores."""
    selection = None if bias is None else torch.tensor(bias, dtype=torch.float64)
    router = Router(kind, torch.zeros(len(scores), 1, dtype=torch.float64), selection_bias=selection)
    found: list[int] = chosen(torch.tensor([scores], dtype=torch.float64), router)[0].tolist()
    return found


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scores", "used", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0], 2, [0, 1]),
        ([1.0, 3.0, 3.0, 3.0], 2, [1, 2]),
        ([1.0, 2.0, 3.0, 2.0], 2, [1, 2]),
        ([-1.0, -1.0, 0.0, -1.0], 3, [0, 1, 2]),
        ([0.0, -0.0, 1.0], 2, [0, 2]),
        ([-0.0, 0.0, 1.0], 2, [0, 2]),
        ([NAN, 1.0, 2.0], 2, [1, 2]),
        ([2.0, NAN, 1.0], 1, [0]),
        ([NAN, NAN, -5.0], 2, [0, 2]),
        ([NAN, NAN, NAN], 2, [0, 1]),
        ([-INF, NAN, 1.0], 2, [0, 2]),
        ([INF, 1.0, INF], 1, [0]),
    ],
)
def test_the_lower_of_equal_experts_is_chosen_and_nan_is_the_lowest_score(
    scores: list[float], used: int, expected: list[int]
) -> None:
    assert experts_of(scores, RouterKind(used, "sigmoid")) == expected


def test_ties_are_broken_behind_the_selection_bias() -> None:
    kind = RouterKind(2, "sigmoid")
    assert experts_of([0.5, 0.5, 0.5, 0.5], kind, [0.0, 0.0, 0.25, 0.0]) == [0, 2]
    assert experts_of([0.75, 0.5, 0.25, 0.5], kind, [-0.25, 0.0, 0.25, 0.0]) == [0, 1]


def test_the_lower_of_equal_groups_is_chosen() -> None:
    kind = RouterKind(2, "sigmoid", groups=3, groups_used=1)
    assert experts_of([0.1, 0.5, 0.5, 0.1, 0.3, 0.3], kind) == [0, 1]
    assert experts_of([0.1, 0.4, 0.5, 0.1, 0.3, 0.3], kind) == [2, 3]
    two = RouterKind(3, "sigmoid", groups=3, groups_used=2)
    assert experts_of([0.9, 0.0, 0.5, 0.5, 0.6, 0.4], two) == [2, 3, 4]
    of_one = RouterKind(2, "sigmoid", groups=4, groups_used=2)
    assert experts_of([0.1, 0.4, 0.4, 0.3], of_one) == [1, 2]


def test_a_group_is_as_good_as_its_two_best_with_their_bias() -> None:
    kind = RouterKind(2, "sigmoid", groups=2, groups_used=1)
    scores = [0.9, 0.1, 0.1, 0.5, 0.5, 0.1]
    assert experts_of(scores, kind) == [0, 1]
    assert experts_of(scores, kind, [0.0, 0.0, 0.0, 0.0, 0.0, 0.6]) == [3, 5]


def test_sigmoids_that_are_all_0_are_normalized_to_0() -> None:
    weight = torch.full((3, 1), -1e4, dtype=torch.float64)
    routing = route(torch.ones(1, 1, dtype=torch.float64), Router(RouterKind(2, "sigmoid"), weight))
    assert routing.experts.tolist() == [[0, 1]] and routing.weights.tolist() == [[0.0, 0.0]]
