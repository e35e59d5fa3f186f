"""The self-test of operations with a state passes on the CPU, and sees a step that reads or keeps the wrong rows."""

from dataclasses import replace

import pytest

from quengine.diagnostics.selftest.self_test_states import STATES, check_state
from quengine.kernels.backend import Hidden, SlotLayer
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.short_conv import ShortConvSpec


class Forgetful(CpuBackend):
    """Keeps nothing of a prompt."""

    def short_conv(self, batch: ForwardBatch, x: Hidden, spec: ShortConvSpec, state: SlotLayer) -> Hidden:
        kept = SlotLayer(tuple(part.clone() for part in state.parts)) if batch.phase == "prefill" else state
        return super().short_conv(batch, x, spec, kept)


class Reversed(CpuBackend):
    """Takes the newest position for the oldest."""

    def short_conv(self, batch: ForwardBatch, x: Hidden, spec: ShortConvSpec, state: SlotLayer) -> Hidden:
        return super().short_conv(batch, x, replace(spec, weight=spec.weight.flip(0).contiguous()), state)


@pytest.mark.parametrize("name", STATES)
def test_the_cpus_kernels_pass(name: str) -> None:
    checks = list(check_state(CpuBackend(1), name))
    assert [check.test for check in checks] == ["prompt", "1 token", "batch"]
    assert all(check.passed for check in checks)


@pytest.mark.parametrize(("backend", "wrong"), [(Forgetful, {"1 token", "batch"}), (Reversed, {"prompt"})])
def test_a_wrong_state_is_seen(backend: type[CpuBackend], wrong: set[str]) -> None:
    failed = {check.test for check in check_state(backend(1), STATES[0]) if not check.passed}
    assert failed >= wrong
