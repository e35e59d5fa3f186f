"""The time that this process has waited for kernels to be compiled, which reports of a request's speed exclude."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

_lock = Lock()
_seconds = 0.0


def seconds() -> float:
    """Seconds of compilation since the process started."""
    return _seconds


class Moment(NamedTuple):
    """`time.perf_counter` at a moment, and the seconds of compilation until then."""

    now: float
    compiled: float


def moment() -> Moment:
    return Moment(time.perf_counter(), seconds())


@contextmanager
def compiling() -> Iterator[None]:
    """Counts the time within this context as compilation, or waiting for it."""
    global _seconds
    began = time.perf_counter()
    try:
        yield
    finally:
        with _lock:
            _seconds += time.perf_counter() - began
