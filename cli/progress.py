"""What a long command is doing: one line on standard error that is overwritten, for who watches."""

import logging
import sys
import time
from typing import ClassVar

LONG_PROMPT = 256
"""Tokens of a prompt that may take over a second, on the slowest machines that run a model at all."""


class ProgressLine:
    """Shows the latest text on a terminal; off a terminal it stays silent. Leaves an empty line."""

    on_screen: ClassVar[bool] = False
    """Whether any of them shows a text now."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self.shown:
            # \r goes back to the line's start and \x1b[K erases what the last text left there.
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            ProgressLine.on_screen = bool(text)

    def clear(self) -> None:
        """Erase the line, before something else is printed."""
        self("")


def clear_before(record: logging.LogRecord) -> bool:
    """A filter of a log's handler that lets all pass: what is logged does not go on in the line of a progress."""
    del record
    if ProgressLine.on_screen:
        ProgressLine().clear()
    return True


class PromptMeter:
    """How far a prompt is, and how fast, as `CompletionStream.progress` is called; a short one is not shown."""

    def __init__(self) -> None:
        self._line = ProgressLine()
        self._shown = False
        self._began: tuple[int, float] | None = None  # tokens that the cache had, and when

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        first, began = self._began = self._began or (done, now)
        if total - first > LONG_PROMPT or now - began > 1:
            rate = f", {(done - first) / (now - began):.0f} tok/s" if done > first else ""
            self._line(f"prompt: {done} of {total} tokens{rate}")
            self._shown = True

    def clear(self) -> None:
        """Erase the line, before the answer; the next prompt begins anew."""
        if self._shown:
            self._line.clear()
        self._shown, self._began = False, None
