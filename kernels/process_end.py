"""The end of a process that takes nothing apart.

An ordinary one destroys what modules and C libraries hold: 0.1 s with torch, and after a device has failed freeing what
it holds may hang.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

BEFORE_END: set[Callable[[], object]] = set()
"""What is done before it all the same, in any thread. The functions of `atexit` are not called."""


def end_at_once(code: int) -> NoReturn:
    """End this process, whatever its threads do."""
    try:
        for act in list(BEFORE_END):
            with suppress(Exception):
                act()
    finally:
        os._exit(code)


def leave(code: int) -> NoReturn:
    """End this process at once, with what it has printed: by C libraries too, whose streams into files and
    pipes would be lost."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # nothing reads it, or it is closed
                stream.flush()
        if "ctypes" in sys.modules:  # torch imports it
            import ctypes

            ctypes.CDLL(None).fflush(None)
    finally:
        end_at_once(code)
