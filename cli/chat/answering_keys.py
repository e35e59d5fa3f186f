"""Keys typed during an answer: Ctrl-C stops it, the others wait for the next prompt and are not shown."""

import contextlib
import signal
import sys
import termios
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """The first Ctrl-C interrupts what runs inside; further ones are ignored, so that cleaning up can end."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """The terminal of standard input, if it is one, keeps what is typed without showing it."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):  # no terminal, or no file at all
        yield
        return
    quiet = before.copy()
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
