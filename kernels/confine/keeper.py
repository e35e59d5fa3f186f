"""Runs a program and, when it ends, kills all that it has started, even what has left its session or its parent.

Arguments: "confined" or "free", the folder that the program may write in, one more for temporary files, and the program
with its own arguments. A confined program has a PID namespace, which ends as a whole. Where there can be none, and for
a free program, this process adopts and kills what loses its parent. SIGTERM ends all of it. The exit status is the
program's.
"""

import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from . import landlock, namespaces, privileges
from .libc import CHILD_SUBREAPER, DEATH_SIGNAL, prctl

_END_SECONDS = 5.0
"""How long children are killed over and over, as some may start new ones just as fast."""


def main() -> None:
    signal.signal(signal.SIGTERM, _leave)
    how, folder, temporary, *program = sys.argv[1:]
    confined = how == "confined"
    isolated = confined and namespaces.enter([folder, temporary])
    prctl(CHILD_SUBREAPER, 1)
    prctl(DEATH_SIGNAL, signal.SIGTERM)  # when the server ends
    keeper, status = os.getpid(), 0
    try:
        if isolated:
            _start_init()
        child = os.fork()
        if child == 0:
            _become(program, [folder, temporary] if confined else None, None if isolated else keeper)
        while (ended := os.wait())[0] != child:
            pass
        status = ended[1]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_all()
    _end_as(status)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


def _start_init() -> None:
    """Starts the first process of the PID namespace: it adopts orphans, and all others end with it."""
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of orphans stay
        prctl(DEATH_SIGNAL, signal.SIGKILL)
        os.closerange(0, 3)
        while True:
            signal.pause()


def _become(program: list[str], folders: list[str] | None, keeper: int | None) -> None:
    """Become the program, confined to `folders` if given. keeper: the keeper's process id, without a PID namespace."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        if folders is not None:
            privileges.drop_capabilities()
            prctl(DEATH_SIGNAL, signal.SIGKILL)
            landlock.confine(folders, _readable())
            privileges.filter_calls(keep_metadata=keeper is not None, keeper=keeper)
        os.execvp(program[0], program)
    except OSError as error:
        print(f"{program[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(126)


def _readable() -> list[str]:
    """The system's folders, those of programs, and Python's own."""
    programs = [*os.environ.get("PATH", "").split(os.pathsep), sys.base_prefix]
    if (Path(sys.executable).parents[1] / "pyvenv.cfg").is_file():
        programs.append(str(Path(sys.executable).parents[1]))
    settings = landlock.open_parts("/etc") if os.geteuid() == 0 else ["/etc"]
    return [*landlock.SYSTEM, *settings, *filter(os.path.isabs, programs)]


def _end_all() -> None:
    """Kill all children; a child's children become this process's, if its namespace does not end them."""
    late = time.monotonic() + _END_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < late:
            for child in _children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            os.wait()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _children() -> list[int]:
    """The ids of this process's children, from /proc, which does not belong to their PID namespace."""
    me, found = os.getpid(), []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError):
                parent = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()[1]
                if int(parent) == me:
                    found.append(int(entry.name))
    return found


def _end_as(status: int) -> None:
    """End with the program's exit code, or by the signal that ended it."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        sys.exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program's own core is the one of interest
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
