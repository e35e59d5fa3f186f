"""What a command needs of its process before it computes: large enough stacks, and a clean end when a file fails."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quengine.errors import CannotRunError

COMPUTING = frozenset({"generate", "chat", "run", "serve", "bench", "parity", "doctor"})
"""The commands that start threads and read weights."""

LEAST_STACK, USUAL_STACK = 1 << 20, 8 << 20
"""Bytes of a thread's stack: what torch and the kernels need (half of it ends in a segmentation fault), and what Linux
gives by default."""


def prepare(arguments: Sequence[str]) -> None:
    """Prepare this process for the command in `arguments` (without the program's name).

    Raises:
        CannotRunError: its threads' stacks are too small, and the limit cannot be raised.
    """
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    if command not in COMPUTING:
        return
    _require_stack()
    if command != "serve":  # a server installs the first while its engine's process starts, and has no torch
        from quengine.platform import torch_import
        from quengine.platform.bus_error import install

        install()
        torch_import.prepare()


def _require_stack() -> None:
    """Threads get stacks as large as the limit was when the program started: raising it means starting again."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft == resource.RLIM_INFINITY or soft >= USUAL_STACK:
        return
    allowed = USUAL_STACK if hard == resource.RLIM_INFINITY else min(hard, USUAL_STACK)
    if allowed < LEAST_STACK:
        raise CannotRunError(
            f"the limit on stacks is {allowed >> 10} KiB, and threads need {LEAST_STACK >> 10} KiB; raise it with "
            f"`ulimit -s {USUAL_STACK >> 10}`"
        )
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_STACK, (allowed, hard))
        os.execv(sys.executable, sys.orig_argv)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Within it SIGTERM ends the process as an exit of its code, 143: files that are being written are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where no handler can be set
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
