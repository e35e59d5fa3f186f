"""Choosing a token in compiled code: the definition's token, whatever the logits and settings."""

import math
from typing import Any

import numpy as np
import pytest

from quengine.kernels import sampling
from quengine.kernels.cpu.ops import sampling as cpu_sampling
from quengine.kernels.sampling import Choose, Logits


def token_of(choose: Choose, logits: Logits, settings: dict[str, Any]) -> int | None:
    try:
        return choose(logits, **settings)
    except sampling.NoCandidateError:
        return None


@pytest.mark.parametrize("seed", range(6))
def test_the_token_is_that_of_the_definition(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    banned = 0
    for trial in range(300):
        count = int(numbers.integers(2, 1500))
        logits = (numbers.standard_normal(count) * numbers.choice([0.01, 1, 30])).astype(np.float32)
        if trial % 3 == 0:
            logits = np.round(logits)  # many are equal, among them 0 and -0
        if trial % 5 == 0:
            logits[numbers.integers(0, count, 2 * count)] = -math.inf
        settings = {
            "top_k": int(numbers.integers(1, 150)),
            "typical_p": float(numbers.choice([1.0, 1.0, 0.7])),
            "top_p": float(numbers.choice([1.0, 0.95, 0.5, 1e-9, 0.0])),
            "min_p": float(numbers.choice([0.0, 0.05, 1.0, 1e-30])),
            "temperature": float(numbers.choice([0.0, 0.8, 1.0, 1e-3, 100.0, 1e-310])),
            "uniform": float((numbers.integers(0, 2**32) + 0.5) / 2**32),
        }
        expected = token_of(sampling.sample, logits, settings)
        assert token_of(cpu_sampling.sample, logits, settings) == expected, settings
        banned += expected is None
    assert banned < 60


def test_of_equal_logits_the_lower_ids_are_kept_and_a_banned_vocabulary_has_no_token() -> None:
    settings = {"typical_p": 1.0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
    equal = np.zeros(300, dtype=np.float32)
    drawn = {cpu_sampling.sample(equal, top_k=3, uniform=(i + 0.5) / 30, **settings) for i in range(30)}
    assert drawn == {0, 1, 2}
    with pytest.raises(sampling.NoCandidateError):
        cpu_sampling.sample(np.full(200, -math.inf, dtype=np.float32), top_k=40, uniform=0.5, **settings)


def test_extreme_draws_stay_within_the_candidates() -> None:
    logits = np.linspace(-3, 3, 999, dtype=np.float32)
    settings = {"top_k": 128, "typical_p": 1.0, "top_p": 0.999, "min_p": 0.0, "temperature": 2.0}
    for uniform in (0.5 / 2**32, 1 - 0.5 / 2**32):
        expected = sampling.sample(logits, uniform=uniform, **settings)
        assert cpu_sampling.sample(logits, uniform=uniform, **settings) == expected
