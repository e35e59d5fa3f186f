"""The processes that compile kernels for another process (compile_ahead.py).

The first is started, not forked: a fork of a process that uses a GPU may deadlock on a lock of one of its other
threads. It records the kernels that a model launches, and forks processes, each with the kernels in its memory, which
compile those missing from Triton's cache. It ends with the process that started it, and its forks end with it.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from threading import Thread

import torch
import triton
from triton.runtime.cache import triton_key

from quengine.kernels.cuda.launch import triton_cache
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.kernels.cuda.launch.launcher import LauncherSpec, build_launcher, build_utilities, launcher_of
from quengine.kernels.cuda.launch.record_kernels import Kernel, record_kernels

Stages = Sequence[Callable[[], object]]
"""Computations, in order."""

_SLOW = (
    "wgmma_groups_kernel",
    "choose_kernel",
    "candidates_kernel",
    "choose_from_all_kernel",
    "attention_wgmma_kernel",
    "glu_kernel",
    "matvec_kernel",
    "experts_add_kernel",
    "wgmma_two_parts_kernel",
    "norm_kernel",
    "wgmma_blocks_kernel",
    "experts_glu_kernel",
)
"""Kernels that may take half a second or more to compile, the slowest first; the others take less."""
_NICENESS = 5
"""Reading the weights has priority."""


@dataclass(frozen=True)
class Order:
    """A request to compile; see `CompilePool`."""

    task: Callable[[], Stages]
    gpu: Gpu
    processes: int
    every: bool
    marker: Path | None


@dataclass(frozen=True)
class Built:
    """A kernel that is now in the cache: its folder there, and, for an order of `every` kernel, its launcher.
    error: the reason if it could not be compiled.
    """

    key: str
    name: str
    launcher: LauncherSpec | None
    error: str = ""


def lead(descriptor: int) -> None:
    """The first process. Its pipe receives an Order, then keys of kernels to compile next; it sends a list of
    kernel keys for each computation, None after the last, and a Built for each kernel.
    """
    pipe = Connection(descriptor)
    os.nice(_NICENESS)
    torch.set_num_threads(1)  # the process will be forked
    triton_cache.use_private_cache()
    # Triton hashes its compiler library of some 400 MB; do so while the order's modules are imported.
    hashing = Thread(target=triton_key)
    hashing.start()
    try:
        order: Order = pipe.recv()
        hashing.join()
        whole = _Leader(pipe, order).run()
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        pipe.send(Built("", "the model", None, f"{type(error).__name__}: {error}"))
        return
    if whole and order.marker is not None:
        with suppress(OSError):  # the cache is not writable: the next start records again
            order.marker.touch(mode=0o600)


class _Leader:
    """Hands out an order's kernels to forked processes, those of each computation while the next one is recorded."""

    def __init__(self, pipe: Connection, order: Order) -> None:
        self._pipe, self._order = pipe, order
        self._kernels: dict[str, Kernel] = {}
        self._waiting: list[Kernel] = []
        self._workers: dict[Connection, int] = {}  # the number of kernels that each has in its memory
        self._idle: list[Connection] = []
        self._busy: list[Connection] = []

    def run(self) -> bool:
        """Runs until all kernels are done; returns whether all are in the cache. Raises EOFError if the
        requester has ended.
        """
        processes = [_fork(lambda _: build_utilities())[0]]
        try:
            for compute in self._order.task():
                found = record_kernels([compute], self._order.gpu)
                new = [kernel for key, kernel in found.items() if key not in self._kernels]
                self._kernels |= found
                missing = sorted((k for k in new if self._order.every or not _is_cached(k)), key=_order)
                self._pipe.send([kernel.key for kernel in missing])
                self._waiting += missing
                for _ in missing[: self._order.processes]:
                    process, end = _fork(lambda pipe: _work(pipe, self._kernels, self._order.every))
                    processes.append(process)
                    self._workers[end] = len(self._kernels)
                    self._idle.append(end)
                self._hand_out()
            self._pipe.send(None)
            return self._finish()
        finally:
            for process in processes:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)

    def _hand_out(self) -> None:
        """Gives kernels to idle processes that have them in memory."""
        numbers = {key: number for number, key in enumerate(self._kernels)}
        for kernel in tuple(self._waiting):
            able = [end for end in self._idle if numbers[kernel.key] < self._workers[end]]
            if len(self._busy) >= self._order.processes:
                return
            if not able:
                continue
            self._waiting.remove(kernel)
            self._idle.remove(able[0])
            self._busy.append(able[0])
            able[0].send(kernel.key)

    def _finish(self) -> bool:
        """Runs until all are done, or no process is left; returns whether none has failed."""
        whole = True
        while self._busy:
            for ready in wait([self._pipe, *self._busy]):
                assert isinstance(ready, Connection)
                if ready is self._pipe:
                    wanted = ready.recv()
                    self._waiting.sort(key=lambda kernel: kernel.key != wanted)
                    continue
                self._busy.remove(ready)
                try:
                    built: Built = ready.recv()
                except EOFError:  # it crashed; its kernel is compiled when it is launched
                    whole = False
                    continue
                self._idle.append(ready)
                whole &= not built.error
                self._pipe.send(built)
            self._hand_out()
        return whole and not self._waiting


def _order(kernel: Kernel) -> int:
    return _SLOW.index(kernel.name) if kernel.name in _SLOW else len(_SLOW)


def _is_cached(kernel: Kernel) -> bool:
    return bool(triton_cache.kernel_names(Path(triton.knobs.cache.dir) / kernel.key))


def _work(pipe: Connection, kernels: dict[str, Kernel], tells_launchers: bool) -> None:
    """A process that compiles the kernels whose keys it receives."""
    for key in _received(pipe):
        kernel, spec, error = kernels[key], None, ""
        try:
            spec = launcher_of(kernel.compile())
            if spec is not None:
                build_launcher(spec)
        # the compiler's errors have no common base class; a launch raises it again
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        pipe.send(Built(key, kernel.name, spec if tells_launchers else None, error))


def _received(pipe: Connection) -> Iterator[str]:
    with suppress(EOFError):
        while True:
            yield pipe.recv()


def _fork(run: Callable[[Connection], object]) -> tuple[int, Connection]:
    """Forks a process that calls `run` with its end of a pipe. Returns its pid, and the other end.

    It has no other pipe of this process open, and so ends with it.
    """
    ours, theirs = Pipe()
    process = os.fork()
    if process:
        theirs.close()
        return process, ours
    status = 1
    try:
        gc.disable()  # compiling creates many objects, and a process compiles few kernels
        for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if number > 2 and number != theirs.fileno():
                with suppress(OSError):  # the folder's own descriptor
                    os.close(number)
        run(theirs)
        status = 0
    finally:
        os._exit(status)
