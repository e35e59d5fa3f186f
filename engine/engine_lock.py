"""A lock that lets threads share one engine: one of them computes a step, and the others wait for its results.

A step serves every sequence of its batch. So a thread that finds another one computing does not queue for a step of
its own: it waits until the current step is done, and then looks whether its own sequence has advanced.
"""

import os
import threading

from quengine.errors import EngineError


def closed_error() -> EngineError:
    """The error of each call of an LLM once it is closed."""
    return EngineError("this LLM is closed: load the model again")


class EngineLock:
    """A lock on the scheduler and the cache. `acquire_or_wait` is for steps; `acquire` is for everything else, and
    takes precedence over the next step, so that a thread that steps without a pause does not starve the others.

    Acquiring the lock again in the thread that holds it succeeds: an interrupt kept that thread from releasing it.
    `release` does nothing in a thread that does not hold the lock, so it may stand in a `finally` around the call that
    acquires, which an interrupt may have cut short. An interrupt inside these methods would leave the internal mutex
    locked: call them in blocks of `DeferredInterrupt`.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._owner: int | None = None  # the thread that holds the lock
        self._closed = False
        self._acquiring = 0  # number of threads inside `acquire`

    def check_process(self) -> None:
        """Raises EngineError in a process forked from the one that made the lock, and once it is closed."""
        if self._closed:
            raise closed_error()
        if os.getpid() != self._process:
            raise EngineError(
                f"this LLM belongs to process {self._process} and cannot be used in process {os.getpid()}, which was "
                "forked from it: threads and GPU memory do not outlive a fork; load the model after the fork, or "
                "start processes by 'spawn'"
            )

    def acquire(self) -> None:
        """Waits until the lock is free, and takes it. Raises EngineError as `check_process` does."""
        self.check_process()
        me = threading.get_ident()
        with self._changed:
            self._acquiring += 1
            try:
                while self._owner not in (None, me):
                    self._changed.wait()
                self.check_process()  # it may have been closed meanwhile
                self._owner = me
            finally:
                self._acquiring -= 1
                if self._owner != me:  # interrupted: steps waited for this thread
                    self._changed.notify_all()

    def close(self) -> bool:
        """Takes the lock for good: no other thread gets it any more. Returns False if it is closed already."""
        try:
            self.acquire()
        except EngineError:
            if self._closed:  # perhaps by another thread meanwhile
                return False
            raise
        self._closed = True
        return True

    def try_acquire(self) -> bool:
        """Takes the lock if it is free. Never waits, not even for the internal mutex, so a finalizer may call it."""
        if os.getpid() != self._process or not self._changed.acquire(blocking=False):
            return False
        try:
            if self._owner is None and not self._closed:
                self._owner = threading.get_ident()
                return True
            return False
        finally:
            self._changed.release()

    def acquire_or_wait(self) -> bool:
        """Takes the lock if it is free; otherwise waits until the current step is done, and returns False.

        Raises EngineError as `check_process` does.
        """
        self.check_process()
        me = threading.get_ident()
        with self._changed:
            if self._owner == me or (self._owner is None and not self._acquiring):
                self.check_process()  # it may have been closed meanwhile
                self._owner = me
                return True
            self._changed.wait()
            return False

    def step_done(self) -> None:
        """Wakes the threads that wait for a step; the lock stays held."""
        with self._changed:
            self._changed.notify_all()

    def release(self) -> None:
        """Frees the lock, if this thread holds it."""
        if self._owner == threading.get_ident():
            with self._changed:
                self._owner = None
                self._changed.notify_all()
