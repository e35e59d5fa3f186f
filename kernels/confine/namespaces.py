"""The namespaces of a command: a PID namespace, which ends as a whole, and mounts, read-only except for its folders.

Landlock does not cover a file's mode, owner, times and attributes; a read-only mount does. Root makes the namespaces
itself, other users make them within a user namespace. Where the system allows neither, as in most containers, there
are none.
"""

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from .libc import system_call, unshare

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PIDS = 0x00020000, 0x08000000, 0x10000000, 0x20000000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # on every architecture
_AT_CWD, _RECURSIVE = ctypes.c_int(-100), 0x8000
_CLONE = 1
_EMPTY_PATH = 4
_READ_ONLY = 1
_PRIVATE = 1 << 18


def enter(writable: Sequence[str]) -> bool:
    """Give this process mounts that are writable in `writable` alone, and the processes that it starts a PID namespace.

    Returns whether the system allows that. Where it does not, nothing has changed.
    """
    probe = os.fork()  # it might fail half way
    if probe == 0:
        try:
            _enter(writable)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(probe, 0)[1] != 0:
        return False
    _enter(writable)
    return True


def _enter(writable: Sequence[str]) -> None:
    kinds = _NEW_PIDS | _NEW_MOUNTS | _NEW_IPC
    try:
        unshare(kinds)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        unshare(kinds | _NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount_read_only(writable)


def _mount_read_only(writable: Sequence[str]) -> None:
    _set_all(propagation=_PRIVATE)
    if "/" in writable:
        return
    # A detached copy keeps its flags while all that is attached becomes read-only.
    trees = [
        system_call(_OPEN_TREE, _AT_CWD, path.encode(), ctypes.c_uint(_CLONE | os.O_CLOEXEC | _RECURSIVE))
        for path in map(os.path.realpath, writable)
    ]
    _set_all(attributes=_READ_ONLY)
    for tree, path in zip(trees, map(os.path.realpath, writable), strict=True):
        system_call(_MOVE_MOUNT, ctypes.c_int(tree), b"", _AT_CWD, path.encode(), ctypes.c_uint(_EMPTY_PATH))
        os.close(tree)
    os.chdir(Path.cwd())  # in the mount that lies over the old one


def _set_all(attributes: int = 0, propagation: int = 0) -> None:
    given = struct.pack("=QQQQ", attributes, 0, propagation, 0)
    size = ctypes.c_size_t(len(given))
    system_call(_MOUNT_SETATTR, _AT_CWD, b"/", ctypes.c_uint(_RECURSIVE), given, size)
