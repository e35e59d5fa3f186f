"""Ctrl-C deferred to the end of a block: a KeyboardInterrupt in its middle would leave inconsistent state."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class DeferredInterrupt:
    """A block of the main thread that defers SIGINT: its handler runs after the block. In other threads, which get no
    signals, it changes nothing.

    Only Python's handlers are deferred. `second_at_once`: the second SIGINT in the block is not deferred, for blocks
    that may wait for ever.

    The object is the handler meanwhile: `before` is the one that it replaces, `noted` is set once a signal has come.
    """

    def __init__(self, second_at_once: bool = False) -> None:
        self.before: Callable[[int, FrameType | None], Any] | None = None
        self._second_at_once = second_at_once
        self._noted: tuple[int, FrameType | None] | None = None

    # An interrupt between two instructions here finds either the former handler with nothing changed yet, or this one.

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self.before = before
                signal.signal(signal.SIGINT, self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
            if self._noted is not None:
                self.before(*self._noted)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._second_at_once and self._noted is not None and self.before is not None:
            self.before(number, frame)
        self._noted = (number, frame)

    @property
    def noted(self) -> bool:
        return self._noted is not None
