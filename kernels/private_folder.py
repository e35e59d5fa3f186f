"""Folders that machine code is loaded from: checks that they are private to this user, and a secret kept in each.

Anyone who can write to such a folder can run code as the user that loads from it.
"""

import os
import stat
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

KEY_NAME, KEY_BYTES = "key", 32
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class ForeignFolderError(OSError):
    """Another user owns, may replace or may write to the folder, or it is no folder; `strerror` gives the reason."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(None, problem, str(folder))


def user_cache() -> Path | None:
    """The engine's folder among the user's caches (XDG_CACHE_HOME, else ~/.cache); None without a home folder."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(chosen) if chosen else Path("~/.cache").expanduser()) / "quengine"
    except RuntimeError:
        return None


def cache_of_file(folder: str, file: Path, *facts: object) -> Path | None:
    """The path of a cache entry for `file` and `facts`, in a folder of the engine's cache; it differs once the file has
    changed. None without a home folder. Raises OSError where there is no such file."""
    cache, path = user_cache(), file.resolve()
    status = path.stat()
    digest = sha256(repr((str(path), status.st_size, status.st_mtime_ns, *facts)).encode()).hexdigest()
    return None if cache is None else cache / folder / digest[:32]


def check_owner(folder: Path) -> os.stat_result:
    """The status of a folder that this user owns, even if others may write to it.

    Raises:
        ForeignFolderError: another user owns it or a link to it, or others can replace it.
        OSError: it does not exist, or cannot be read.
    """
    link, status, parent = folder.lstat(), folder.stat(), folder.parent.stat()
    user = os.geteuid()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (user, 0):
        raise ForeignFolderError(folder, f"it is a link that belongs to user {link.st_uid}")
    if not stat.S_ISDIR(status.st_mode):
        raise ForeignFolderError(folder, "it is not a folder")
    if status.st_uid != user:
        raise ForeignFolderError(folder, f"it belongs to user {status.st_uid}, and this is user {user}")
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        raise ForeignFolderError(
            folder, f"anybody can exchange it: the mode of {folder.parent} is {_mode(parent)}"
        )
    return status


def check_private(folder: Path) -> None:
    """Checks that only this user can have written to a folder.

    Raises:
        ForeignFolderError: others can write to it, or as `check_owner`.
        OSError: it does not exist, or cannot be read.
    """
    status = check_owner(folder)
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _own_group(status)):
        raise ForeignFolderError(folder, f"others can write into it: its mode is {_mode(status)}")


def folder_key(folder: Path, make: bool) -> bytes | None:
    """This user's secret in a folder, KEY_BYTES long; None if there is none and `make` is false.

    The folder becomes private (0700). A secret that others could have written is removed.

    Raises:
        ForeignFolderError: as `check_owner`.
        OSError: the folder does not exist, or cannot be written.
    """
    status = check_owner(folder)
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)
        if status.st_mode & _OTHERS_WRITE:
            (folder / KEY_NAME).unlink(missing_ok=True)
    key = _read_key(folder / KEY_NAME)
    if key is None and make:
        _write_key(folder / KEY_NAME)
        key = _read_key(folder / KEY_NAME)
    return key


def _read_key(path: Path) -> bytes | None:
    """The content of the file, if it is a secret that this user owns and no one else can read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        secret = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077 and status.st_uid == os.geteuid()
        data = file.read(KEY_BYTES + 1) if secret else b""
    return data if len(data) == KEY_BYTES else None


def _write_key(path: Path) -> None:
    """Writes a new secret, unless another process has just written one."""
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(beside, path)
        if _read_key(path) is None:
            Path(beside).replace(path)
    finally:
        Path(beside).unlink(missing_ok=True)


def _own_group(status: os.stat_result) -> bool:
    """Whether the group is the user's own, named like the user, as distributions create them, without other members."""
    import grp
    import pwd

    try:
        name, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"
