"""Processes of Python that begin with torch imported: forks of a process that has imported it, where it takes seconds.

`QuickPopen` is `subprocess.Popen`. A program of this interpreter (-c, -m) that is given no `preexec_fn`, and the
variables that imported packages have read, begins in such a fork, which imports the program; all else begins as ever.
What is asserted of a start (what it imports, what it does while it imports) takes `subprocess.Popen`.
"""

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

IMPORTED = (
    "torch",
    "triton",
    "numpy",
    "msgspec",
    "typer",
    "rich.console",
    "rich.markdown",
    "jinja2.sandbox",
    "prompt_toolkit",
    "starlette.applications",
    "uvicorn",
    "prometheus_client",
    "psutil",
    "tokenizers",
    "llguidance",
    "jsonschema_rs",
    # What most programs have of this package, but for those themselves.
    "quengine.llm",
    "quengine.kernels.cpu.backend",
    "quengine.serve.server",
)
_ELSEWHERE = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONIOENCODING")
_READ_BY_PACKAGES = (
    "PYTHON",
    "LD_",
    "TRITON",
    "TORCH",
    "OMP_",
    "MKL_",
    "OPENBLAS",
    "ATEN_",
    "CUDA_",
    "KMP_",
    "LANG",
    "LC_",
)
_PYTHON, _BEGAN = sys.executable, dict(os.environ)
"""With which packages are imported, whatever a test changes when the first program starts."""


def _as_imported(environment: dict[str, str]) -> dict[str, str]:
    """Of the variables, those that a package may have read when it was imported."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_BY_PACKAGES) and name not in _ELSEWHERE
    }


class QuickPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, by a fork where that is the same."""

    _ending: int | None = None
    """Of a fork: where its wait status comes, once it has ended."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        (executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell, *pipes, _restore, gid, gids, uid, umask,
            new_session, group) = rest  # fmt: skip
        environment = dict(os.environ if env is None else env)
        as_user = (executable, preexec_fn, gid, gids, uid) == (None,) * 5 and (umask, group) == (-1, -1)
        command = [os.fspath(each) for each in args] if not isinstance(args, (str, bytes)) else []
        strings = all(isinstance(each, str) for each in (*command, *environment.values()))
        server = None
        if (
            as_user
            and not shell
            and close_fds
            and strings
            and command[:1] == [_PYTHON]
            and _program(command[1:])
        ):
            server = _server_with(_as_imported(environment))
        if server is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        given = [pipes[0], pipes[3], pipes[5]]
        streams = [number if fd == -1 else fd for number, fd in enumerate(given)]
        ours, theirs = os.pipe()
        request = {
            "command": command, "environment": environment, "folder": os.fspath(cwd or Path.cwd()),
            "session": bool(new_session), "keep": list(pass_fds),
        }  # fmt: skip
        try:
            self.pid = server.start(request, [*streams, *pass_fds, theirs])
        finally:
            os.close(theirs)
        self._ending, self._child_created = ours, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._ending is None:
            return super()._try_wait(flags)  # type: ignore[misc,no-any-return]
        if flags & os.WNOHANG and not select.select([self._ending], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._ending, 8)
        os.close(self._ending)
        return self.pid, int.from_bytes(status, "little")

    def _internal_poll(self, _deadstate: Any = None, **options: Any) -> int | None:
        if self._ending is None:
            return super()._internal_poll(_deadstate, **options)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


run = FunctionType(
    subprocess.run.__code__, {**vars(subprocess), "Popen": QuickPopen}, "run", subprocess.run.__defaults__
)
run.__kwdefaults__ = subprocess.run.__kwdefaults__
"""`subprocess.run` by `QuickPopen`."""


def _program(arguments: Sequence[str]) -> tuple[str, int] | None:
    """The kind of a program, "-c" or "-m", and where its text or name is. None for other options, and for a file: those
    are the small ones, whose memory is limited."""
    at = 1 if arguments[:1] == ["-P"] else 0
    kinds = arguments[at : at + 1] in (["-c"], ["-m"])
    return (arguments[at], at + 1) if kinds and len(arguments) > at + 1 else None


class _Server:
    """The process that forks, in which packages were imported with these variables."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        without = {"PYTHONIOENCODING", "PYTHONUNBUFFERED", *_as_imported(_BEGAN)}
        others = {name: value for name, value in _BEGAN.items() if name not in without}
        with theirs:
            self._process = subprocess.Popen(
                [_PYTHON, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=others | variables,
            )

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """The process id of a program under way."""
        data = memoryview(json.dumps(request).encode())
        sizes = len(data).to_bytes(8, "little")
        with self._lock:
            try:
                socket.send_fds(self._socket, [sizes], descriptors)
                for at in range(0, len(data), 1 << 16):
                    self._socket.send(data[at : at + (1 << 16)])
                answer = self._socket.recv(8)
            except BaseException:  # a test's time has ended: what is answered later is no answer to another
                self._socket.close()
                with _servers_lock:
                    for key in [key for key, server in _servers.items() if server is self]:
                        del _servers[key]
                raise
        assert answer, "the process that forks has ended"
        return int.from_bytes(answer, "little")


_servers: dict[frozenset[tuple[str, str]], _Server | None] = {frozenset(_as_imported(_BEGAN).items()): None}
_servers_lock = threading.Lock()


def _server_with(variables: dict[str, str]) -> _Server | None:
    """The server for these variables; None where it would take longer than the one program that wants it, as far as is
    known now."""
    key = frozenset(variables.items())
    # Of two servers that threads make at once, one would end, and the ends of its programs would stay untold.
    with _servers_lock:
        if sys.platform != "linux" or key not in _servers:
            _servers[key] = None
            return None
        server = _servers[key] = _servers[key] or _Server(variables)
        return server


class _Forks:
    """In the process that forks: requests in, process ids out, and to each program's pipe its wait status."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._endings: dict[int, int] = {}

    def serve(self) -> dict[str, Any]:
        """Returns in a fork, with its request."""
        self._wake = wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            ready = select.select([self._requests, wake], [], [])[0]
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._requests in ready:
                request = self._take()
                if request is not None:
                    return request

    def _reap(self) -> None:
        while self._endings:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            ending = self._endings.pop(pid)
            os.write(ending, status.to_bytes(8, "little"))
            os.close(ending)

    def _take(self) -> dict[str, Any] | None:
        """Start a program. Its request in the fork, None here."""
        sizes, descriptors, _, _ = socket.recv_fds(self._requests, 8, 64)
        if not sizes:
            os._exit(0)  # who asks has ended
        data = bytearray()
        while len(data) < int.from_bytes(sizes, "little"):
            data += self._requests.recv(1 << 17)
        *streams, ending = descriptors
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            for each in (ending, self._requests.detach(), *self._wake, *self._endings.values()):
                os.close(each)
            request: dict[str, Any] = json.loads(data)
            _take_over(streams, [0, 1, 2, *request["keep"]])
            return request
        self._endings[pid] = ending
        for each in streams:
            os.close(each)
        self._requests.send(pid.to_bytes(8, "little"))
        return None


def _take_over(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors their numbers."""
    above = max(*descriptors, *numbers) + 1
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(high, numbers, strict=True):
        os.dup2(each, number, inheritable=True)
        os.close(each)


def _become(request: dict[str, Any], paths: list[str]) -> tuple[str, str]:
    """Make this process one that the command has started. What it runs: its kind and its text or name."""
    if request["session"]:
        os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    environment: dict[str, str] = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    _open_streams(environment)
    arguments: list[str] = request["command"][1:]
    program = _program(arguments)
    assert program is not None
    kind, at = program
    first = [] if arguments[0] == "-P" else ["" if kind == "-c" else str(Path.cwd())]
    sys.path[:] = [*first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    sys.argv = [kind, *arguments[at + 1 :]]
    return kind, arguments[at]


def _open_streams(environment: dict[str, str]) -> None:
    """Standard streams as an interpreter opens them, which this one has done with the same variables."""
    encoding, _, errors = environment.get("PYTHONIOENCODING", "").partition(":")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        policy = before.errors if not encoding or number == 2 else errors or "strict"
        stream = open(  # noqa: SIM115
            number,
            "w" if number else "r",
            1 if number and (number == 2 or os.isatty(number)) else -1,
            encoding=encoding or before.encoding,
            errors=policy,
            closefd=False,
        )
        if number:
            stream.reconfigure(write_through=bool(environment.get("PYTHONUNBUFFERED")))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(kind: str, program: str) -> None:
    if kind == "-m":
        runpy._run_module_as_main(program)  # type: ignore[attr-defined]
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    exec(compile(program, "<string>", "exec"), main.__dict__)


def _end(error: BaseException | None) -> NoReturn:
    """End as an interpreter does, but for taking all modules apart, which would copy what the forks share."""
    code = 0
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            code = error.code & 0xFF
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            code = 1
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as late:
        code = 120
        sys.excepthook(type(late), late, late.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


if __name__ == "__main__":
    for _name in IMPORTED:
        __import__(_name)
    for _name in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        while _name in sys.path:
            sys.path.remove(_name)
    gc.collect()
    gc.freeze()
    _paths = list(sys.path)
    _request = _Forks(socket.socket(fileno=int(sys.argv[1]))).serve()
    gc.unfreeze()
    _error: BaseException | None = None
    try:
        _run(*_become(_request, _paths))
    except BaseException as _caught:
        _error = _caught
    _end(_error)
