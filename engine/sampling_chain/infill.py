"""The sampler `infill` of llama.cpp, for a gap in a text: it ends early rather than write much that is uncertain.

1. Where the end tokens together are likely, against all else and the number of candidates, one of them comes.
2. A token whose bytes another one begins with is counted with the likelier of both.
3. Of the others those stay that then have a fifth of the probability, and among them their share; where there are none,
   an end token comes.

Probabilities decide what stays; the draw is from the logits as they were (llama.cpp, llama_sampler_infill).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quengine.kernels import sampling
from quengine.kernels.sampling import Candidates, Floats, Logits

_COMPARED = 128
"""Candidates whose bytes are compared, the likeliest ones: the others are far from a fifth."""
_LEAST = 0.2


@dataclass(frozen=True)
class Infill:
    """`ends`: the model's end tokens. `shown`: the bytes of a token id, none of a control token."""

    ends: frozenset[int]
    shown: Callable[[int], bytes]

    def kept(self, ranked: Candidates, count: int, logits: Logits) -> Candidates:
        """What is left of the `count` candidates. `logits` [V] say which end tokens are not banned."""
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
