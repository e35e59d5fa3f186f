"""The prompt of `generate` and `run`: what is typed, read from a file, and what comes through a pipe before it."""

import logging
import os
import select
import stat
import sys

from quengine.platform.input_files import read_stream, universal_newlines

_log = logging.getLogger(__name__)

_FAILURE = "cannot read the prompt from standard input"
_SAID_AFTER = 2.0
"""Seconds that a pipe may keep silent before the user is told what is waited for."""


def with_piped(typed: str | None) -> str | None:
    """The piped text, a blank line and what is typed, or whichever of the two there is; None for neither.

    Raises EngineError where the pipe's text is too large, not UTF-8, or cannot be read.
    """
    piped = _piped_text()
    if piped == "" and typed is not None:
        _log.info("standard input is empty: the prompt is used alone")
    elif piped:
        _log.info("%d characters of standard input are in the prompt", len(piped))
    return "\n\n".join(part for part in (piped, typed) if part) or typed or piped


def standard_input() -> str:
    """All of standard input, without a line's end behind it.

    Raises EngineError where it is too large, not UTF-8, or cannot be read.
    """
    if sys.stdin.isatty():
        print(
            "engine: reading the prompt from the terminal; Ctrl-D on an empty line ends it", file=sys.stderr
        )
    else:
        _say_when_silent()
    return universal_newlines(read_stream(sys.stdin.buffer, _FAILURE)).removesuffix("\n")


def _piped_text() -> str | None:
    """What a pipe, a socket or a file at standard input gives; None for a terminal, and for a device as /dev/null."""
    try:
        kind = stat.S_IFMT(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):  # a closed stream, or one that is none of the system's
        return None
    return standard_input() if kind in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG) else None


def _say_when_silent() -> None:
    """Wait for standard input a while, and tell the user if nothing comes: a pipe that nobody closes never ends."""
    try:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], _SAID_AFTER)
    except (OSError, ValueError):  # a stream that is none of the system's
        return
    if not ready:
        print(
            "engine: waiting for standard input, which is a pipe; `< /dev/null` leaves it out",
            file=sys.stderr,
        )
