"""Embeddings: the hidden rows of a text pooled into one vector of unit length, or as they are."""

from typing import TYPE_CHECKING, Literal, get_args

from quengine.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

Pooling = Literal["mean", "last", "none"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


def default_pooling(own: str | None) -> Pooling:
    """How texts are pooled where nobody says: as the model was made for (`ModelConfig.pooling`), or by their mean.

    Raises:
        EngineError: its own is one that there is not.
    """
    found = next((pooling for pooling in POOLINGS if pooling == (own or "mean")), None)
    if found is None:
        raise EngineError(
            f"pooling: this model was made for {own!r}, which is not supported; ask for mean or last"
        )
    return found


def with_end(ids: list[int], end: int | None) -> list[int]:
    """A text's ids with the end token, where the model wants one (`Tokenizer.end_of_text`) and they have it not."""
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


_STEPS = 2.0**40
"""Rows are summed in steps of 2^-40, and hold numbers below 2^40: both sums of 2^20 of them fit 64 bits."""


class Pool:
    """Takes a text's hidden rows chunk by chunk, and pools them: their mean, or the last one; `none` keeps them all.

    The mean is summed in whole numbers, so that it is the same to the last bit however the rows come.

    Raises:
        EngineError: a pooling that there is not.
    """

    def __init__(self, pooling: Pooling) -> None:
        if pooling not in POOLINGS:
            raise EngineError(f"pooling {pooling!r}: must be {' or '.join(POOLINGS)}")
        self.pooling = pooling
        self._last: Tensor | None = None
        self._sums: Tensor | None = None
        self._rows: list[Tensor] = []

    def clear(self) -> None:
        """Drop the rows: they will come again from the first."""
        self._last = self._sums = None
        self._rows.clear()

    def add(self, rows: "Tensor") -> None:
        """The next rows [T, n], on any device.

        Raises:
            EngineError: they are not finite, or as good as that.
        """
        from torch import stack

        rows = (rows[-1:] if self.pooling == "last" else rows).double()
        if not bool((rows.abs() < _STEPS).all()):
            raise EngineError(
                "the model's hidden values are not finite: its weights are damaged, or overflow"
            )
        if self.pooling == "last":
            self._last = rows[0].cpu()
            return
        if self.pooling == "none":
            self._rows.append(rows.cpu())
            return
        whole = rows.round()
        sums = stack((whole, ((rows - whole) * _STEPS).round())).long().sum(1).cpu()
        self._sums = sums if self._sums is None else self._sums + sums

    def embedding(self) -> list[float]:
        """The vector [n], of length 1 (of length 0 if all is zero); without pooling the rows [T * n]."""
        from torch import cat
        from torch.nn.functional import normalize

        if self.pooling == "none":
            rows: list[float] = cat(self._rows).flatten().tolist()
            return rows
        pooled = self._last
        if self._sums is not None:
            whole, steps = self._sums.double()
            pooled = whole + steps / _STEPS
        assert pooled is not None, "no rows were pooled"
        unit: list[float] = normalize(pooled, dim=0).tolist()
        return unit
