"""Embeddings: the hidden rows of a text pooled into one vector of unit length.

Knows rows and sums; not which model or kernel gave them.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from quengine.errors import EngineError

Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class Pool:
    """Takes a text's hidden rows chunk by chunk, and pools them: their mean, or the last one.

    Raises:
        EngineError: a pooling that there is not.
    """

    def __init__(self, pooling: Pooling) -> None:
        if pooling not in POOLINGS:
            raise EngineError(f"pooling {pooling!r}: must be {' or '.join(POOLINGS)}")
        self.pooling = pooling
        self._pooled: Tensor | None = None

    def clear(self) -> None:
        """Forget the rows: they will come again from the first."""
        self._pooled = None

    def add(self, rows: Tensor) -> None:
        """The next rows [T, n], on any device; summed in fp64, so that the chunks hardly matter.

        Raises:
            EngineError: they are not finite.
        """
        part = rows[-1].double() if self.pooling == "last" else rows.double().sum(0)
        part = part.cpu()
        if not torch.isfinite(part).all():
            raise EngineError(
                "the model's hidden values are not finite: its weights are damaged, or overflow"
            )
        before = self._pooled
        self._pooled = part if self.pooling == "last" or before is None else before + part

    def embedding(self) -> list[float]:
        """The vector [n], of length 1 (of length 0 if all is zero)."""
        assert self._pooled is not None, "no rows were pooled"
        unit: list[float] = torch.nn.functional.normalize(self._pooled, dim=0).tolist()
        return unit
