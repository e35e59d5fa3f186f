"""Compiling kernels ahead, in processes of their own, while a model's weights are read.

Half of Triton's work is Python, so threads of one process keep two or three cores busy, and processes all of them. One
process is forked from this one, which has imported all that it needs. It records which kernels a model launches, and
forks as many as there are processors, which compile those that are not in Triton's cache. Whoever launches a kernel
that is on its way waits for it, and it is compiled next.
"""

import gc
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import torch
import triton

from quengine.kernels.cuda.launch import triton_cache
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.kernels.cuda.launch.launcher import LauncherSpec, build_launcher, build_utilities, launcher_of
from quengine.kernels.cuda.launch.record_kernels import Kernel, record_kernels

_log = logging.getLogger(__name__)

_SLOW = ("matvec_kernel", "norm_kernel", "wgmma_two_parts_kernel", "experts_glu_kernel", "experts_add_kernel")
"""Kernels that take seconds to compile, the longest first; the others take one at most."""

MOST_PROCESSES = 32
_NICENESS = 5
"""Reading the weights comes first."""
_SHOWN_AFTER = 1.0
"""Seconds of waiting before the user is told how far the kernels are."""
_MOST_SILENCE = 60.0
"""Seconds without a report after which the processes are given up; no kernel takes half as long."""


@dataclass(frozen=True)
class Built:
    """A kernel that is in the cache now: its folder there, and what launches it. error: why it is not there."""

    key: str
    name: str
    launcher: LauncherSpec | None
    error: str = ""


class CompilePool:
    """Processes that compile what `stages` launch on `gpu`, those of the first stage first.

    Args:
        stages: computations on the meta device (`record_kernels`).
        processes: that compile at once.
        progress: called with a line for the user while one waits for kernels; "": no more.
        every: also pass kernels that are in the cache already; `finish` returns what has been passed.
        marker: a file to make when all are there.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[], object]],
        gpu: Gpu,
        processes: int,
        progress: Callable[[str], None] | None = None,
        every: bool = False,
        marker: Path | None = None,
    ) -> None:
        self.gpu, self.processes = gpu, min(processes, MOST_PROCESSES)
        self._progress = progress or (lambda _: None)
        self._lock = threading.Lock()
        self._pending: set[str] | None = None  # not known yet
        self._total, self._waited, self._ended = 0, 0.0, False
        self._built: list[Built] = []
        self._told_at = logging.INFO if every else logging.WARNING
        triton_cache.use_private_cache()
        self._pid, self._pipe = _fork(
            lambda pipe: _Leader(pipe, stages, gpu, self.processes, every, marker).run()
        )
        triton_cache.before_lookup.append(self.wait)

    def wait(self, key: str) -> None:
        """Return when a kernel is in the cache, or nobody compiles it."""
        with self._lock:
            self._receive_until(lambda: self._pending is not None)
            if self._pending and key in self._pending:
                with suppress(OSError):
                    self._pipe.send(key)
                self._receive_until(lambda: key not in (self._pending or ()))

    def finish(self) -> list[Built]:
        """Return when all are there, or the processes have ended."""
        with self._lock:
            self._receive_until(lambda: False)
        return self._built

    def _receive_until(self, done: Callable[[], bool]) -> None:
        """Take reports until `done`, or the last one."""
        shown, heard = False, time.monotonic()
        while not self._ended and not done():
            began = time.monotonic()
            try:
                if self._pipe.poll(0.2):
                    self._take(self._pipe.recv())
                    heard = time.monotonic()
                elif began - heard > _MOST_SILENCE:
                    _log.warning(
                        "the processes that compile kernels do not answer; kernels are compiled here"
                    )
                    self._end()
            except (EOFError, OSError):
                self._end()
            self._waited += time.monotonic() - began
            if self._waited > _SHOWN_AFTER and self._pending and not self._ended:
                ready = self._total - len(self._pending)
                self._progress(
                    f"compiling kernels for {self.gpu.name or f'sm_{self.gpu.arch}'}: {ready} of {self._total}"
                )
                shown = True
        if shown:
            self._progress("")

    def _take(self, report: list[str] | Built) -> None:
        if isinstance(report, Built):
            self._built.append(report)
            (self._pending or set()).discard(report.key)
            if report.error:
                _log.info("%s was not compiled ahead: %s", report.name, report.error)
            return
        self._pending, self._total = set(report), len(report)
        if report:
            text = "compiling %d kernels for %s with %d processes, once; later runs find them on disk"
            _log.log(self._told_at, text, len(report), self.gpu.name or f"sm_{self.gpu.arch}", self.processes)

    def _end(self) -> None:
        self._ended, self._pending = True, set()
        with suppress(ValueError):
            triton_cache.before_lookup.remove(self.wait)
        self._pipe.close()
        with suppress(OSError):
            os.kill(
                self._pid, signal.SIGKILL
            )  # it has ended, or does not answer; not yet waited for, so it is ours
            os.waitpid(self._pid, 0)


def finish_compiling() -> None:
    """Return when no pool of this process compiles any more."""
    for call in tuple(triton_cache.before_lookup):
        pool = getattr(call, "__self__", None)
        if isinstance(pool, CompilePool):
            pool.finish()


class _Leader:
    """The first forked process: records the kernels, and hands them out."""

    def __init__(
        self,
        pipe: Connection,
        stages: Sequence[Callable[[], object]],
        gpu: Gpu,
        processes: int,
        every: bool,
        marker: Path | None,
    ) -> None:
        self._pipe, self._stages, self._gpu, self._processes = pipe, stages, gpu, processes
        self._every, self._marker = every, marker

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._pipe.send(Built("", "the model", None, f"{type(error).__name__}: {error}"))

    def _run(self) -> None:
        torch.set_num_threads(1)  # the threads of the process in front are not here
        kernels = record_kernels(self._stages, self._gpu)
        self._waiting = sorted((k for k in kernels.values() if self._every or not _is_cached(k)), key=_order)
        self._pipe.send([kernel.key for kernel in self._waiting])
        # Each of them has the kernels in its memory, and is told a key.
        self._idle: list[Connection] = []
        pids = [_fork(lambda pipe: _work(pipe, kernels)) for _ in self._waiting[: self._processes]]
        utilities = [_fork(lambda _: build_utilities())] if self._waiting else []
        try:
            whole = self._hand_out([pipe for _, pipe in pids])
        finally:
            for pid, _ in (*pids, *utilities):
                os.kill(pid, signal.SIGKILL)
        if whole and self._marker is not None:
            with suppress(OSError):  # a cache that cannot be written: looked for again next time
                self._marker.touch(mode=0o600)

    def _hand_out(self, workers: list[Connection]) -> bool:
        """Until all are done, or nobody is there to do them or to ask. Whether none has failed."""
        busy: list[Connection] = []
        whole, idle = True, list(workers)
        while busy or (self._waiting and idle):
            while idle and self._waiting:
                busy.append(idle.pop())
                busy[-1].send(self._waiting.pop(0).key)
            for ready in wait([self._pipe, *busy]):
                assert isinstance(ready, Connection)
                try:
                    message = ready.recv()
                except EOFError:
                    if ready is self._pipe:
                        return False
                    busy.remove(ready)  # it crashed; its kernel is left to who launches it
                    whole = False
                    continue
                if ready is self._pipe:
                    self._waiting.sort(key=lambda kernel: kernel.key != message)
                else:
                    busy.remove(ready)
                    idle.append(ready)
                    whole &= not message.error
                    self._pipe.send(message)
        return whole and not self._waiting


def _order(kernel: Kernel) -> tuple[int, int]:
    return kernel.stage, _SLOW.index(kernel.name) if kernel.name in _SLOW else len(_SLOW)


def _is_cached(kernel: Kernel) -> bool:
    return bool(triton_cache.kernel_names(Path(triton.knobs.cache.dir) / kernel.key))


def _work(pipe: Connection, kernels: dict[str, Kernel]) -> None:
    """A process that compiles the kernels whose keys it is sent."""
    for key in _received(pipe):
        kernel, spec, error = kernels[key], None, ""
        try:
            spec = launcher_of(kernel.compile())
            if spec is not None:
                build_launcher(spec)
        except Exception as failure:  # the compiler's errors have no common class; a launch raises it again
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        pipe.send(Built(key, kernel.name, spec, error))


def _received(pipe: Connection) -> Iterator[str]:
    with suppress(EOFError):
        while True:
            yield pipe.recv()


def _fork(run: Callable[[Connection], object]) -> tuple[int, Connection]:
    """A forked process that does `run`, given its end of a pipe. Its number, and the other end.

    It has nothing else of this process open, ends with it, and leaves what this one would do at its end.
    """
    ours, theirs = Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are other threads; the child needs none of them
        pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    status = 1
    try:
        _leave_parent(theirs)
        run(theirs)
        status = 0
    except BaseException as error:
        with suppress(Exception):
            _log.debug("a compiling process ended: %r", error)
    finally:
        os._exit(status)


def _leave_parent(pipe: Connection) -> None:
    triton_cache.before_lookup.clear()
    gc.disable()  # finalizers of objects that are the other process's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(max(0, _NICENESS - os.nice(0)))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    # Those that are open: of the numbers that could be there may be a thousand million.
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != pipe.fileno():
            with suppress(OSError):
                os.close(number)


def marker(*what: object) -> Path:
    """The file in Triton's cache that says: this version of the kernels was compiled for `what` (GPU, model, ...).

    It goes with the cache it speaks of. A wrong one does no harm: a kernel that is missing is compiled at its launch.
    """
    digest = sha256(repr((triton.__version__, *what)).encode())
    digest.update(source_stamp())
    return Path(triton.knobs.cache.dir) / f"quengine-{digest.hexdigest()[:32]}"


def source_stamp() -> bytes:
    """Names this version of the modules that kernels are in."""
    digest = sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()
