"""The process of a command: stacks large enough to compute on, a clean end when a file fails, and standard streams.

Standard input, output and error are as commands rely on them: there, and able to take any character.
"""

import codecs
import io
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache

from quengine.cli import interrupts
from quengine.errors import CannotRunError

COMPUTING = frozenset(
    {
        *("generate", "chat", "run", "serve", "bench", "parity", "doctor"),
        *("perplexity", "compare", "convert", "imatrix", "quantize", "merge"),
    }
)
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
        with interrupts.at_once():
            from quengine.platform import torch_import
            from quengine.platform.bus_error import install

            install()
            torch_import.begin()


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


_ESCAPE = "quengine.escape"


def open_streams() -> None:
    """Open the streams that the parent process closed, and let standard output take every character.

    A closed descriptor would go to the next file that is opened, and what is printed into that file. /dev/null takes
    its place, opened for the other direction: reading standard input, or writing standard output, fails as before.
    """
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(_placeholder(0, os.O_WRONLY, "r")), "utf-8")
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(_placeholder(1, os.O_RDONLY, "w")), "utf-8")
    elif isinstance(raw := getattr(sys.stdout, "buffer", None), io.FileIO):
        # PYTHONUNBUFFERED: text that is not taken would be lost, and `output_error` find nothing. Lines go out at once.
        buffer = io.BufferedWriter(io.FileIO(raw.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(buffer, sys.stdout.encoding, line_buffering=True)
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(_placeholder(2, os.O_WRONLY, "w")), "utf-8")
    codecs.register_error(_ESCAPE, _escape)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPE)


def output_error() -> OSError | None:
    """Why standard output does not take what was printed, or None. Afterwards it takes and drops everything."""
    failed = None
    try:
        sys.stdout.flush()
    except OSError as error:
        failed = error
        drop(sys.stdout.fileno())
    return failed


def flush_streams() -> None:
    """Flush both outputs for good: the interpreter's own flush would end in a traceback and exit code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            drop(stream.fileno())


def drop(descriptor: int) -> None:
    """Point a descriptor at nothing: what is still buffered for it goes there."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)


def _placeholder(number: int, flags: int, mode: str) -> io.FileIO:
    """/dev/null at a standard descriptor's number, for child processes too; elsewhere if it is taken by now."""
    descriptor = os.open(os.devnull, flags)
    if descriptor == number:
        os.set_inheritable(descriptor, True)
    return io.FileIO(descriptor, mode)


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Characters that the output's encoding lacks, as \\u1234: JSON that holds them stays the same JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    _warn_once(error.encoding)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)), error.end


@cache
def _warn_once(encoding: str) -> None:
    logging.getLogger(__name__).warning(
        "standard output is in %s, which lacks characters of the text: they are written as codes, such as \\u00e9; "
        "PYTHONUTF8=1 makes it UTF-8",
        encoding,
    )
