"""The tokens that a chain of samplers has left of one position's logits, and what each sampler does to them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quengine.kernels import sampling
from quengine.kernels.sampling import Candidates, Floats, Ids, Logits, NoCandidateError

_COMPARED = 128
"""Candidates whose bytes are compared, the likeliest ones: the others are far from a fifth."""
_LEAST = 0.2


@dataclass(frozen=True)
class Infill:
    """The sampler `infill` of llama.cpp, for a gap in a text: it ends early rather than write much that is uncertain.

    1. Where the end tokens together are likely, against all else and the number of candidates, one of them comes.
    2. A token whose bytes another one begins with is counted with the likelier of both.
    3. Of the others those stay that then have a fifth of the probability, and among them their share; where there are
       none, an end token comes.

    Probabilities decide what stays; the draw is from the logits as they were (llama.cpp, llama_sampler_infill).

    `ends`: the model's end tokens. `shown`: the bytes of a token id, none of a control token.
    """

    ends: frozenset[int]
    shown: Callable[[int], bytes]

    def kept(self, ranked: Candidates, count: int, logits: Logits) -> Candidates:
        """The candidates that are kept of the `count` ranked ones. `logits` [V] show which end tokens are not
        banned."""
        mass = sampling.masses(ranked.logits[0] - ranked.logits, sampling.sharpness(1.0))
        p = mass / int(mass.sum())
        end = np.isin(ranked.ids, list(self.ends))
        if 3 * p[end].sum() * count > p[~end].sum():
            return Candidates(ranked.ids[end], ranked.logits[end])
        p = self._joined(ranked, p)
        kept = end | (p >= _LEAST)
        texts = int(np.count_nonzero(kept & ~end))
        if texts == 0:
            return self._ended(logits) or Candidates(ranked.ids[:1], ranked.logits[:1])
        kept &= end | (p / p[kept].sum() >= 1 / (texts + 1))
        return Candidates(ranked.ids[kept], ranked.logits[kept])

    def _joined(self, ranked: Candidates, p: Floats) -> Floats:
        """The probabilities, where one of two tokens has those of both if the other begins with it; 0 is gone."""
        p = p.copy()
        texts = [self.shown(token) for token in ranked.ids[:_COMPARED].tolist()]
        for one, text in enumerate(texts):
            for other, longer in enumerate(texts):
                if p[one] == 0:
                    break
                if text and one != other and p[other] > 0 and longer.startswith(text):
                    likelier, gone = (other, one) if p[other] > p[one] else (one, other)
                    p[likelier] += p[gone]
                    p[gone] = 0
        return p

    def _ended(self, logits: Logits) -> Candidates | None:
        """The likeliest end token; None where all are banned."""
        ends = np.array(sorted(self.ends), dtype=np.int64)
        allowed = ends[logits[ends] > -np.inf]
        best = allowed[np.argsort(-logits[allowed], kind="stable")][:1]
        return Candidates(best, logits[best].astype(np.float64)) if len(best) else None


LEAST_TEMPERATURE = 1e-30
"""A lower one, but 0, divides as this does."""
_FP32_MAX = float(np.finfo(np.float32).max)


class CandidatePool:
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
        """Drop all but the least likely of the tokens that are at least this likely (XTC, p-e-w)."""
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
