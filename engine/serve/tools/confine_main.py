"""Confines itself with Landlock and becomes the program of its arguments: what it starts is confined too, for good.

Arguments: the folder it may write in, one more for temporary files, and the program with its own arguments. These two
folders are written and read, those of the system are read, nothing else is; the network is open. It imports the
standard library alone and is run by its path. Layouts: linux/landlock.h
(https://docs.kernel.org/userspace-api/landlock.html).
"""

import ctypes
import os
import struct
import sys
from pathlib import Path

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix", "/sys"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/filesystems", "/proc/version"),
)
"""What programs read. Other processes' folders in /proc are not among it: they tell the variables of each."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_PATH_BENEATH = 1
_NO_NEW_PRIVS = 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REFER, _TRUNCATE = (1 << bit for bit in (0, 1, 2, 3, 13, 14))
_REMOVE_AND_MAKE = 0x1FF0
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_SCOPED = 3
"""No signals to processes that are not confined, and none of their abstract sockets."""

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The version of Landlock's interface; 0 where the kernel has none, or none that is on."""
    answered: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(0, answered)


def confine(folders: list[str], others: list[str]) -> None:
    """Confine this process: `folders` are read and written, `others` are read. Raises OSError."""
    has = version()
    write = _WRITE_FILE | _REMOVE_AND_MAKE | (_REFER if has >= 2 else 0) | (_TRUNCATE if has >= 3 else 0)
    attributes = struct.pack("=QQQ", _READ | write, 0, _SCOPED)[: 24 if has >= 6 else 16 if has >= 4 else 8]
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    device = (_READ_FILE | _WRITE_FILE | _TRUNCATE) & (_READ | write)
    files = _EXECUTE | _READ_FILE | device  # a rule of a file has no other rights
    for paths, access in ((folders, _READ | write), (others, _READ), (_DEVICES, device)):
        for path in paths:
            _allow(ruleset, path, access if Path(path).is_dir() else access & files)
    if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    """Of a path that is not there nothing is allowed."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rule = struct.pack("=Qi", access, descriptor)
    _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def main() -> None:
    folder, temporary, *program = sys.argv[1:]
    programs = [*os.environ.get("PATH", "").split(os.pathsep), sys.base_prefix]
    if (Path(sys.executable).parents[1] / "pyvenv.cfg").is_file():
        programs.append(str(Path(sys.executable).parents[1]))
    try:
        confine([folder, temporary], [*SYSTEM, *filter(os.path.isabs, programs)])
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
