"""One adapter's change of one matrix, as files, weights and kernels have it. It needs no torch to be imported."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

MOST_SCALE = 1e9
"""Largest scale of an adapter, and largest alpha / r: their product is far within fp32."""

_MOST = 2.0**127
"""Near the largest number of fp32."""


class LowRank(NamedTuple):
    """What is added to a matrix [rows, columns]: scale * b @ a.

    a: fp32 [r, columns]. b: fp32 [rows, r]. For a tensor of experts [E, rows, columns], both have a first dimension E.
    scale: alpha / r, or what else the adapter's format says. The token embedding is such a matrix, [vocabulary, width]:
    a row of `b` times `a` changes a row of it.
    """

    a: "Tensor"
    b: "Tensor"
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[-2])

    def of_rows(self, first: int, count: int) -> "LowRank":
        """The change of `count` rows of the matrix from row `first` on; `first` is taken modulo its number of rows."""
        first %= len(self.b)
        return self._replace(b=self.b[first : first + count])

    def delta(self) -> "Tensor":
        """What is added, fp32, in the matrix's shape."""
        return self.scale * (self.b @ self.a)

    def problem(self) -> str | None:
        """Why the change is unusable, or None: numbers that are not finite or may overflow fp32."""
        if not bool(self.a.isfinite().all() and self.b.isfinite().all()):
            return "has weights that are not finite"
        if not abs(self.scale) <= MOST_SCALE:
            return f"a scale (alpha / r) of {self.scale:g} is not from -1e9 to 1e9"
        most = abs(self.scale) * self.rank  # alpha, which files hold in fp32 too
        for half in (self.a, self.b):
            most *= max(1.0, float(half.abs().max()))
        return None if most < _MOST else f"scale {self.scale:g}: its product with the weights overflows fp32"
