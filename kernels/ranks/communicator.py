"""What the ranks that share a model ask of each other, and the group of one rank, which asks nothing.

Sums are taken in the order of the ranks on every rank, so that all hold the same bits, and the same for each element
wherever it lies in the tensor: a row's result does not depend on the rows beside it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Communicator(Protocol):
    """Rank `rank` of `size`. All ranks call the same operations, with tensors of the same shapes, in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, `((x_0 + x_1) + x_2) + ...`; may be written over x, or valid until the next."""
        ...

    def peers(self, rows: int, width: int) -> Any:
        """What a kernel needs that sums so many values itself (kernels/cuda/ranks/peers.py), in the same order; None:
        it has to leave them to `all_reduce`."""
        ...

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks side by side: x [T, widths[rank]] of each, [T, sum(widths)] on all."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """The x of rank `source`, on all ranks, in place."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Give x to one other rank, which calls `receive`."""
        ...

    def receive(self, x: Tensor, source: int) -> None:
        """What rank `source` sends, of x's shape and dtype, into x."""
        ...


class OneRank:
    """The group of a process that computes alone."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def peers(self, _rows: int, _width: int) -> None:
        return None

    def all_gather(self, x: Tensor, _widths: Sequence[int]) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """It is here already."""

    def send(self, x: Tensor, to: int) -> None:
        """There is no other rank."""

    def receive(self, x: Tensor, source: int) -> None:
        """There is no other rank."""


ONE_RANK = OneRank()


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """`((x_0 + x_1) + x_2) + ...`, written over x_0: the definition of `Communicator.all_reduce`."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def side_by_side(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """The first `widths[i]` columns of part i, one part beside the other: the definition of `all_gather`."""
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
