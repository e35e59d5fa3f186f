"""Applies a request's samplers, one after the other, to the logits of a position, and draws a token."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from quengine.kernels import sampling
from quengine.kernels.sampling import Floats, Ids, Logits
from quengine.request.sampling_params import SamplingParams
from quengine.sampling_chain.dry import Breakers, Dry
from quengine.sampling_chain.pool import LEAST_TEMPERATURE, CandidatePool, Infill

_MEASURED = 100
"""The number of candidates from which version 1 estimates how fast the probabilities decrease."""


class Mirostat:
    """Mirostat (Basu et al., 2021): keeps the surprise of the chosen tokens near a target, in two versions.

    The bound on the surprise begins at twice the target, and changes with each chosen token.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._position = -1
        self._before = self.mu = 2 * params.mirostat_tau

    def reset(self) -> None:
        """Prepares for positions that come again with other tokens."""
        self._position = -1

    def kept(self, gaps: Floats, mass: Ids, position: int) -> int:
        """How many of the first candidates for the token at `position` are kept.

        gaps [C]: the largest logit minus each logit, at the temperature. mass [C]: the probabilities, with any sum.
        """
        if position == self._position:  # chosen once more
            self.mu = self._before
        self._position, self._before = position, self.mu
        if self._params.mirostat == 2:
            with np.errstate(divide="ignore"):
                return max(1, int(np.count_nonzero(-np.log2(mass / int(mass.sum())) <= self.mu)))
        return self._estimated(gaps)

    def observe(self, probability: float) -> None:
        """Adjusts the bound, given the probability that the chosen token had among those kept."""
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


Penalize = Callable[[Logits, Seq[int]], Logits]


class Choice(NamedTuple):
    """The chosen token, and the candidates that it was drawn from, most likely first; `mass` has any sum."""

    token: int
    ids: Ids
    mass: Ids


class SamplerChain:
    """Chooses the tokens of one sequence.

    Args:
        params: see `SamplingParams.order`; bias has been applied.
        penalize: applies the penalties to logits [V], given a history.
        breakers: the sequence breakers of DRY; None where it is off.
        infill: the sampler of this name; None where it is off.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        penalize: Penalize,
        breakers: Breakers | None,
        infill: Infill | None,
    ) -> None:
        assert breakers is not None or "dry" not in params.order
        assert infill is not None or "infill" not in params.order
        self._params = params
        self._penalize = penalize
        self._dry = None if breakers is None else Dry(params, breakers)
        self._infill = infill
        self._mirostat = Mirostat(params, vocab_size) if params.mirostat else None

    def reset_history(self) -> None:
        """Drops the last history: the next one may be as long, but different. Mirostat's bound stays."""
        if self._dry is not None:
            self._dry.reset()
        if self._mirostat is not None:
            self._mirostat.reset()

    def choose(
        self, logits: Logits, history: Seq[int], position: int, uniform: float, chance: float
    ) -> Choice:
        """The token at `position`, given the `logits` [V] there (finite or -inf) and the tokens before it.

        `uniform`, in (0, 1), draws the token; `chance`, in (0, 1), decides whether XTC is applied.

        Raises:
            NoCandidateError: every token is banned.
        """
        pool = CandidatePool(logits)
        for name in self._params.order:
            self._apply(name, pool, history, chance)
        ids, scores = pool.candidates()
        mass = pool.masses()
        if self._mirostat is not None:
            gaps = (scores[0] - scores[: len(mass)]) / max(pool.temperature, LEAST_TEMPERATURE)
            mass = mass[: self._mirostat.kept(gaps, mass, position)]
        index = sampling.drawn(mass, uniform)
        if self._mirostat is not None:
            self._mirostat.observe(int(mass[index]) / int(mass.sum()))
        return Choice(int(ids[index]), ids[: len(mass)], mass)

    def _apply(self, name: str, pool: CandidatePool, history: Seq[int], chance: float) -> None:
        """Applies one sampler, unless it is off."""
        params = self._params
        match name:
            case "penalties":
                pool.change(lambda logits: self._penalize(logits, history))
            case "dry" if self._dry is not None:
                ids, losses = self._dry.penalties(history)
                if len(ids):
                    pool.change(lambda logits: sampling.add_logit_bias(logits, ids, -losses))
            case "top_n_sigma":
                pool.top_n_sigma(params.top_n_sigma)
            case "top_k":
                pool.top_k(params.top_k)
            case "typ_p":
                pool.cut(sampling.keep_typical_p, params.typical_p)
            case "top_p":
                pool.cut(sampling.keep_top_p, params.top_p)
            case "min_p":
                pool.cut(sampling.keep_min_p, params.min_p)
            case "xtc" if chance <= params.xtc_probability:
                pool.xtc(params.xtc_threshold)
            case "infill" if self._infill is not None:
                pool.infill(self._infill)
            case "temperature":
                spread = 0.0 if params.mirostat else params.dynatemp_range
                pool.set_temperature(params.temperature, spread, params.dynatemp_exponent)
