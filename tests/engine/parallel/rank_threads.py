"""Ranks as threads of one process: the same operations, with a barrier where processes would exchange.

One computes at a time, as Triton's interpreter wants it.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from quengine.kernels.channel import encode
from quengine.kernels.ranks.communicator import Communicator, side_by_side, sum_in_order
from quengine.parallel.wire import TO_RANK, Message, RankPlan

T = TypeVar("T")

WAIT_SECONDS = 60.0


class Meeting:
    """Where `count` ranks meet. turn: held by the one that computes."""

    def __init__(self, count: int) -> None:
        self.slots: list[Tensor | None] = [None] * count
        self.barrier = threading.Barrier(count)
        self.turn = threading.Lock()
        self.sent: defaultdict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)


class ThreadCommunicator:
    """A `Communicator`. Its operations are called with the turn, and give it to the others meanwhile."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, len(meeting.slots)
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(self._exchange(x))

    def peers(self, _rows: int, _width: int) -> None:
        return None

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        assert x.shape[1] == widths[self.rank]
        return side_by_side(self._exchange(x), widths)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        x.copy_(self._exchange(x)[source])

    def send(self, x: Tensor, to: int) -> None:
        self._meeting.sent[self.rank, to].put(x.clone())

    def receive(self, x: Tensor, source: int) -> None:
        sent = self._meeting.sent[source, self.rank]
        self._meeting.turn.release()
        try:
            received = sent.get(timeout=WAIT_SECONDS)
        finally:
            self._meeting.turn.acquire()
        assert (x.shape, x.dtype) == (received.shape, received.dtype)
        x.copy_(received)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.slots[self.rank] = x.clone()
        meeting.turn.release()
        try:
            meeting.barrier.wait(WAIT_SECONDS)
            parts = [part.clone() for part in meeting.slots if part is not None]
            meeting.barrier.wait(WAIT_SECONDS)
        finally:
            meeting.turn.acquire()
        return parts


def as_ranks(count: int, work: Callable[[Communicator], T]) -> list[T]:
    """What `work` gives on each of `count` ranks; raises what any of them raises."""
    meeting = Meeting(count)
    results: list[T | BaseException | None] = [None] * count

    def run(rank: int) -> None:
        try:
            with meeting.turn:
                results[rank] = work(ThreadCommunicator(rank, meeting))
        except BaseException as error:
            results[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in sorted(results, key=lambda result: isinstance(result, threading.BrokenBarrierError)):
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # none is an exception


class ThreadGroup:
    """Stands for a `RankGroup` of two: what rank 0 computes `together`, a thread computes as rank 1, by `follow`."""

    def __init__(self, meeting: Meeting, follow: Callable[[Message], None]) -> None:
        self._meeting, self._follow = meeting, follow
        self._sent: queue.Queue[bytes | None] = queue.Queue()
        self._failure: BaseException | None = None
        # After a test that fails the thread would wait for ever.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextmanager
    def together(self, message: Message) -> Iterator[None]:
        self._sent.put(encode(message))
        with self._meeting.turn:
            yield

    def end(self) -> None:
        """Wait for rank 1; raises what it raised."""
        self._sent.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while (data := self._sent.get()) is not None:
                with self._meeting.turn:
                    message = TO_RANK.decode(data)
                    assert not isinstance(message, RankPlan)
                    self._follow(message)
        except BaseException as error:
            self._failure = error
            self._meeting.barrier.abort()
