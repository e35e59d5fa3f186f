"""Takes from a process rights other than those to files: capabilities, and system calls that Landlock does not judge.

A process that only computes loses all system calls except the few that computing takes.

The filter is a program of classic BPF over struct seccomp_data (https://docs.kernel.org/userspace-api/seccomp_filter.html).
Numbers of system calls: linux/unistd.h of each architecture.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from .libc import CAP_AMBIENT, CAPBSET_DROP, NO_NEW_PRIVS, SECCOMP, prctl, system_call

_CLEAR_AMBIENT = 4
_FILTER_MODE = 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000
"""The calls of x86's third interface, x32, begin here; on other architectures there are none."""
_EPERM, _EAFNOSUPPORT, _ENOSYS = 1, 97, 38
_AF_UNIX, _AF_VSOCK = 1, 40
_SET_FLAGS, _SET_ATTRIBUTES = 0x40086602, 0x401C5820
"""ioctls of chattr."""


@dataclass(frozen=True)
class _Machine:
    """Numbers of system calls on an architecture. `numbers`: the calls below, without those that it lacks. `computing`:
    the calls of a process that computes with the memory and the descriptors that it has."""

    architecture: int
    capset: int
    numbers: dict[str, int]
    computing: tuple[int, ...]


_EVERYWHERE = {
    "io_uring_setup": 425,
    "pidfd_open": 434,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "file_setattr": 469,
}
_X86_NUMBERS = {
    "ioctl": 16,
    "socket": 41,
    "kill": 62,
    "chmod": 90,
    "fchmod": 91,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "rt_sigqueueinfo": 129,
    "utime": 132,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "tkill": 200,
    "tgkill": 234,
    "utimes": 235,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "fchownat": 260,
    "futimesat": 261,
    "fchmodat": 268,
    "utimensat": 280,
    "rt_tgsigqueueinfo": 297,
    "prlimit64": 302,
}
_ARM_NUMBERS = {
    "setxattr": 5,
    "lsetxattr": 6,
    "fsetxattr": 7,
    "removexattr": 14,
    "lremovexattr": 15,
    "fremovexattr": 16,
    "ioctl": 29,
    "fchmod": 52,
    "fchmodat": 53,
    "fchownat": 54,
    "fchown": 55,
    "utimensat": 88,
    "kill": 129,
    "tkill": 130,
    "tgkill": 131,
    "rt_sigqueueinfo": 138,
    "socket": 198,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "rt_tgsigqueueinfo": 240,
    "prlimit64": 261,
}
_X86_COMPUTING = (
    *(0, 1, 3, 5, 7, 8),  # read, write, close, fstat, poll, lseek
    *(9, 10, 11, 12, 25, 28),  # mmap, mprotect, munmap, brk, mremap, madvise
    *(13, 14, 15, 131),  # rt_sigaction, rt_sigprocmask, rt_sigreturn, sigaltstack
    *(24, 35, 36, 38),  # sched_yield, nanosleep, getitimer, setitimer
    *(96, 98, 228, 230),  # gettimeofday, getrusage, clock_gettime, clock_nanosleep
    *(39, 186, 202, 219, 271, 318),  # getpid, gettid, futex, restart_syscall, ppoll, getrandom
    *(60, 231),  # exit, exit_group
)
_ARM_COMPUTING = (
    *(63, 64, 57, 80, 62),
    *(222, 226, 215, 214, 216, 233),
    *(134, 135, 139, 132),
    *(124, 101, 102, 103, 169, 165, 113, 115),
    *(172, 178, 98, 128, 73, 278),
    *(93, 94),
)
"""The same calls; poll is ppoll."""
_MACHINES = {
    "x86_64": _Machine(0xC000003E, 126, _X86_NUMBERS | _EVERYWHERE, _X86_COMPUTING),
    "aarch64": _Machine(0xC00000B7, 91, _ARM_NUMBERS | _EVERYWHERE, _ARM_COMPUTING),
}
_SHUT = ("add_key", "request_key", "keyctl", "io_uring_setup")
"""Calls for the user's keys, and io_uring, which makes other calls that no filter sees."""
_BY_PATH = (
    *("chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchownat", "utime", "utimes", "futimesat"),
    *("setxattr", "lsetxattr", "removexattr", "lremovexattr", "setxattrat", "removexattrat", "file_setattr"),
)
_BY_DESCRIPTOR = ("fchmod", "fchown", "fsetxattr", "fremovexattr")
_AIMED = {"kill": 0, "tgkill": 0, "tkill": 0, "rt_sigqueueinfo": 0, "rt_tgsigqueueinfo": 0, "pidfd_open": 0}


def supported() -> bool:
    """Whether the system calls of this architecture are known."""
    return platform.machine() in _MACHINES


def drop_capabilities() -> None:
    """Drop all capabilities. No program that is started gives any back, not even to root. Raises OSError."""
    for capability in range(64):
        with suppress(OSError):  # who may not lower the bound has none to lose
            prctl(CAPBSET_DROP, capability)
    with suppress(OSError):
        prctl(CAP_AMBIENT, _CLEAR_AMBIENT)
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    system_call(_MACHINES[platform.machine()].capset, header, none)


def filter_calls(keep_metadata: bool, keeper: int | None) -> None:
    """Refuse some system calls to this process and all that it starts. Raises OSError.

    AF_UNIX sockets are among them: the user's session bus or a container daemon runs any command for whoever connects.

    Args:
        keep_metadata: refuse changes of files' mode, owner, times and attributes by path as well, and chattr's in any
            way. On an open file, which Landlock has judged, the others stay allowed, except to root, as it may open
            files of /etc.
        keeper: the id of a process that may be sent no signals and set no limits.
    """
    _install(program(_MACHINES[platform.machine()], keep_metadata, os.geteuid() == 0, keeper))


def allow_computing_alone() -> None:
    """Refuse every system call but those for computing with the memory and the descriptors that the process has.

    It can then open no file and no socket, and start no process and no thread. Raises OSError.
    """
    _install(computing_program(_MACHINES[platform.machine()]))


def _install(made: bytes) -> None:
    prctl(NO_NEW_PRIVS, 1)
    instructions = ctypes.create_string_buffer(made, len(made))
    head = struct.pack("@HP", len(made) // 8, ctypes.addressof(instructions))
    prctl(SECCOMP, _FILTER_MODE, ctypes.create_string_buffer(head, len(head)))


def program(machine: _Machine, keep_metadata: bool, root: bool, keeper: int | None) -> bytes:
    """The filter of `filter_calls`."""
    numbers, code = machine.numbers, _of_architecture(machine)
    refused = [
        *_SHUT,
        *(_BY_PATH if keep_metadata else ()),
        *(_BY_DESCRIPTOR if keep_metadata and root else ()),
    ]
    for name in refused:
        if name in numbers:
            error = _ENOSYS if name == "io_uring_setup" else _EPERM
            code += [_step(_EQUAL, numbers[name], 0, 1), _step(_RETURN, _ERROR | error)]
    code += _argument_is(numbers["socket"], 0, (_AF_UNIX, _AF_VSOCK), _EAFNOSUPPORT)
    if keep_metadata:
        code += _argument_is(numbers["ioctl"], 1, (_SET_FLAGS, _SET_ATTRIBUTES), _EPERM)
        code += _times_by_path(numbers["utimensat"], root)
    if keeper is not None:
        for name, at in _AIMED.items():
            code += _argument_is(numbers[name], at, (keeper, -keeper, -1), _EPERM)
        code += _argument_is(numbers["prlimit64"], 0, (keeper,), _EPERM)
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def computing_program(machine: _Machine) -> bytes:
    """The filter of `allow_computing_alone`."""
    allowed = [
        step for number in machine.computing for step in (_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW))
    ]
    return b"".join([*_of_architecture(machine), *allowed, _step(_RETURN, _ERROR | _EPERM)])


def _of_architecture(machine: _Machine) -> list[bytes]:
    """The beginning of a filter: loads the number of a call. A call of another architecture kills the process."""
    return [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_EQUAL, machine.architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        _step(_AT_LEAST, _X32, 0, 1),
        _step(_RETURN, _ERROR | _ENOSYS),
    ]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """An instruction of a filter: struct sock_filter."""
    return struct.pack("=HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


def _argument_is(number: int, at: int, values: Sequence[int], error: int) -> list[bytes]:
    """Refuses call `number` if argument `at` has one of these values in its lower half: the argument has 32 bits."""
    checks = [_step(_LOAD, _ARGUMENTS_AT + 8 * at)]
    for value in values:
        checks += [_step(_EQUAL, value, 0, 1), _step(_RETURN, _ERROR | error)]
    checks.append(_step(_LOAD, _NUMBER_AT))
    return [_step(_EQUAL, number, 0, len(checks)), *checks]


def _times_by_path(number: int, root: bool) -> list[bytes]:
    """Refuses utimensat with a path. Without a path it changes an open file, which root may not do either."""
    refuse = _step(_RETURN, _ERROR | _EPERM)
    if root:
        return [_step(_EQUAL, number, 0, 1), refuse]
    path = _ARGUMENTS_AT + 8
    checks = [
        *(_step(_LOAD, path), _step(_EQUAL, 0, 0, 2)),
        *(_step(_LOAD, path + 4), _step(_EQUAL, 0, 1, 0)),
        refuse,
        _step(_LOAD, _NUMBER_AT),
    ]
    return [_step(_EQUAL, number, 0, len(checks)), *checks]
