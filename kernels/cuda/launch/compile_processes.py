"""The processes that compile kernels for another process (compile_ahead.py).

The first is started, not forked: a fork of a process that uses a GPU may deadlock on a lock of one of its other
threads. It records the kernels that a model launches. The processes that it forks have these in their memory, and
compile the kernels that are missing from Triton's cache. It ends with the process that started it, and its forks end
with it.
"""

import gc
import os
import pickle
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import triton

from quengine.kernels.channel import Channel
from quengine.kernels.child_process import parent_channel
from quengine.kernels.cuda.launch import triton_cache
from quengine.kernels.cuda.launch.compile_messages import CRASHED, TO_LEADER, Built, Order, ToLeader
from quengine.kernels.cuda.launch.launcher import build_launcher, build_utilities, launcher_of
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
"""Reading the weights has priority over recording what is to be compiled, and recording over compiling."""


_TO_WORKER, _FROM_WORKER = msgspec.msgpack.Decoder(str), msgspec.msgpack.Decoder(Built)


def main() -> None:
    """The first process, once it has its imports (compiler_process.py)."""
    lead(parent_channel(TO_LEADER))


def lead(channel: Channel[ToLeader]) -> None:
    """What the first process does. It receives an Order, then keys of kernels that are wanted next. It sends the keys
    of the kernels to compile, a list for each computation, then None; and a Built for each kernel."""
    os.nice(_NICENESS)
    torch.set_num_threads(1)  # the process will be forked
    try:
        order = channel.receive()
        assert isinstance(order, Order)
        os.environ["TRITON_CACHE_DIR"] = order.cache  # which Triton reads at each look-up
        triton_cache.use_private_cache()
        whole = _Leader(channel, order).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        channel.send(Built("", "the model", None, f"{type(error).__name__}: {error}"))
        return
    if whole and order.marker is not None:
        with suppress(OSError):  # a cache that cannot be written: looked for again next time
            Path(order.marker).touch(mode=0o600)


@dataclass(frozen=True, eq=False)
class _Worker:
    """A forked process that compiles. known: the number of kernels that it has in its memory."""

    process: int
    channel: Channel[Built]
    known: int

    def fileno(self) -> int:
        return self.channel.fileno()

    def end(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        self.channel.close()


class _Leader:
    """Hands out an order's kernels to forked processes: one computation's compile while the next one is recorded."""

    def __init__(self, channel: Channel[ToLeader], order: Order) -> None:
        self._channel, self._order = channel, order
        self._kernels: dict[str, Kernel] = {}
        self._waiting: dict[Kernel, int] = {}  # with the number of kernels that were recorded before each
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, Kernel] = {}
        self._whole = True  # none has failed

    def run(self) -> bool:
        """Runs until all kernels are done; returns whether all are in the cache. Raises EOFError if the
        requester has ended.
        """
        helper = _Worker(*_fork(lambda _: build_utilities()), 0)
        try:
            task: Callable[[], Stages] = pickle.loads(self._order.task)
            for compute in task():
                self._record(compute)
                self._hand_out()
                self._take_reports(0)
            self._channel.send(None)
            while self._busy:
                self._take_reports(None)
            return self._whole and not self._waiting
        finally:
            for worker in (helper, *self._idle, *self._busy):
                worker.end()

    def _record(self, compute: Callable[[], object]) -> None:
        found = record_kernels([compute], self._order.gpu)
        new = [kernel for key, kernel in found.items() if key not in self._kernels]
        places = {kernel: len(self._kernels) + place for place, kernel in enumerate(new)}
        self._kernels |= found
        missing = sorted((k for k in new if self._order.every or not _is_cached(k)), key=_order)
        if missing:
            self._channel.send([kernel.key for kernel in missing])
        self._waiting |= {kernel: places[kernel] for kernel in missing}

    def _hand_out(self) -> None:
        """Gives waiting kernels to processes, as many as may compile at a time. A process knows the kernels that were
        recorded before it was forked. If no idle process knows a kernel, a new one is forked; if there are as many as
        may be, it replaces an idle one."""
        for kernel, place in tuple(self._waiting.items()):
            if len(self._busy) >= self._order.processes:
                return
            worker = next((idle for idle in self._idle if place < idle.known), None)
            if worker is not None:
                self._idle.remove(worker)
            else:
                if len(self._idle) + len(self._busy) >= self._order.processes:
                    self._idle.pop(0).end()
                given = self._kernels, self._order.every
                worker = _Worker(
                    *_fork(lambda channel, given=given: _work(channel, *given)), len(self._kernels)
                )
            del self._waiting[kernel]
            self._busy[worker] = kernel
            with suppress(OSError):  # killed while it was idle: its end is what `_take_reports` reads
                worker.channel.send(kernel.key)

    def _take_reports(self, seconds: float | None) -> None:
        """Receives which kernels have been compiled and which are wanted next, then hands out more. seconds: how long
        to wait for a report at most; None: no limit."""
        channels: list[Channel[ToLeader] | _Worker] = [self._channel, *self._busy]
        for ready in select.select(channels, [], [], seconds)[0]:
            if not isinstance(ready, _Worker):
                wanted = self._channel.receive()
                first = {kernel: place for kernel, place in self._waiting.items() if kernel.key == wanted}
                self._waiting = first | self._waiting
                continue
            kernel = self._busy.pop(ready)
            try:
                built: Built = ready.channel.receive()
                self._idle.append(ready)
            except (EOFError, OSError):  # it crashed; who launches its kernel compiles it
                ready.end()
                built = Built(kernel.key, kernel.name, None, CRASHED)
            self._whole &= not built.error
            self._channel.send(built)
        self._hand_out()


def _order(kernel: Kernel) -> int:
    return _SLOW.index(kernel.name) if kernel.name in _SLOW else len(_SLOW)


def _is_cached(kernel: Kernel) -> bool:
    return bool(triton_cache.kernel_names(Path(triton.knobs.cache.dir) / kernel.key))


def _work(channel: Channel[str], kernels: dict[str, Kernel], tells_launchers: bool) -> None:
    """A worker process: compiles each kernel whose key it receives."""
    for key in _received(channel):
        kernel, spec, error = kernels[key], None, ""
        try:
            spec = launcher_of(kernel.compile())
            if spec is not None:
                build_launcher(spec)
        # the compiler's errors have no common base class; a launch raises it again
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        channel.send(Built(key, kernel.name, spec if tells_launchers else None, error))


def _received(channel: Channel[str]) -> Iterator[str]:
    with suppress(EOFError):
        while True:
            yield channel.receive()


def _fork(run: Callable[[Channel[str]], object]) -> tuple[int, Channel[Built]]:
    """Forks a process that calls `run` with its end of a channel. Returns the process's number and the other end.

    The fork has no other channel of this process open, and so ends with it.
    """
    ours, theirs = socket.socketpair()
    process = os.fork()
    if process:
        theirs.close()
        return process, Channel(ours, _FROM_WORKER)
    status = 1
    try:
        os.nice(_NICENESS)
        gc.disable()  # compiling creates many objects, and a process compiles few kernels
        for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if number > 2 and number != theirs.fileno():
                with suppress(OSError):  # the folder's own descriptor
                    os.close(number)
        run(Channel(theirs, _TO_WORKER))
        status = 0
    finally:
        os._exit(status)
