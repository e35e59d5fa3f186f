"""A device that has some of a layer's experts: the definition, and the CPU against it."""

import pytest

from quengine.kernels import cpu
from quengine.kernels.cpu.backend import CpuBackend
from tests.kernels.cuda.weights import nmse, ordinary_activations
from tests.kernels.moe.shares import FORMATS, HIDDEN, REFERENCE, ROUTINGS, SHARES, Share, check


@pytest.mark.parametrize("name", FORMATS)
def test_the_shares_of_a_layer_make_the_whole(name: str) -> None:
    x, routing = 0.1 * ordinary_activations(5, HIDDEN), ROUTINGS["rows"]
    whole = Share(REFERENCE, name, None)(x, routing, "prefill")
    parts = [Share(REFERENCE, name, held)(x, routing, "prefill") for held in SHARES.values()]
    assert nmse(sum(parts[1:], parts[0]), whole) < 1e-24
    none = Share(REFERENCE, name, SHARES["middle"])(x[:1], ROUTINGS["a row, none in the middle"], "prefill")
    assert not none.any()


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", FORMATS)
def test_on_the_cpu(name: str, phase: str, routing: str) -> None:
    for held in SHARES.values():
        check(CpuBackend(cpu.max_threads()), name, held, routing, phase, 5e-8 if phase == "decode" else 2e-6)
