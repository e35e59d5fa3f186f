"""The thread that computes on the host what the steps of a device wait for, in the order in which they are launched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TypeVar

from quengine.kernels.cpu.runtime.threads import sleep_precisely

T = TypeVar("T")

logger = logging.getLogger("quengine.experts")


class Work:
    """A piece of work for the thread, done once unless it is withdrawn before it begins."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._do, self._lock, self._taken = do, Lock(), False
        self.begun = Event()

    def do(self) -> None:
        if self._take():
            self.begun.set()
            self._do()

    def withdraw(self) -> bool:
        """Withdraws the work: True if it had not begun, and so never will."""
        return self._take()

    def _take(self) -> bool:
        with self._lock:
            first, self._taken = not self._taken, True
            return first


class Follower:
    """See the module docstring. A process has one, since the CPU's kernels share one team of threads: with two, a
    step's list that waits for its device could hold up another list for which the device waits.

    `launching`: held while a step is both given to the thread and launched, so that the steps of several models reach
    the thread in the order in which the device runs them.
    """

    def __init__(self) -> None:
        self.launching = Lock()
        self._work: SimpleQueue[Work] = SimpleQueue()
        self._lock, self._started = Lock(), False

    def start(self, work: Work) -> None:
        """Begins `work` after all work given before it, and returns once it has begun: a later beginning would have to
        wait for the interpreter lock while the calling thread goes on."""
        self._put(work)
        work.begun.wait()

    def call(self, work: Callable[[], T]) -> T:
        """The result of `work`, done after what was given before it. Raises what it raises."""
        results, errors, done = list[T](), list[BaseException](), Event()

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            done.set()

        self._put(Work(run))
        done.wait()
        if errors:
            raise errors[0]
        return results[0]

    def finish(self) -> None:
        """Waits until all work that was given is done."""
        self.call(lambda: None)

    def _put(self, work: Work) -> None:
        with self._lock:
            if not self._started:
                Thread(target=self._follow, name="quengine-experts", daemon=True).start()
                self._started = True
        self._work.put(work)

    def _follow(self) -> None:
        sleep_precisely()
        while True:
            work = self._work.get()
            try:
                work.do()
            except BaseException as error:  # the thread goes on: others wait for what is given to it later
                logger.error("the CPU's part of a step failed: %s", error)


FOLLOWER = Follower()
