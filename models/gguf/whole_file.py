"""A file that appears at its place when it is complete: written beside it, then renamed."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from quengine.errors import CannotRunError, EngineError

_SPARE = 1 << 26
"""Bytes of the disk that are left to others."""


PARTIAL = ".partial"
"""How the names of files end that are not complete yet."""


@contextmanager
def beside(path: Path) -> Iterator[BinaryIO]:
    """A file next to `path` to be written. It is locked, so that nobody takes it for the leftover of a dead process. At
    the end of the block it is renamed to `path`; after an error it is removed."""
    partial = _partial(path)
    try:
        with partial.open("wb") as file:
            with suppress(OSError):  # a file system without locks: nobody else can lock it either
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")


def file_size(nbytes: int) -> str:
    """A size in GB or MB, as text for the user."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


@contextmanager
def whole_file(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """A file of `nbytes` bytes to be written. At the end of the block it is at `path`; after an error nothing is left.

    Raises:
        EngineError: there is no such folder, or it cannot be written to.
        CannotRunError: too little free disk, before or while it is written.
    """
    check_disk(path, nbytes)
    try:
        with beside(path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as failure:
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CannotRunError(f"{path}: the disk is full, {file_size(nbytes)} are needed") from None
        if failure.filename == str(_partial(path)):
            raise EngineError(f"{path}: cannot be written: {failure.strerror}") from None
        raise


def check_disk(path: Path, nbytes: int) -> None:
    """Raises as `whole_file` for a folder that is missing, or a disk that is too full. 0 bytes: the size is unknown."""
    if path.is_dir() or not path.parent.is_dir():
        raise EngineError(
            f"{path}: {'is a folder' if path.is_dir() else 'no such folder as ' + str(path.parent)}"
        )
    free = shutil.disk_usage(path.parent).free
    if free < nbytes + _SPARE:
        room = f"of disk and {file_size(_SPARE)} to spare" if nbytes else "of free disk"
        raise CannotRunError(
            f"{path}: needs {file_size(nbytes or _SPARE)} {room}, {file_size(free)} are free"
        )
