"""The self-test of experts passes a right backend, and fails a wrong one in every operation of the layer."""

from dataclasses import replace

import pytest
import torch

from quengine.diagnostics.harness import KernelCheck
from quengine.diagnostics.selftest.self_test_experts import (
    EXPERT_USES,
    ROUTER,
    ROUTERS,
    SUBJECTS,
    check_experts,
    check_router,
)
from quengine.diagnostics.selftest.self_test_run import units
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.reference import ReferenceBackend

FEW = ("experts Q4_K", "experts MXFP4", "experts F16")


def checks(backend, subjects=FEW) -> list[KernelCheck]:
    return [check_experts(backend, subject, use) for subject in subjects for use in EXPERT_USES]


def test_every_format_is_checked_in_every_use_and_every_router() -> None:
    assert [subject for subject in SUBJECTS if subject.removeprefix("experts ") not in FORMATS] == []
    assert len(SUBJECTS) == len(FORMATS)
    assert {*units(on_gpu=True)} >= {(subject, use.name) for subject in SUBJECTS for use in EXPERT_USES}
    assert {*units(on_gpu=True)} >= {(ROUTER, name) for name in ROUTERS}


def test_the_definition_itself_passes() -> None:
    done = checks(ReferenceBackend(keep=True))
    assert [(check.subject, check.test) for check in done] == [
        (subject, use.name) for subject in FEW for use in EXPERT_USES
    ]
    assert all(check.error < 1e-12 and check.passed for check in done)


def test_the_cpu_passes() -> None:
    backend = CpuBackend(1)
    done = checks(backend, ("experts Q4_K",))
    done += [check for name in ROUTERS for check in check_router(backend, ROUTER, name)]
    assert [check for check in done if not check.passed] == []
    assert len(done) == len(EXPERT_USES) + 2 * len(ROUTERS)


class NextExpert(ReferenceBackend):
    """Every expert's matrices are its neighbour's."""

    def gate_up_experts(self, gate, up, bias=None):
        return super().gate_up_experts([*gate[1:], gate[0]], [*up[1:], up[0]], bias)


class NextDown(ReferenceBackend):
    def down_experts(self, down, bias=None):
        return super().down_experts([*down[1:], down[0]], bias)


class NoWeights(ReferenceBackend):
    def experts_add(self, batch, gated, routing, down, residual, next_norm=None):
        routing = replace(routing, weights=torch.ones_like(routing.weights))
        return super().experts_add(batch, gated, routing, down, residual, next_norm)


class Unclamped(ReferenceBackend):
    def experts_glu(self, batch, x, norm, routing, gate_up, *_):
        return super().experts_glu(batch, x, norm, routing, gate_up, "silu")


class NoBias(ReferenceBackend):
    def gate_up_experts(self, gate, up, *_):
        return super().gate_up_experts(gate, up)

    def down_experts(self, down, *_):
        return super().down_experts(down)


class NoSharedWeight(ReferenceBackend):
    def linear_add(self, *args, **_):
        return super().linear_add(*args)


@pytest.mark.parametrize("wrong", [NextExpert, NextDown, NoWeights, Unclamped, NoBias, NoSharedWeight])
def test_a_wrong_operation_fails_in_the_uses_that_have_it(wrong) -> None:
    failed = {check.test for check in checks(wrong(keep=True)) if not check.passed}
    with_biases = {use.name for use in EXPERT_USES if use.name.startswith("biases")}
    every = {use.name for use in EXPERT_USES}
    expected = {Unclamped: with_biases, NoBias: with_biases, NoSharedWeight: every - with_biases}
    assert failed == expected.get(wrong, every)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_that_chooses_the_next_expert_fails(name: str) -> None:
    class Next(ReferenceBackend):
        def route(self, batch, x, norm, router, experts=None):
            found = super().route(batch, x, norm, router, experts)
            return replace(found, experts=(found.experts + 1) % len(router.weight))

    assert not any(check.passed for check in check_router(Next(keep=True), ROUTER, name))
