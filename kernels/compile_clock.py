"""How long this process has waited for kernels to be compiled: the reports of requests take it out of their speeds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_seconds = 0.0


def seconds() -> float:
    """Since the process began."""
    return _seconds


@contextmanager
def compiling() -> Iterator[None]:
    """What is done within it is compiling, or waiting for it."""
    global _seconds
    began = time.perf_counter()
    try:
        yield
    finally:
        with _lock:
            _seconds += time.perf_counter() - began
