"""The candidates that a chain of samplers has kept for one position, and how each sampler changes them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quengine.kernels import sampling
from quengine.kernels.sampling import Candidates, Floats, Ids, Logits, NoCandidateError

_COMPARED = 128
"""The number of likeliest candidates whose bytes are compared; the probabilities of others are far below a fifth."""
_LEAST = 0.2


@dataclass(frozen=True)
class Infill:
    """The sampler `infill` of llama.cpp, for a gap in a text: it ends early rather than write much that is uncertain.

    1. Only end tokens are kept if all of them together are likely enough, given the number of candidates.
    2. If the bytes of one token begin those of another, the likelier of both gets the probability of both.
    3. A token other than an end token is kept if it then has at least a fifth of the probability, and at least an equal
       share among those kept. If there are none, an end token is kept.

    Probabilities decide which tokens are kept; the draw is from the unchanged logits (llama.cpp, llama_sampler_infill).

    `ends`: the model's end tokens. `shown`: the bytes of a token id; a control token has none.
    """

    ends: frozenset[int]
    shown: Callable[[int], bytes]

    def kept(self, ranked: Candidates, count: int, logits: Logits) -> Candidates:
        """The candidates that are kept. count: the number of ranked ones. logits [V]: show which end tokens are
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
        """The probabilities after step 2; a token whose probability went to another one has 0."""
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
"""The least temperature that divides logits; a lower one, except 0, counts as this."""
_FP32_MAX = float(np.finfo(np.float32).max)


class CandidatePool:
    """All tokens of a vocabulary, until a sampler ranks them; then the candidates.

    Attributes:
        count: the number of tokens as llama.cpp counts them, with banned ones (-inf) until a sampler drops them.
        temperature: the divisor that is still to be applied to the logits; 0 leaves only the first candidate.
    """

    def __init__(self, logits: Logits) -> None:
        """`logits` [V]: finite, or -inf."""
        self.count = len(logits)
        self.temperature = 1.0
        self._given = self._logits = logits
        self._ranked: Candidates | None = None

    def at_temperature(self) -> Candidates:
        """The ranked candidates, with their logits divided by the temperature. Raises NoCandidateError."""
        ranked = self.candidates()
        temperature, self.temperature = self.temperature, 1.0
        if temperature == 0:
            ranked = Candidates(ranked.ids[:1], ranked.logits[:1])
        elif temperature != 1:
            ranked = Candidates(ranked.ids, ranked.logits / max(temperature, LEAST_TEMPERATURE))
        self._ranked = ranked
        return ranked

    def candidates(self, k: int = 0) -> Candidates:
        """The ranked candidates before the temperature; k > 0: only the first k are needed. Raises NoCandidateError."""
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
        """Applies `change` to logits [V], for penalties and the like. Tokens that are no candidates stay at -inf."""
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
        """Keeps some of the candidates, by `keep`, one of the samplers of `kernels.sampling`."""
        self._ranked = keep(self.at_temperature(), p)
        self.count = len(self._ranked.ids)

    def infill(self, infill: Infill) -> None:
        """Keeps the candidates that may fill a gap."""
        self._ranked = infill.kept(self.at_temperature(), self.count, self._given)
        self.count = len(self._ranked.ids)

    def top_n_sigma(self, n: float) -> None:
        """Drops tokens whose logits are more than n standard deviations below the largest (Tang et al., 2024)."""
        if self.count > 1:
            self.change(lambda logits: _top_n_sigma(logits, n))

    def xtc(self, threshold: float) -> None:
        """Drops all but the least likely of the tokens whose probability is at least `threshold` (XTC, p-e-w)."""
        ranked = self.at_temperature()
        mass = sampling.masses(ranked.logits[0] - ranked.logits, sampling.sharpness(1.0))
        dropped = max(0, int(np.count_nonzero(mass >= threshold * int(mass.sum()))) - 1)
        self._ranked = Candidates(ranked.ids[dropped:], ranked.logits[dropped:])
        self.count -= dropped

    def set_temperature(self, temperature: float, spread: float, exponent: float) -> None:
        """Sets the divisor of the logits. With `spread` > 0 it lies within temperature +- spread, and is higher the
        higher the entropy is (entropy-based dynamic temperature, kalomaze)."""
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
