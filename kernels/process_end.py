"""The end of a process without any clean-up.

An ordinary end destroys what modules and C libraries hold. With torch that takes 0.1 s, and it may hang after a device
has failed.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

BEFORE_END: set[Callable[[], object]] = set()
"""Functions that `end_at_once` calls first, in any thread. Those of `atexit` are not called."""


def end_at_once(code: int) -> NoReturn:
    """End this process, whatever its threads do."""
    try:
        for act in list(BEFORE_END):
            with suppress(Exception):
                act()
    finally:
        os._exit(code)


def leave(code: int) -> NoReturn:
    """End this process at once, but flush its output first, that of C libraries too: else what goes to files and pipes
    would be lost."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # nothing reads it, or it is closed
                stream.flush()
        if "ctypes" in sys.modules:  # torch imports it
            import ctypes

            ctypes.CDLL(None).fflush(None)
    finally:
        end_at_once(code)
