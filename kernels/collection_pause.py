"""Python's garbage collection, paused by any number of threads at once."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_pauses, _was_enabled = 0, False


@contextmanager
def paused() -> Iterator[None]:
    """Pauses collection in all threads until this block and all other such blocks have ended.

    For making many objects at once, and for capturing CUDA graphs, when a collection might destroy CUDA objects.
    """
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
