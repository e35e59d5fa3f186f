"""Ranks as threads of one process: the same operations, with a barrier where processes would exchange."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from quengine.kernels.communicator import Communicator, side_by_side, sum_in_order

T = TypeVar("T")


class ThreadCommunicator:
    """Rank `rank` of the threads that share `slots` and `barrier`."""

    def __init__(self, rank: int, slots: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(self._exchange(x))

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        assert x.shape[1] == widths[self.rank]
        return side_by_side(self._exchange(x), widths)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._exchange(x)[0])

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._slots[self.rank] = x.clone()
        self._barrier.wait(30)
        parts = [part.clone() for part in self._slots if part is not None]
        self._barrier.wait(30)
        return parts


def as_ranks(count: int, work: Callable[[Communicator], T]) -> list[T]:
    """What `work` gives on each of `count` ranks that run at once; raises what any of them raises."""
    slots: list[Tensor | None] = [None] * count
    barrier = threading.Barrier(count)
    results: list[T | BaseException | None] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadCommunicator(rank, slots, barrier))
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in sorted(results, key=lambda result: isinstance(result, threading.BrokenBarrierError)):
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # none is an exception
