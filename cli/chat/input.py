"""What is typed and piped into a conversation: lines, messages of several lines, and keys during an answer.

A block of several lines stands between lines that begin and end with three quotation marks. During an answer Ctrl-C
stops it; other keys wait for the next prompt and are not shown.
"""

import contextlib
import signal
import sys
import termios
from collections.abc import Iterator
from types import FrameType

from quengine.errors import EngineError

QUOTES = '"""'


def is_open(text: str) -> bool:
    """Whether a block of several lines has begun in `text` and not ended."""
    ended = len(text.rstrip()) >= 2 * len(QUOTES) and text.rstrip().endswith(QUOTES)
    return text.startswith(QUOTES) and not ended


def joined(lines: Iterator[str]) -> Iterator[str]:
    """The lines, those of a block as one, without its quotation marks; a block is a message, whatever is in it."""
    for line in lines:
        if not line.startswith(QUOTES):
            yield line
            continue
        text = line
        while is_open(text) and (following := next(lines, None)) is not None:
            text += f"\n{following}"
        block = text.removeprefix(QUOTES).rstrip().removesuffix(QUOTES).strip("\n")
        yield f"/{block}" if block.startswith("/") else block


def piped_lines() -> Iterator[str]:
    """The lines of standard input. Raises EngineError where they cannot be read."""
    try:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.object[error.start]:#04x}"
        raise EngineError(f"cannot read standard input: not {error.encoding}, {wrong}") from None
    except OSError as error:
        raise EngineError(f"cannot read standard input: {error.strerror or error}") from None


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
