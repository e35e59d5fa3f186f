"""Files that a user names as input (prompts, keys, schemas, conversations): read whole, so bounded."""

import os
import stat
from pathlib import Path
from typing import IO

from quengine.errors import EngineError, nearest_file

MAX_INPUT_BYTES = 64 << 20
"""Bytes of one input: far more than any context takes as text."""


def read_text(path: Path, failure: str, limit: int = MAX_INPUT_BYTES) -> str:
    """The UTF-8 text of a regular file, or of a pipe until its end, of at most `limit` bytes; lines end with \\n.

    Args:
        failure: how an error message begins, before the file's name, as in "cannot read the prompt from".

    Raises:
        EngineError: it is no file or pipe (a device may never end), too large, not UTF-8, or cannot be read.
    """
    data = read_bytes(path, failure, limit)
    return universal_newlines(decoded(data, f"{failure} {_shown(path)}"))


def read_bytes(path: Path, failure: str, limit: int = MAX_INPUT_BYTES) -> bytes:
    """The content of a file, as `read_text` reads it. Raises EngineError alike."""
    failure = f"{failure} {_shown(path)}"
    try:
        _check_kind(path.stat(), failure)  # before it is opened: opening a device may do something
        with path.open("rb") as file:
            _check_kind(os.fstat(file.fileno()), failure)
            return _read(file, failure, limit)
    except OSError as error:
        near = nearest_file(path) if isinstance(error, FileNotFoundError) else ""
        raise EngineError(f"{failure}: {error.strerror or error}{near}") from None
    except ValueError as error:  # of a name with a zero byte
        raise EngineError(f"{failure}: {error}") from None


def read_stream(
    stream: IO[bytes], failure: str, limit: int = MAX_INPUT_BYTES, *, replace: bool = False
) -> str:
    """The UTF-8 text of a stream until its end, as it is, of at most `limit` bytes.

    Args:
        failure: how the message begins.
        replace: bytes that are not UTF-8 become U+FFFD.

    Raises:
        EngineError: it is too large, not UTF-8, or cannot be read.
    """
    return decoded(_read(stream, failure, limit), failure, replace)


def _read(stream: IO[bytes], failure: str, limit: int) -> bytes:
    try:
        data = stream.read(limit + 1)
    except OSError as error:
        raise EngineError(f"{failure}: {error.strerror or error}") from None
    if len(data) > limit:
        raise EngineError(f"{failure}: more than {limit} bytes")
    return data


def decoded(data: bytes, failure: str, replace: bool = False) -> str:
    """The UTF-8 text `data`; with `replace` other bytes become U+FFFD. Raises EngineError, which begins with
    `failure`."""
    try:
        return data.decode(errors="replace" if replace else "strict")
    except UnicodeDecodeError as error:
        at = error.start
        raise EngineError(f"{failure}: not UTF-8, byte {data[at]:#04x} at {at}") from None


def universal_newlines(text: str) -> str:
    """A text whose lines end with \\n, whatever system it was written on."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check_kind(status: os.stat_result, failure: str) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFIFO):
        name = _KINDS.get(kind, "neither a file nor a pipe")
        raise EngineError(f"{failure}: it is {name}; give a file or a pipe")


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def _shown(path: Path) -> str:
    """A file's name, cut where it is too long for a line."""
    name = str(path)
    return name if len(name) <= 200 else f"{name[:200]}..."
