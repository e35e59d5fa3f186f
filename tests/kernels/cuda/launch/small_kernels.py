"""Kernels that take half a second to compile, recorded on the meta device: one for each number of rows a program."""

import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe

import torch

from quengine.kernels.cuda.launch import triton_cache
from quengine.kernels.cuda.launch.compile_processes import lead
from quengine.kernels.cuda.sampling import batch_rows


def settle(size: int) -> Callable[[], None]:
    """A launch of the kernel for `size` rows a program."""

    def call() -> None:
        batch_rows._BLOCK = size
        wide, narrow = (torch.zeros(4, dtype=kind, device="meta") for kind in (torch.int64, torch.int32))
        chosen = batch_rows.ChosenTokens(wide.view(1, -1), narrow)
        batch_rows.settle_rows(wide, narrow, narrow, chosen)

    return call


def stages(sizes: Sequence[int]) -> list[Callable[[], None]]:
    return [settle(size) for size in sizes]


def broken() -> list[Callable[[], None]]:
    raise ValueError("no such shape")


class Forked:
    """A process in the place of `subprocess.Popen`'s: forked, since its imports take seconds."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def fork_process(_prelude: str) -> tuple[Forked, Connection]:
    """As `compile_ahead._start_process`."""
    ours, theirs = Pipe()
    if pid := os.fork():
        theirs.close()
        return Forked(pid), ours
    ours.close()
    triton_cache.when_missing.clear()
    lead(theirs.fileno())
    os._exit(0)
