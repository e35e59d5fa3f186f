"""Collective operations between the ranks that share a model, and the trivial group of one rank.

Sums are taken in rank order on every rank, so that all ranks have the same bits, and in the same way for each element
wherever it is in the tensor: a row's result does not depend on the rows beside it.
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
        """The sum of x over the ranks, `((x_0 + x_1) + x_2) + ...`; may overwrite x, or last until the next call."""
        ...

    def peers(self, rows: int, width: int) -> Any:
        """The arguments of a kernel that sums [rows, width] itself, in rank order (kernels/cuda/ranks/peers.py).

        None if the sum has to be left to `all_reduce`.
        """
        ...

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks side by side: x [T, widths[rank]] of each rank, [T, sum(widths)] on all."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Copies rank `source`'s x to all ranks, in place."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Sends x to one other rank, which calls `receive`."""
        ...

    def receive(self, x: Tensor, source: int) -> None:
        """Receives rank `source`'s tensor, of x's shape and dtype, into x."""
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
        """Nothing to do: it is here already."""

    def send(self, x: Tensor, to: int) -> None:
        """Nothing to do: there is no other rank."""

    def receive(self, x: Tensor, source: int) -> None:
        """Nothing to do: there is no other rank."""


ONE_RANK = OneRank()


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """`((x_0 + x_1) + x_2) + ...`, written over x_0: the definition of `Communicator.all_reduce`."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def side_by_side(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """The first `widths[i]` columns of each part i, side by side: the definition of `all_gather`."""
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
