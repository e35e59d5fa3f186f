"""The router's launch against its definition: choices exactly, weights within fp32."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.moe import router as module
from quengine.kernels.cuda.moe.router import route, scratch_width
from quengine.kernels.moe import router as definition
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.moe.router_kind import RouterKind
from quengine.kernels.rms_norm import RMSNorm, rms_norm

EPS = 1e-6
KINDS = {
    "qwen3": RouterKind(8),
    "qwen2": RouterKind(4, normalized=False),
    "mixtral": RouterKind(2, "softmax_of_chosen", normalized=False),
    "gpt-oss": RouterKind(4, "softmax_of_chosen", normalized=False),
    "glm4": RouterKind(8, "sigmoid", scale=1.5),
    "deepseek": RouterKind(4, "sigmoid", scale=2.5, groups=8, groups_used=4),
    "groups of softmax": RouterKind(3, "softmax", normalized=False, groups=3, groups_used=2),
}


def random_router(kind: RouterKind, count: int, cols: int, device: torch.device, *extras: str) -> Router:
    """extras: which of bias, selection_bias, shared_gate and expert_scale there are."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    return Router(
        kind,
        random(count, cols) / cols**0.5,
        bias=random(count) if "bias" in extras else None,
        selection_bias=random(count) if "selection_bias" in extras else None,
        shared_gate=random(cols) / cols**0.5 if "shared_gate" in extras else None,
        expert_scale=random(count) if "expert_scale" in extras else None,
    )


def rows_of(count: int, cols: int) -> torch.Tensor:
    return 3 * torch.randn(count, cols, generator=torch.Generator().manual_seed(count))


def random_norm(cols: int, device: torch.device) -> RMSNorm:
    return RMSNorm((torch.rand(cols, generator=torch.Generator().manual_seed(2)) + 0.5).to(device), EPS)


def expected(x: torch.Tensor, norm: RMSNorm, router: Router, experts: torch.Tensor | None = None) -> Routing:
    """In fp64."""
    wide = {
        name: getattr(router, name).double().cpu()
        for name in ("weight", "bias", "selection_bias", "shared_gate", "expert_scale")
        if getattr(router, name) is not None
    }
    normed = rms_norm(x.double().cpu(), norm.weight.double().cpu(), norm.eps)
    return definition.route(normed, replace(router, **wide), None if experts is None else experts.cpu())


def assert_routing(ours: Routing, wanted: Routing) -> None:
    assert ours.experts.dtype == torch.int32 and torch.equal(ours.experts.cpu(), wanted.experts)
    torch.testing.assert_close(ours.weights.cpu().double(), wanted.weights, rtol=2e-5, atol=1e-8)
    assert (ours.shared is None) == (wanted.shared is None)
    if ours.shared is not None and wanted.shared is not None:
        torch.testing.assert_close(ours.shared.cpu().double(), wanted.shared, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("rows", [1, 18])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_router_gives_the_definition(name: str, rows: int, device: torch.device) -> None:
    extras = {
        "gpt-oss": ("bias",),
        "glm4": ("selection_bias",),
        "deepseek": ("selection_bias", "shared_gate"),
        "qwen3": ("expert_scale",),
        "qwen2": ("shared_gate",),
    }
    router = random_router(KINDS[name], 24, 96, device, *extras.get(name, ()))
    x, norm = rows_of(rows, 96), random_norm(96, device)
    assert_routing(route(x.to(device), norm, router), expected(x, norm, router))


@pytest.mark.parametrize(("count", "cols", "used"), [(3, 2880, 3), (130, 512, 6), (1, 33, 1), (40, 640, 33)])
def test_numbers_of_experts_and_columns(count: int, cols: int, used: int, device: torch.device) -> None:
    """All experts, more than are compared with each other, one, and widths that are no whole steps."""
    for kind in (RouterKind(used), RouterKind(used, "sigmoid")):
        router = random_router(kind, count, cols, device, "shared_gate")
        x, norm = rows_of(1, cols), random_norm(cols, device)
        assert_routing(route(x.to(device), norm, router), expected(x, norm, router))


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek"])
def test_forced_experts_are_weighted_without_a_choice(name: str, device: torch.device) -> None:
    router = random_router(KINDS[name], 24, 96, device, "bias", "selection_bias", "shared_gate")
    x, norm = rows_of(2, 96), random_norm(96, device)
    used = router.kind.used
    experts = torch.tensor([list(range(used)), list(range(24 - used, 24))], dtype=torch.int32, device=device)
    ours = route(x.to(device), norm, router, experts)
    assert_routing(ours, expected(x, norm, router, experts))
    assert not torch.equal(expected(x, norm, router).experts, ours.experts.cpu())


@pytest.mark.parametrize("rows", [1, 18])
@pytest.mark.parametrize("gate", [(), ("shared_gate",)])
def test_a_shared_expert_that_is_joined_is_the_last_of_each_row(
    gate: tuple[str, ...], rows: int, device: torch.device
) -> None:
    router = replace(random_router(KINDS["qwen2"], 24, 96, device, *gate), joins_shared=True)
    x, norm, used = rows_of(rows, 96), random_norm(96, device), router.kind.used
    forced = torch.arange(used, dtype=torch.int32, device=device).expand(rows, used).contiguous()
    for experts in (None, forced):
        ours = route(x.to(device), norm, router, experts)
        assert_routing(ours, expected(x, norm, router, experts))
        assert ours.joined and ours.experts[:, used].tolist() == [24] * rows


@pytest.mark.parametrize(("rows", "count"), [(1, 16), (5, 16), (1, 130)])
def test_of_equal_scores_the_lower_expert_is_chosen(rows: int, count: int, device: torch.device) -> None:
    for kind in (RouterKind(5), RouterKind(5, "sigmoid"), RouterKind(5, "softmax_of_chosen")):
        router = random_router(kind, count, 64, device)
        router.weight[:] = router.weight[0]
        x, norm = rows_of(rows, 64), random_norm(64, device)
        ours = route(x.to(device), norm, router)
        assert ours.experts.tolist() == [[0, 1, 2, 3, 4]] * rows
        torch.testing.assert_close(ours.weights[:, 0], ours.weights[:, 4])
    ours = route(torch.zeros(rows, 64, device=device), norm, router)
    assert ours.experts.tolist() == [[0, 1, 2, 3, 4]] * rows
    assert torch.allclose(ours.weights, torch.full_like(ours.weights, 0.2))


@pytest.mark.parametrize(
    "kind", [RouterKind(2), RouterKind(2, "softmax_of_chosen"), RouterKind(2, "sigmoid")]
)
@pytest.mark.parametrize(
    "bias",
    [
        [0.0, float("nan"), 1.0, 2.0, -1.0, 0.0],
        [float("-inf"), 0.0, float("-inf"), 3.0, 1.0, -2.0],
        [float("inf"), 0.0, 5.0, 1.0, 0.0, 0.0],
        [float("nan")] * 6,
        [float("-inf")] * 6,
        [0.0, -0.0, -1.0, -0.0, 0.0, -3.0],
        [-200.0, 300.0, -300.0, -250.0, 0.0, -1.0],
    ],
)
def test_logits_that_are_not_finite(kind: RouterKind, bias: list[float], device: torch.device) -> None:
    """The logits are the biases; fp32 as the definition has it, whose scores may underflow."""
    weight = torch.zeros(6, 32)
    router = Router(kind, weight.to(device), bias=torch.tensor(bias, device=device))
    norm = RMSNorm(torch.ones(32, device=device), EPS)
    ours = route(torch.ones(1, 32, device=device), norm, router)
    wanted = definition.route(torch.ones(1, 32), Router(kind, weight, bias=torch.tensor(bias)))
    assert torch.equal(ours.experts.cpu(), wanted.experts)
    torch.testing.assert_close(ours.weights.cpu(), wanted.weights, rtol=2e-5, atol=1e-8, equal_nan=True)


def test_a_rows_bits_are_its_own(device: torch.device) -> None:
    router = random_router(RouterKind(3, "sigmoid"), 12, 1056, device, "shared_gate")
    x, norm = rows_of(18, 1056).to(device), random_norm(1056, device)
    many = route(x, norm, router)
    for rows in (1, 2, 5):
        few = route(x[:rows].contiguous(), norm, router)
        assert torch.equal(few.experts, many.experts[:rows]) and torch.equal(few.weights, many.weights[:rows])
        assert few.shared is not None and many.shared is not None
        assert torch.equal(few.shared, many.shared[:rows])


def test_many_rows_have_the_bits_of_few(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take some rows one after the other, the last of them fewer, and programs of their own choose."""
    monkeypatch.setattr(module, "_AT_A_TIME", 24)
    router, cols = random_router(RouterKind(5), 24, 1056, device, "shared_gate"), 1056
    x, norm = rows_of(13, cols), random_norm(cols, device)
    many = route(x.to(device), norm, router)
    assert_routing(many, expected(x, norm, router))
    for rows in (slice(0, 1), slice(3, 6), slice(12, 13)):
        few = route(x[rows].to(device), norm, router)
        assert torch.equal(few.experts, many.experts[rows]) and torch.equal(few.weights, many.weights[rows])
        assert few.shared is not None and many.shared is not None
        assert torch.equal(few.shared, many.shared[rows])


@pytest.mark.parametrize("at_a_time", [256, 4])
def test_the_scratch_is_free_between_launches(
    at_a_time: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with programs that take several rows."""
    monkeypatch.setattr(module, "_AT_A_TIME", at_a_time)
    router = random_router(KINDS["qwen3"], 24, 64, device)
    x, norm = rows_of(5, 64).to(device), random_norm(64, device)
    scratch = QuantizationScratch.empty(scratch_width(5, router), device)
    first, second = (route(x, norm, router, scratch=scratch) for _ in range(2))
    assert torch.equal(first.weights, second.weights) and bool((scratch.words == -1).all())
    with pytest.raises(ValueError, match="scratch holds"):
        route(x, norm, router, scratch=QuantizationScratch.empty(32, device))


def test_more_columns_than_are_held_ahead(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AHEAD", 2)
    router = random_router(RouterKind(2), 4, 1600, device)
    x, norm = rows_of(1, 1600), random_norm(1600, device)
    assert_routing(route(x.to(device), norm, router), expected(x, norm, router))


def test_tensors_of_other_shapes_are_refused(device: torch.device) -> None:
    router = random_router(KINDS["qwen3"], 24, 64, device)
    norm = random_norm(64, device)
    with pytest.raises(ValueError, match=r"fp32 \[2, 64\], not torch.float32 \[2, 32\]"):
        route(torch.zeros(2, 32, device=device), norm, router)
    with pytest.raises(ValueError, match="forced experts must be int32"):
        route(torch.zeros(2, 64, device=device), norm, router, torch.zeros(2, 4, device=device))
