"""Experts on the CPU against the reference backend: every format, any routing, the same bits beside any other rows."""

import dataclasses
from functools import lru_cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm
from tests.kernels.weights import nmse, randn, random_weight

EXPERTS, USED, EPS = 5, 3, 1e-6
Phase = Literal["prefill", "decode"]


def matrices(
    kind: str, count: int, rows: int, cols: int, seed: int, merged: bool = True
) -> list[QuantTensor]:
    """Matrices of random blocks, views of one tensor [E, rows, cols] or each in its own memory."""
    whole = random_weight(kind, count * rows, cols // FORMATS[kind].block, seed)
    views = dataclasses.replace(whole, shape=(count, rows, cols)).matrices()
    return views if merged else [dataclasses.replace(w, data=w.data.clone()) for w in views]


class Experts:
    """One layer's experts on a backend."""

    def __init__(
        self,
        backend: Any,
        kinds: tuple[str, str, str],
        sizes: tuple[int, int],
        count: int = EXPERTS,
        bias: bool = False,
        merged: bool = True,
    ) -> None:
        width, length = sizes
        self.backend, dtype = backend, backend.dtype
        gate, up = (matrices(kind, count, length, width, i, merged) for i, kind in enumerate(kinds[:2]))
        down = matrices(kinds[2], count, width, length, 2, merged)
        biases = [randn(count, 2 * length, seed=3).to(dtype), randn(count, width, seed=4).to(dtype)]
        self.gate_up = backend.gate_up_experts(gate, up, biases[0] if bias else None)
        self.down = backend.down_experts(down, biases[1] if bias else None)
        self.norm = RMSNorm((1.0 + 0.1 * randn(width, seed=5)).to(dtype), EPS)

    def __call__(
        self, x: Tensor, routing: Routing, phase: Phase, activation: Activation = "silu"
    ) -> tuple[Tensor, Tensor]:
        """The gated rows [T, k, F], and the sum with x as the residual."""
        backend, batch = self.backend, batch_of(len(x), phase)
        x = x.to(backend.dtype)
        routing = Routing(routing.experts, routing.weights.to(backend.dtype))
        gated = backend.experts_glu(batch, x, self.norm, routing, self.gate_up, activation)
        y = backend.experts_add(batch, gated, routing, self.down, x)
        return gated if isinstance(gated, Tensor) else gated.by_slot(), y


@lru_cache(maxsize=2)
def reference(**options: Any) -> Experts:
    """On the reference backend; tests of the same experts share them, as their weights take long to dequantize."""
    return Experts(ReferenceBackend(keep=True), **options)


def batch_of(rows: int, phase: Phase) -> ForwardBatch:
    return ForwardBatch(
        phase, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64), None
    )


def routing_of(rows: int, count: int = EXPERTS, used: int = USED, seed: int = 0) -> Routing:
    """Random experts of each row; the last expert has none."""
    scores = torch.rand(rows, count - (count > used), generator=torch.Generator().manual_seed(seed))
    experts = scores.argsort(dim=1)[:, :used].sort(dim=1).values.int()
    return Routing(experts, torch.rand(rows, used, generator=torch.Generator().manual_seed(seed + 1)))


def check(
    x: Tensor, routing: Routing, phase: Phase, activation: Activation = "silu", **options: Any
) -> tuple[Tensor, Tensor]:
    """The CPU's rows and sum, both within the budget of the reference's."""
    expected = reference(**options)(x, routing, phase, activation)
    made = Experts(CpuBackend(cpu.max_threads()), **options)(x, routing, phase, activation)
    most = 5e-8 if phase == "decode" else 2e-6
    assert nmse(made[0], expected[0]) < most
    # Of the experts' sum, without the residual.
    assert nmse(made[1] - x, expected[1] - x.double()) < most
    return made


QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.is_quantized]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("kind", list(FORMATS))
def test_every_format(kind: str, phase: Phase) -> None:
    check(randn(5, 256, seed=6), routing_of(5), phase, kinds=(kind, kind, kind), sizes=(256, 256), bias=True)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(
    "kinds", [("Q4_K", "F16", "Q6_K"), ("BF16", "Q8_0", "F32"), ("Q5_0", "Q6_K", "Q4_K")]
)
def test_formats_may_differ(kinds: tuple[str, str, str], rows: int, phase: Phase) -> None:
    check(randn(rows, 256, seed=7), routing_of(rows), phase, kinds=kinds, sizes=(256, 512), merged=False)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swish"])
def test_activations_with_biases(activation: Activation, phase: Phase) -> None:
    check(
        6 * randn(9, 96, seed=8),
        *(routing_of(9), phase, activation),
        kinds=("MXFP4", "MXFP4", "MXFP4"),
        sizes=(96, 160),
        bias=True,
    )


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_widths_that_are_no_multiple_of_a_group(phase: Phase) -> None:
    check(randn(3, 40, seed=9), routing_of(3), phase, kinds=("F32", "BF16", "F16"), sizes=(40, 50), bias=True)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_all_rows_to_one_expert_and_all_experts_to_each_row(rows: int, phase: Phase) -> None:
    kinds, x = ("Q4_K", "Q4_K", "Q6_K"), randn(rows, 256, seed=10)
    one = Routing(torch.full((rows, 1), 4, dtype=torch.int32), torch.rand(rows, 1))
    check(x, one, phase, kinds=kinds, sizes=(256, 256))
    every = Routing(torch.arange(EXPERTS, dtype=torch.int32).repeat(rows, 1), torch.rand(rows, EXPERTS))
    check(x, every, phase, kinds=kinds, sizes=(256, 256))


def test_a_group_of_more_rows_than_a_launch_takes() -> None:
    rows = 1100
    routing = routing_of(rows, count=2, used=1)
    assert routing.experts.unique().tolist() == [0]
    check(
        randn(rows, 256, seed=11),
        routing,
        "prefill",
        kinds=("Q4_K", "Q8_0", "Q5_K"),
        sizes=(256, 256),
        count=2,
    )


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_an_expert_that_no_row_has_is_not_read(phase: Phase) -> None:
    experts = Experts(CpuBackend(cpu.max_threads()), ("Q4_K", "Q4_K", "Q6_K"), (256, 256))
    for part in (*experts.gate_up.parts, *experts.down.parts):
        part.addresses[EXPERTS - 1] = 8  # would end the process
    routing = routing_of(20)
    assert experts(randn(20, 256, seed=12), routing, phase)[1].isfinite().all()


def test_a_prompt_may_have_no_rows() -> None:
    experts = Experts(CpuBackend(1), ("Q4_K", "BF16", "Q6_K"), (256, 256))
    gated, y = experts(torch.empty(0, 256), routing_of(0), "prefill")
    assert gated.shape == (0, USED, 256) and y.shape == (0, 256)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_extreme_values(phase: Phase) -> None:
    x = randn(4, 256, seed=13)
    x[0], x[1], x[2, 7] = 0.0, 1e15 * x[1], 1e18
    made = Experts(CpuBackend(1), ("Q4_K", "Q4_K", "Q6_K"), (256, 256))(x, routing_of(4), phase)
    expected = reference(kinds=("Q4_K", "Q4_K", "Q6_K"), sizes=(256, 256))(x, routing_of(4), phase)
    for row in range(4):
        assert not made[1][row].isnan().any()
        if row:
            assert nmse(made[0][row], expected[0][row]) < (5e-8 if phase == "decode" else 2e-6)
    assert torch.equal(made[0][0], torch.zeros_like(made[0][0]))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q8_0", "Q8_0"), ("BF16", "BF16", "BF16")]
)
def test_a_row_has_the_same_bits_whatever_is_beside_it_on_any_number_of_threads(
    kinds: tuple[str, str, str], phase: Phase
) -> None:
    x, routing, every = randn(45, 256, seed=14), routing_of(45), []
    for threads in {1, cpu.max_threads()}:
        experts = Experts(CpuBackend(threads), kinds, (256, 512), bias=True)
        every.append(torch.cat([t.flatten(1) for t in experts(x, routing, phase)], 1))
        for rows in ([0], [7, 8], [44, 3, 12, 30], list(range(20, 45))):
            part = Routing(routing.experts[rows], routing.weights[rows])
            alone = torch.cat([t.flatten(1) for t in experts(x[rows], part, phase)], 1)
            assert torch.equal(alone, every[0][rows])
    assert all(torch.equal(made, every[0]) for made in every)


def test_matrices_that_differ_are_refused() -> None:
    backend, gate = CpuBackend(1), matrices("Q8_0", 2, 32, 64, 0)
    with pytest.raises(
        ValueError, match=r"is Q4_0 \[32, 64\]; the first expert's matrix random Q8_0 is Q8_0 \[32, 64\]"
    ):
        backend.gate_up_experts([gate[0], *matrices("Q4_0", 1, 32, 64, 0)], gate)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("rows", [1, 6])
def test_slots_of_experts_that_are_elsewhere_add_nothing(rows: int, phase: Phase) -> None:
    """An expert of -1, or beyond the last, is another device's: the sum is that of the others."""
    options: dict[str, Any] = {"kinds": ("Q4_K", "Q4_K", "Q6_K"), "sizes": (256, 256), "bias": True}
    x, whole = randn(rows, 256, seed=11), routing_of(rows)
    away = whole.experts.clone()
    away[0, 1], away[-1, 0] = -1, EXPERTS
    away[rows // 2] = -1
    absent = (away < 0) | (away >= EXPERTS)
    backend = CpuBackend(cpu.max_threads())
    made, batch = Experts(backend, **options), batch_of(rows, phase)
    gated = backend.experts_glu(batch, x, made.norm, Routing(away, whole.weights), made.gate_up)
    y = backend.experts_add(batch, gated, Routing(away, whole.weights), made.down, None)
    _, expected = reference(**options)(x, Routing(whole.experts, whole.weights.masked_fill(absent, 0)), phase)
    wanted = expected - x.double()
    assert torch.equal(y[rows // 2], torch.zeros(256)) and not wanted[rows // 2].any()
    if rows > 1:
        assert nmse(y, wanted) < (5e-8 if phase == "decode" else 2e-6)
