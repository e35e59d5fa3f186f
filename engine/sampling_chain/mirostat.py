"""Mirostat (Basu et al., 2021): keeps the surprise of the chosen tokens near a target, in two versions."""

import math

import numpy as np

from quengine.kernels.sampling import Floats, Ids
from quengine.request.sampling_params import SamplingParams

_MEASURED = 100
"""Candidates from which version 1 estimates how the probabilities fall off."""


class Mirostat:
    """The bound on the surprise, which changes with each chosen token. Begins at twice the target."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._position = -1
        self._before = self.mu = 2 * params.mirostat_tau

    def reset(self) -> None:
        """Positions may come again, for other tokens."""
        self._position = -1

    def kept(self, gaps: Floats, mass: Ids, position: int) -> int:
        """How many of the first candidates for the token at `position` are kept.

        gaps [C]: the largest logit less each, at the temperature; mass [C]: their probabilities, with any sum.
        """
        if position == self._position:  # chosen once more
            self.mu = self._before
        self._position, self._before = position, self.mu
        if self._params.mirostat == 2:
            with np.errstate(divide="ignore"):
                return max(1, int(np.count_nonzero(-np.log2(mass / int(mass.sum())) <= self.mu)))
        return self._estimated(gaps)

    def observe(self, probability: float) -> None:
        """The token that was chosen had this probability among those kept."""
        self.mu -= self._params.mirostat_eta * (-math.log2(probability) - self._params.mirostat_tau)

    def _estimated(self, gaps: Floats) -> int:
        """Version 1: the exponent of Zipf's law by least squares, and the number of tokens of such surprise."""
        if len(gaps) < 2:
            return 1
        drops = np.diff(gaps[:_MEASURED])
        steps = np.log1p(1 / np.arange(1, len(drops) + 1))
        with np.errstate(all="ignore"):
            slope = np.sum(steps * drops) / np.sum(steps * steps)
            excess = slope - 1
            tokens = (excess * np.exp2(self.mu) / (1 - np.float64(self._vocab_size) ** -excess)) ** (
                1 / slope
            )
        return 1 if math.isnan(tokens) else max(1, int(min(tokens, len(gaps))))
