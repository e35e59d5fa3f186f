"""Landlock: limits for good which files a process and all that it starts may read and write.

Layouts: linux/landlock.h (https://docs.kernel.org/userspace-api/landlock.html).
"""

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

from .libc import NO_NEW_PRIVS, prctl, system_call

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix", "/sys"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/filesystems", "/proc/version"),
)
"""What programs read, beside /etc. It leaves out other processes' folders in /proc, which show their environment."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REFER, _TRUNCATE = (1 << bit for bit in (0, 1, 2, 3, 13, 14))
_REMOVE_AND_MAKE = 0x1FF0
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_SCOPED = 3
"""Refuses signals to processes that are not confined, and connections to their abstract sockets."""


def version() -> int:
    """The version of Landlock's interface; 0 where the kernel lacks Landlock or has it switched off."""
    try:
        return system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def confine(folders: Sequence[str], others: Sequence[str]) -> None:
    """Confine this process: it may read and write `folders`, and read `others`. Raises OSError."""
    has = version()
    write = _WRITE_FILE | _REMOVE_AND_MAKE | (_REFER if has >= 2 else 0) | (_TRUNCATE if has >= 3 else 0)
    attributes = struct.pack("=QQQ", _READ | write, 0, _SCOPED)[: 24 if has >= 6 else 16 if has >= 4 else 8]
    ruleset = system_call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    device = (_READ_FILE | _WRITE_FILE | _TRUNCATE) & (_READ | write)
    files = _EXECUTE | _READ_FILE | device  # the rights that a rule for a file may have
    for paths, access in ((folders, _READ | write), (others, _READ), (_DEVICES, device)):
        for path in paths:
            _allow(ruleset, path, access, access & files)
    prctl(NO_NEW_PRIVS, 1)
    system_call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def open_parts(folder: str) -> list[str]:
    """The folder if anybody may read all of it, else its largest parts that anybody may read.

    For root, which may read its own files whatever their mode is, such as /etc/shadow.
    """
    parts, whole = list[str](), True
    with os.scandir(folder) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):  # what counts is where it leads
                continue
            if stat.S_ISDIR(mode):
                below = open_parts(entry.path) if mode & 0o005 == 0o005 else []
            else:
                below = [entry.path] if mode & 0o004 else []
            whole = whole and below == [entry.path]
            parts += below
    return [folder] if whole else parts


def _allow(ruleset: int, path: str, of_folder: int, of_file: int) -> None:
    """Allows these accesses to `path`; ignored if the path does not exist or cannot be reached."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    access = of_folder if stat.S_ISDIR(os.fstat(descriptor).st_mode) else of_file
    rule = struct.pack("=Qi", access, descriptor)
    system_call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    os.close(descriptor)
