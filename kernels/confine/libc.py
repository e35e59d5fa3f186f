"""System calls that Python has no function for."""

import ctypes
import os

NO_NEW_PRIVS = 38
DEATH_SIGNAL = 1
CHILD_SUBREAPER = 36
SECCOMP = 22
CAPBSET_DROP = 24
CAP_AMBIENT = 47

_libc = ctypes.CDLL(None, use_errno=True)


def system_call(number: int, *arguments: object) -> int:
    """The result of a system call. Raises OSError where it fails."""
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    return _checked(result)


def prctl(option: int, first: int = 0, second: object = 0) -> int:
    """The result of prctl. Raises OSError where it fails."""
    given = ctypes.c_ulong(second) if isinstance(second, int) else second
    result: int = _libc.prctl(option, ctypes.c_ulong(first), given, ctypes.c_ulong(0), ctypes.c_ulong(0))
    return _checked(result)


def unshare(flags: int) -> None:
    """Leaves the namespaces that `flags` names for new ones. Raises OSError where it fails."""
    _checked(_libc.unshare(flags))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
