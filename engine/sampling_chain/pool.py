"""The tokens that a chain of samplers has left of one position's logits, and what each sampler does to them."""

import math
from collections.abc import Callable

import numpy as np

from quengine.kernels import sampling
from quengine.kernels.sampling import Candidates, Ids, Logits, NoCandidateError
from quengine.sampling_chain.infill import Infill

LEAST_TEMPERATURE = 1e-30
"""A lower one, but 0, divides as this does."""
_FP32_MAX = float(np.finfo(np.float32).max)


class Pool:
    """All tokens of a vocabulary, until a sampler ranks them; then the candidates.

    Attributes:
        count: tokens as llama.cpp counts them: those that have been banned (-inf) are among them until a sampler drops
            them.
        temperature: what the logits are still to be divided by; 0 leaves the first candidate.
    """

    def __init__(self, logits: Logits) -> None:
        """`logits` [V]: finite, or -inf."""
        self.count = len(logits)
        self.temperature = 1.0
        self._given = self._logits = logits
        self._ranked: Candidates | None = None

    def at_temperature(self) -> Candidates:
        """What is left, ranked, its logits divided by the temperature. Raises NoCandidateError."""
        ranked = self.candidates()
        temperature, self.temperature = self.temperature, 1.0
        if temperature == 0:
            ranked = Candidates(ranked.ids[:1], ranked.logits[:1])
        elif temperature != 1:
            ranked = Candidates(ranked.ids, ranked.logits / max(temperature, LEAST_TEMPERATURE))
        self._ranked = ranked
        return ranked

    def candidates(self, k: int = 0) -> Candidates:
        """What is left, ranked, before the temperature; k > 0: the first k. Raises NoCandidateError."""
        if self._ranked is None:
            self._ranked = sampling.top_k_candidates(self._logits, k)
        return self._ranked

    def masses(self) -> Ids:
        """The probabilities of `candidates()` at the temperature, int64 [C] with any sum."""
        logits = self.candidates().logits
        if self.temperature == 0:
            return np.ones(1, np.int64)
        return sampling.masses(logits[0] - logits, sampling.sharpness(self.temperature))

    def change(self, change: Callable[[Logits], Logits]) -> None:
        """`change` logits [V], by penalties for example: those that are no candidates are -inf, and remain so."""
        if self._ranked is None and self.temperature == 1:
            self._logits = change(self._logits)
            return
        ids, logits = self.at_temperature()
        spread = np.full(len(self._logits), -np.inf, dtype=np.float32)
        spread[ids] = np.clip(logits, -_FP32_MAX, _FP32_MAX)
        self._ranked = sampling.top_k_candidates(change(spread), 0)

    def top_k(self, k: int) -> None:
        ranked = self.candidates(k)
        if k > 0:
            self._ranked = Candidates(ranked.ids[:k], ranked.logits[:k])
            self.count = min(self.count, k)

    def cut(self, keep: Callable[[Candidates, float], Candidates], p: float) -> None:
        """`keep` some of the candidates, by one of the samplers of `kernels.sampling`."""
        self._ranked = keep(self.at_temperature(), p)
        self.count = len(self._ranked.ids)

    def infill(self, infill: Infill) -> None:
        """Keep what may stand in a gap."""
        self._ranked = infill.kept(self.at_temperature(), self.count, self._given)
        self.count = len(self._ranked.ids)

    def top_n_sigma(self, n: float) -> None:
        """Drop what lies more than n standard deviations of the logits below the largest (Tang et al., 2024)."""
        if self.count > 1:
            self.change(lambda logits: _top_n_sigma(logits, n))

    def xtc(self, threshold: float) -> None:
        """Of the tokens that are at least so likely, drop all but the least likely (XTC, p-e-w)."""
        ranked = self.at_temperature()
        mass = sampling.masses(ranked.logits[0] - ranked.logits, sampling.sharpness(1.0))
        dropped = max(0, int(np.count_nonzero(mass >= threshold * int(mass.sum()))) - 1)
        self._ranked = Candidates(ranked.ids[dropped:], ranked.logits[dropped:])
        self.count -= dropped

    def set_temperature(self, temperature: float, spread: float, exponent: float) -> None:
        """Divide the logits, with `spread` > 0 by a temperature from temperature - spread to temperature + spread, the
        higher the entropy is (Entropy-based dynamic temperature, kalomaze)."""
        if self.temperature != 1 or spread > 0:
            ranked = self.at_temperature()
        if spread > 0:
            if self.count <= 1:
                return
            mass = sampling.masses(ranked.logits[0] - ranked.logits, sampling.sharpness(1.0))
            p = mass[mass > 0] / int(mass.sum())
            share = max(0.0, -float(np.sum(p * np.log(p)))) / math.log(self.count)
            least = max(0.0, temperature - spread)
            temperature = least + (temperature + spread - least) * share**exponent
        self.temperature = temperature


def _top_n_sigma(logits: Logits, n: float) -> Logits:
    left = logits[logits > -math.inf].astype(np.float64)
    if len(left) == 0:
        raise NoCandidateError("every token is banned")
    return np.where(logits < left.max() - n * left.std(), np.float32(-np.inf), logits)
