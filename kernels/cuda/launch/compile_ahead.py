"""Compiles kernels ahead of their launch, in separate processes, while a model's weights are read.

Half of Triton's work is Python, so threads of one process keep two or three cores busy, and processes all of them
(compile_processes.py). A launch of a kernel that is being compiled waits for it, and moves it to the front of the
queue.
"""

import logging
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import triton

from quengine.kernels.compile_clock import compiling
from quengine.kernels.cuda.launch import compiler_process, triton_cache
from quengine.kernels.cuda.launch.compile_messages import FROM_LEADER, Built, FromLeader, Order
from quengine.kernels.cuda.launch.compile_processes import Stages
from quengine.kernels.cuda.launch.gpu import Gpu

_log = logging.getLogger(__name__)

MOST_PROCESSES = 32
_SHOWN_AFTER = 1.0
"""Seconds of waiting before progress is shown."""
_MOST_SILENCE = 60.0
"""Seconds without a report after which the processes are abandoned; no kernel takes half as long."""


class CompilePool:
    """Processes that compile the kernels that `task`'s computations launch on `gpu`, the first computation's first.

    Args:
        task: returns the computations, on the meta device (`record_kernels`); it is pickled, and called in another
            process.
        processes: the number of processes that compile at a time.
        progress: called with a line for the user while a launch waits for kernels; "" ends it.
        every: also process kernels that are in the cache already; `finish` returns them all.
        marker: a file to create when all kernels are in the cache.
        prelude: Python statements that the process runs before it imports torch.

    Attributes:
        complete: every kernel has been compiled.
    """

    def __init__(
        self,
        task: Callable[[], Stages],
        gpu: Gpu,
        processes: int,
        progress: Callable[[str], None] | None = None,
        every: bool = False,
        marker: Path | None = None,
        prelude: str = "",
    ) -> None:
        self.gpu, self.processes = gpu, min(processes, MOST_PROCESSES)
        self._progress = progress or (lambda _: None)
        self._lock = threading.Lock()
        self._pending: set[str] = set()
        self._recorded = self._ended = self.complete = False
        self._most_silence = float("inf") if every else _MOST_SILENCE  # many models take minutes to record
        self._total, self._waited = 0, 0.0
        self._built: list[Built] = []
        self._told_at = logging.INFO if every else logging.WARNING
        triton_cache.use_private_cache()
        self._process = compiler_process.taken(prelude)
        self._channel = self._process.channel.decoding(FROM_LEADER)
        done, folder = None if marker is None else str(marker), str(triton.knobs.cache.dir)
        self._channel.send(Order(pickle.dumps(task), gpu, self.processes, every, done, folder))
        triton_cache.when_missing.append(self.wait)

    def wait(self, key: str) -> None:
        """Waits until a kernel is in the cache, or is known not to be compiled here."""
        with self._lock, compiling():
            self._receive_until(lambda: self._recorded or key in self._pending)
            if key in self._pending:
                with suppress(OSError):
                    self._channel.send(key)
                self._receive_until(lambda: key not in self._pending)

    def finish(self) -> list[Built]:
        """Waits until all kernels are compiled, or the processes have ended; returns the kernels."""
        with self._lock:
            self._receive_until(lambda: False)
        return self._built

    def _receive_until(self, done: Callable[[], bool]) -> None:
        """Receives reports until `done`, or the last one."""
        shown, heard = False, time.monotonic()
        while not self._ended and not done():
            began = time.monotonic()
            try:
                if self._channel.poll(0.2):
                    self._take(self._channel.receive())
                    heard = time.monotonic()
                elif began - heard > self._most_silence:
                    _log.warning(
                        "the processes that compile kernels do not answer; kernels are compiled here"
                    )
                    self._end()
            except (EOFError, OSError):
                self._end()
            self._waited += time.monotonic() - began
            if self._waited > _SHOWN_AFTER and self._pending and not self._ended:
                ready = self._total - len(self._pending)
                self._progress(f"compiling kernels for {self._target}: {ready} of {self._total}")
                shown = True
        if shown:
            self._progress("")

    def _take(self, report: FromLeader) -> None:
        if isinstance(report, Built):
            self._built.append(report)
            self._pending.discard(report.key)
            if report.error:
                _log.info("%s was not compiled ahead: %s", report.name, report.error)
        elif report is not None:
            self._pending.update(report)
            self._total += len(report)
        else:
            self._recorded = True
            if self._total:
                text = "compiling %d kernels for %s with %d processes, once; later runs find them on disk"
                _log.log(self._told_at, text, self._total, self._target, self.processes)

    @property
    def _target(self) -> str:
        return self.gpu.name or f"sm_{self.gpu.arch}"

    def _end(self) -> None:
        self.complete = self._recorded and not self._pending
        self._ended = self._recorded = True
        self._pending.clear()
        with suppress(ValueError):
            triton_cache.when_missing.remove(self.wait)
        self._process.close()  # it has ended, or does not answer


def finish_compiling() -> None:
    """Waits until no pool of this process compiles any more."""
    for call in tuple(triton_cache.when_missing):
        pool = getattr(call, "__self__", None)
        if isinstance(pool, CompilePool):
            pool.finish()


def compiled_marker(*what: object) -> Path:
    """The marker file in Triton's cache: this version of the kernels has been compiled for `what` (GPU, model, ...).

    It is deleted with the cache. A stale marker does no harm: a missing kernel is compiled when it is launched.
    """
    digest = sha256(repr((triton.__version__, *what)).encode())
    digest.update(triton_cache.source_stamp())
    return Path(triton.knobs.cache.dir) / f"quengine-{digest.hexdigest()[:32]}"
