"""Lets threads share one engine: one of them computes at a time, and the others wait for what it computes.

A step of a batch serves every sequence in it. So a thread that finds another one computing does not queue for a step of
its own: it waits until the running step is done, and looks what that has given it.
"""

import os
import threading

from quengine.errors import EngineError


class EngineLock:
    """A lock on the scheduler and the cache. `acquire_or_wait` is for steps; `acquire` is for all else, and comes
    before the next step, so that a thread that steps without a pause keeps no other out.

    A thread that holds the lock has no reason to acquire it again: one that does was kept from releasing it by an
    interrupt, and has it. `release` does nothing where the thread does not hold it: it may stand in a `finally` around
    the call that acquires, which an interrupt may have cut short. Inside these methods an interrupt would leave what
    guards the lock itself locked: they are for blocks of `DeferredInterrupt`.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._owner: int | None = None  # the thread that holds the lock
        self._acquiring = 0  # threads inside `acquire`

    def check_process(self) -> None:
        """Raises EngineError in a process that was forked from the one in which the lock was made."""
        if os.getpid() != self._process:
            raise EngineError(
                f"this LLM belongs to process {self._process} and cannot be used in process {os.getpid()}, which was "
                "forked from it: threads and GPU memory do not outlive a fork; load the model after the fork, or "
                "start processes by 'spawn'"
            )

    def acquire(self) -> None:
        """Wait until the lock is free, and hold it. Raises EngineError as `check_process`."""
        self.check_process()
        me = threading.get_ident()
        with self._changed:
            self._acquiring += 1
            try:
                while self._owner not in (None, me):
                    self._changed.wait()
                self._owner = me
            finally:
                self._acquiring -= 1
                if self._owner != me:  # interrupted: steps waited for this thread
                    self._changed.notify_all()

    def try_acquire(self) -> bool:
        """Hold the lock if it is free; never waits, not even for a moment, and so may be called by a finalizer."""
        if os.getpid() != self._process or not self._changed.acquire(blocking=False):
            return False
        try:
            if self._owner is None:
                self._owner = threading.get_ident()
                return True
            return False
        finally:
            self._changed.release()

    def acquire_or_wait(self) -> bool:
        """Hold the lock if it is free; else wait until the step under way is done, and return False.

        Raises EngineError as `check_process`.
        """
        self.check_process()
        me = threading.get_ident()
        with self._changed:
            if self._owner == me or (self._owner is None and not self._acquiring):
                self._owner = me
                return True
            self._changed.wait()
            return False

    def step_done(self) -> None:
        """Wake the threads that wait for a step, and keep the lock."""
        with self._changed:
            self._changed.notify_all()

    def release(self) -> None:
        """Free the lock, if this thread holds it."""
        if self._owner == threading.get_ident():
            with self._changed:
                self._owner = None
                self._changed.notify_all()
