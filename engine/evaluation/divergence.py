"""How far a model's predictions are from another's, token by token: b measured against a.

The values for each scored token are its log-probability in both, the Kullback-Leibler divergence of b's prediction from
a's, `sum p_a (log p_a - log p_b)` in nats, and whether both have the same most likely token.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quengine.scoring.perplexity import Estimate

if TYPE_CHECKING:
    from torch import Tensor

Numbers = NDArray[np.float64]

STORED_LEAST = -16.0
"""Log-probabilities in llama-perplexity's files end here: what is stored is larger, or counts as none."""

KL_POINTS = {"median": 50.0, "90%": 90.0, "95%": 95.0, "99%": 99.0, "99.9%": 99.9}
"""Percentiles of the divergence that are reported."""

_SPANS = 8
"""Spans of positions that are reported."""


@dataclass(frozen=True)
class TokenRows:
    """Values of n tokens, fp64 [n] each: negative log-probabilities, divergence, and 1 where the most likely token is
    the same, else 0."""

    nll_a: Numbers
    nll_b: Numbers
    kl: Numbers
    same_top: Numbers

    @classmethod
    def joined(cls, parts: "Iterable[TokenRows]") -> "TokenRows":
        """The tokens of all parts, in order."""
        columns = zip(*((part.nll_a, part.nll_b, part.kl, part.same_top) for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))


def rows_of_logits(a: "Tensor", b: "Tensor", targets: Seq[int]) -> TokenRows:
    """The values of tokens `targets`, given both models' logits for them, fp32 [n, vocab], which are overwritten."""
    import torch

    ids = torch.tensor(targets, device=b.device)[:, None]
    same = a.argmax(-1) == b.argmax(-1)
    norms, chosen = list["Tensor"](), list["Tensor"]()
    for logits in (a, b):
        logits.sub_(logits.amax(-1, keepdim=True))
        norms.append(logits.exp().sum(-1, dtype=torch.float64))
        chosen.append(logits.gather(1, ids)[:, 0].double() - norms[-1].log())
    # sum p_a (a - b), then the difference of the normalizers: a and b are near each other, so little cancels
    apart = (a - b).mul_(a.exp_()).sum(-1, dtype=torch.float64) / norms[0]
    kl = apart + norms[1].log() - norms[0].log()
    return _on_host(-chosen[0], -chosen[1], kl, same)


def rows_of_stored(a: "Tensor", b: "Tensor", targets: Seq[int]) -> TokenRows:
    """As `rows_of_logits`; a has log-probabilities as llama-perplexity's file has them."""
    import torch

    ids = torch.tensor(targets, device=b.device)[:, None]
    same = a.argmax(-1) == b.argmax(-1)
    b.sub_(b.amax(-1, keepdim=True))
    log_norm = b.exp().sum(-1, dtype=torch.float64).log()
    nll_b = log_norm - b.gather(1, ids)[:, 0].double()
    shares = torch.where(a > STORED_LEAST, a.exp(), 0)
    kl = (a - b).mul_(shares).sum(-1, dtype=torch.float64) + log_norm * shares.sum(-1, dtype=torch.float64)
    return _on_host(-a.gather(1, ids)[:, 0].double(), nll_b, kl, same)


def _on_host(*columns: "Tensor") -> TokenRows:
    return TokenRows(*(column.double().cpu().numpy() for column in columns))


@dataclass(frozen=True)
class PositionSpan:
    """Positions `first` .. `last` of the chunks, and the mean divergence there."""

    first: int
    last: int
    kl: Estimate
    same_top: float


@dataclass(frozen=True, eq=False)
class FileDivergence:
    """How far model `b` is from model `a` on a text, or on as much of it as was computed so far.

    Attributes:
        tokens: values of each scored token, chunk by chunk.
        chunks, total_chunks: computed, and of the text. ctx: tokens of a chunk.
        seconds: time of the computation, without loading.
    """

    a: str
    b: str
    tokens: TokenRows
    chunks: int
    total_chunks: int
    ctx: int
    seconds: float

    @property
    def perplexity_a(self) -> Estimate:
        return mean_of(self.tokens.nll_a).exponential

    @property
    def perplexity_b(self) -> Estimate:
        return mean_of(self.tokens.nll_b).exponential

    @property
    def log_ratio(self) -> Estimate:
        """ln(perplexity of b / perplexity of a). Its error is that of the tokens' differences."""
        return mean_of(self.tokens.nll_b - self.tokens.nll_a)

    @property
    def correlation(self) -> float:
        """The correlation of the log-probabilities of both models."""
        a, b = self.tokens.nll_a, self.tokens.nll_b
        deviation = float(a.std() * b.std())
        covariance = float(((a - a.mean()) * (b - b.mean())).mean())
        return covariance / deviation if deviation else 1.0

    @cached_property
    def kl(self) -> Estimate:
        """The mean divergence, in nats."""
        return mean_of(self.tokens.kl)

    @cached_property
    def kl_points(self) -> dict[str, float]:
        """Percentiles of the divergence of tokens, and the largest one."""
        points = np.percentile(self.tokens.kl, list(KL_POINTS.values())).tolist()
        return dict(zip(KL_POINTS, points, strict=True)) | {"max": float(self.tokens.kl.max())}

    @property
    def p_change(self) -> Numbers:
        """The change of each token's probability, p_b - p_a."""
        return np.asarray(np.exp(-self.tokens.nll_b) - np.exp(-self.tokens.nll_a))

    @property
    def p_change_mean(self) -> Estimate:
        return mean_of(self.p_change)

    @property
    def p_change_rms(self) -> Estimate:
        """The root mean square of the change of the probability."""
        squares = mean_of(self.p_change**2)
        root = math.sqrt(squares.value)
        return Estimate(root, squares.error / (2 * root) if root else 0.0)

    @property
    def same_top(self) -> Estimate:
        """The share of tokens for which both have the same most likely token."""
        share, count = float(self.tokens.same_top.mean()), len(self.tokens.same_top)
        return Estimate(share, math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else 0.0)

    @property
    def by_position(self) -> list[PositionSpan]:
        """The divergence by the position in a chunk."""
        count = len(self.tokens.kl) // self.chunks
        kl, same = (each.reshape(self.chunks, count) for each in (self.tokens.kl, self.tokens.same_top))
        first = self.ctx - count
        bounds = np.linspace(0, count, min(_SPANS, count) + 1).round().astype(int).tolist()
        return [
            PositionSpan(
                *(first + low, first + high - 1),
                *(mean_of(kl[:, low:high].ravel()), float(same[:, low:high].mean())),
            )
            for low, high in pairwise(bounds)
        ]

    @property
    def seconds_left(self) -> float:
        """Time that the remaining chunks take at this speed."""
        return self.seconds * (self.total_chunks - self.chunks) / self.chunks

    def as_dict(self) -> dict[str, Any]:
        """All but the values of tokens, for JSON."""
        pairs = (
            "perplexity_a",
            "perplexity_b",
            "log_ratio",
            "kl",
            "p_change_mean",
            "p_change_rms",
            "same_top",
        )
        found: dict[str, Any] = {"a": self.a, "b": self.b, "tokens": len(self.tokens.kl)}
        for name in pairs:
            estimate: Estimate = getattr(self, name)
            found |= {name: estimate.value, f"{name}_error": estimate.error}
        found |= {"correlation": self.correlation, "kl_points": self.kl_points}
        found["by_position"] = [
            {"first": span.first, "last": span.last, "kl": span.kl.value, "kl_error": span.kl.error}
            | {"same_top": span.same_top}
            for span in self.by_position
        ]
        return found | {"chunks": self.chunks, "ctx": self.ctx, "seconds": self.seconds}


def mean_of(values: Numbers) -> Estimate:
    """The mean of these values with its error."""
    count = len(values)
    error = float(values.std()) / math.sqrt(count - 1) if count > 1 else 0.0
    return Estimate(float(values.mean()), error)
