"""Ctrl-C, SIGTERM and SIGHUP in the `engine` program: each ends it quietly, within a second, whatever it is doing.

A signal becomes an exception in the main thread, which unwinds the command: partial files go, child processes end.
That alone is not enough. Python's handler waits while the main thread is in native code; an exception that is raised
inside an import is swallowed by libraries, or ends in the abort of a C++ runtime; a finalizer's is printed and dropped.
So an import is not interrupted by an exception but ended with the process, and a thread that the signal itself wakes
ends the process when nothing else has done so in time.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from quengine.cli.progress import ProgressLine
from quengine.kernels.process_end import end_at_once
from quengine.platform.deferred_interrupt import DeferredInterrupt

SIGNALS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""Those that are handled, each with the handler that a program starts with. One that the parent process ignores, as
`nohup` has SIGHUP ignored, stays ignored."""

GRACE_SECONDS = 0.5
"""For the command to unwind; then the process ends as it is."""

_FLUSH_SECONDS = 0.2

_raised: int | None = None  # the signal of which an exception was raised
_finishing = False
_wakeup = -1  # where the interpreter writes the numbers of signals
_terminal: list[Any] | None = None  # how that of standard input was set


def install() -> None:
    """Handle `SIGNALS` in this process from now on. For the main thread."""
    global _terminal, _wakeup
    with contextlib.suppress(OSError, ValueError, termios.error):  # no terminal, or no file at all
        _terminal = termios.tcgetattr(0)
    for number, initial in SIGNALS.items():
        if signal.getsignal(number) == initial:
            signal.signal(number, _handle)
    read, _wakeup = os.pipe()
    os.set_blocking(_wakeup, False)
    signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(read,), name="quengine-interrupts", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started: the handler remains
        watcher.start()
    sys.unraisablehook = _unraisable


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Imports of torch and numba: a signal ends the process by its default action meanwhile.

    Loading their libraries holds Python's lock for a second or more, in which no handler and no thread runs.
    """
    held = [number for number in SIGNALS if signal.getsignal(number) is _handle]
    for number in held:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, _handle)


@contextlib.contextmanager
def left_to_prompt() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt and nothing more, for code that has an answer to it.

    An event loop inside takes the descriptor by which signals wake the thread; it is set again afterwards.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if _wakeup >= 0:
            signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False)


def finish() -> None:
    """Let signals end the process at once from now on: nothing is left to unwind, or to flush."""
    global _finishing
    _finishing = True
    for number in SIGNALS:
        if signal.getsignal(number) in (_handle, signal.default_int_handler):
            signal.signal(number, signal.SIG_DFL)


def exit_code() -> int | None:
    """The exit code after a signal, whatever became of its exception; None where none has come."""
    return None if _raised is None else 128 + _raised


def _handle(number: int, frame: FrameType | None) -> None:
    global _raised
    if _raised is not None or _finishing or _is_import(frame):
        _end(number)
    _raised = number
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _is_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _watch(descriptor: int) -> None:
    """A thread: reads the numbers of signals as they arrive, and ends the process where nothing else does.

    A command that has a handler of its own (chat during an answer, a server) answers by itself.
    """
    main = threading.main_thread().ident or 0
    number, due = 0, float("inf")
    place: tuple[FrameType | None, int] = (None, -1)
    while True:
        left = due - time.monotonic()
        if select.select([descriptor], [], [], None if left == float("inf") else max(0.0, left))[0]:
            for received in os.read(descriptor, 64):
                if received not in SIGNALS or not _is_ours(received):
                    continue
                if due < float("inf"):  # the second one
                    _end(received)
                number, due, place = received, time.monotonic() + GRACE_SECONDS, _place(main)
        elif _is_ours(number) and (_raised is not None or _is_put_off(number) or _place(main) == place):
            _end(number)
        else:  # the main thread has gone on, and another handler has had the signal
            due, place = float("inf"), (None, -1)


def _is_ours(number: int) -> bool:
    """Whether a signal comes to `_handle`, now or where it was put off to."""
    handler = signal.getsignal(number)
    while isinstance(handler, DeferredInterrupt):
        handler = handler.before
    return handler is _handle


def _is_put_off(number: int) -> bool:
    handler = signal.getsignal(number)
    return isinstance(handler, DeferredInterrupt) and handler.noted


def _place(thread: int) -> tuple[FrameType | None, int]:
    """Which instruction a thread executes."""
    frame = sys._current_frames().get(thread)
    return frame, -1 if frame is None else frame.f_lasti


def _unraisable(unraisable: Any) -> None:
    """What a finalizer or a callback raised: an interrupt there is no message, and must not be lost."""
    if _raised is not None and issubclass(unraisable.exc_type, KeyboardInterrupt | SystemExit):
        _end(_raised)
    sys.__unraisablehook__(unraisable)


def _end(number: int) -> NoReturn:
    """End the process now, with what was printed; a reader that takes nothing is not waited for."""
    try:
        # In a thread: the main one may be interrupted while it holds the stream.
        last = threading.Thread(target=_leave_terminal, daemon=True)
        last.start()
        last.join(_FLUSH_SECONDS)
    finally:
        end_at_once(128 + number)


def _leave_terminal() -> None:
    """Leave the terminal as it was, without a line of progress, and write what was printed."""
    with contextlib.suppress(Exception):
        if _terminal is not None and os.getpgrp() == os.tcgetpgrp(0):
            termios.tcsetattr(0, termios.TCSANOW, _terminal)
    with contextlib.suppress(Exception):
        if ProgressLine.on_screen:
            ProgressLine().clear()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
