"""Latent attention on the CPU against the definition in fp64: results, and the rows that are cached."""

import pytest
import torch

from quengine.errors import CannotRunError
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.kv.cache_types import CacheType
from tests.kernels.latent_steps import STEPS, Case
from tests.kernels.weights import nmse

LIMIT = 1e-7


def difference(case: Case) -> float:
    backend, layer = CpuBackend(2), case.held(torch.device("cpu"))
    spec = case.spec(backend)
    backend.check_latent(spec)
    y = backend.latent_attention(case.batch, case.q.clone(), case.latent.clone(), spec, layer)
    wanted, after = case.expected()
    for ours, theirs in zip(layer.tensors, after.tensors, strict=True):
        last_place = 1.0 if ours.dtype == torch.int8 else 1e-3
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-3, atol=last_place)
    return nmse(y, wanted)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_steps_are_those_of_the_definition(step: str, cache_type: CacheType) -> None:
    assert difference(Case(STEPS[step], cache_type)) < LIMIT


@pytest.mark.parametrize("step", ["tokens", "chunks"])
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_rows_wider_than_a_block(step: str, cache_type: CacheType) -> None:
    """As released models have them: kernels with more room."""
    case = Case(STEPS[step], cache_type, "Q5_0", heads=5, rank=512, rotated=64, halves=True, hot=True)
    assert difference(case) < LIMIT


def test_wider_rows_are_refused() -> None:
    backend, case = CpuBackend(1), Case(STEPS["a token"], rank=640)
    with pytest.raises(CannotRunError, match="latents of 640 and 32 rotated elements are not supported"):
        backend.check_latent(case.spec(backend))
