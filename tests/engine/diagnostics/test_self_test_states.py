"""The self-test of operations with a state passes right kernels, and sees a step that reads or keeps the wrong rows."""

from dataclasses import replace

import pytest
import torch

from quengine.diagnostics.selftest.self_test_states import STATES, check_state
from quengine.kernels.backend import Hidden, SlotLayer
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.gated_delta import gated_delta as launches
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.mamba2 import Mamba2Spec
from quengine.kernels.short_conv import ShortConvSpec

CONV, DELTA, MAMBA = STATES[0], STATES[1], STATES[-2]


def unkept(batch: ForwardBatch, state: SlotLayer) -> SlotLayer:
    """Of a prompt a copy."""
    return SlotLayer(tuple(part.clone() for part in state.parts)) if batch.phase == "prefill" else state


class Forgetful(CpuBackend):
    """Keeps nothing of a prompt."""

    def short_conv(self, batch: ForwardBatch, x: Hidden, spec: ShortConvSpec, state: SlotLayer) -> Hidden:
        return super().short_conv(batch, x, spec, unkept(batch, state))

    def gated_delta(self, batch: ForwardBatch, x: Hidden, spec: GatedDeltaSpec, state: SlotLayer) -> Hidden:
        return super().gated_delta(batch, x, spec, unkept(batch, state))

    def mamba2(self, batch: ForwardBatch, x: Hidden, spec: Mamba2Spec, state: SlotLayer) -> Hidden:
        return super().mamba2(batch, x, spec, unkept(batch, state))


class Reversed(CpuBackend):
    """Takes the newest position for the oldest."""

    def short_conv(self, batch: ForwardBatch, x: Hidden, spec: ShortConvSpec, state: SlotLayer) -> Hidden:
        return super().short_conv(batch, x, replace(spec, weight=spec.weight.flip(0).contiguous()), state)

    def gated_delta(self, batch: ForwardBatch, x: Hidden, spec: GatedDeltaSpec, state: SlotLayer) -> Hidden:
        return super().gated_delta(batch, x, replace(spec, conv=spec.conv.flip(0).contiguous()), state)

    def mamba2(self, batch: ForwardBatch, x: Hidden, spec: Mamba2Spec, state: SlotLayer) -> Hidden:
        return super().mamba2(batch, x, replace(spec, conv=spec.conv.flip(0).contiguous()), state)


class Grouped(CpuBackend):
    """Reads the keys of other heads."""

    def gated_delta(self, batch: ForwardBatch, x: Hidden, spec: GatedDeltaSpec, state: SlotLayer) -> Hidden:
        return super().gated_delta(batch, x, replace(spec, tiled=False), state)


def failed(backend: cuda_backend.CudaBackend | CpuBackend, name: str) -> set[str]:
    return {check.test for check in check_state(backend, name) if not check.passed}


@pytest.mark.parametrize("name", STATES)
def test_the_cpus_kernels_pass(name: str) -> None:
    checks = list(check_state(CpuBackend(1), name))
    assert [check.test for check in checks] == ["prompt", "1 token", "batch"]
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("name", [CONV, DELTA, MAMBA])
@pytest.mark.parametrize(("backend", "wrong"), [(Forgetful, {"1 token", "batch"}), (Reversed, {"prompt"})])
def test_a_wrong_state_is_seen(backend: type[CpuBackend], wrong: set[str], name: str) -> None:
    assert failed(backend(1), name) >= wrong


def test_another_order_of_heads_is_seen() -> None:
    assert failed(Grouped(1), DELTA) == {"prompt", "1 token", "batch"}


@pytest.mark.cuda_kernel
def test_the_gpus_kernels_pass_and_a_damaged_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    assert failed(cuda_backend.CudaBackend(device), DELTA) == set()
    carry = launches.carry_by_chunks

    def without_reach(step, qkv, gates, matrices, *rest):  # type: ignore[no-untyped-def]
        carry(step, qkv, gates, (matrices[0], matrices[1].zero_()), *rest)

    monkeypatch.setattr(launches, "carry_by_chunks", without_reach)
    assert failed(cuda_backend.CudaBackend(device), DELTA) == {"prompt"}
