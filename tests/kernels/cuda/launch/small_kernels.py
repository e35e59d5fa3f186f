"""Kernels that take half a second to compile, recorded on the meta device: one for each number of entries a turn."""

import os
import signal
import socket
from collections.abc import Callable, Sequence

import torch

from quengine.kernels.channel import Channel
from quengine.kernels.cuda.launch import triton_cache
from quengine.kernels.cuda.launch.compile_messages import FROM_LEADER, TO_LEADER
from quengine.kernels.cuda.launch.compile_processes import lead
from quengine.kernels.cuda.sampling import batch_rows


def place(size: int) -> Callable[[], None]:
    """A launch of the kernel that takes `size` entries of a block table a turn."""

    def call() -> None:
        batch_rows._ENTRIES = size
        wide, narrow = (torch.zeros(4, dtype=kind, device="meta") for kind in (torch.int64, torch.int32))
        slots, inputs = (
            kind(wide, narrow, narrow.view(1, -1, 1))
            for kind in (batch_rows.SlotTables, batch_rows.RowInputs)
        )
        chosen = batch_rows.ChosenTokens(wide.view(1, -1), narrow)
        batch_rows.place_rows(batch_rows.StepRows(*[narrow] * 4), slots, inputs, chosen, 4)

    return call


def stages(sizes: Sequence[int]) -> list[Callable[[], None]]:
    return [place(size) for size in sizes]


def stops(sizes: Sequence[int]) -> list[Callable[[], None]]:
    """`stages`, whose process stops once it has recorded them: by then it has handed out as many as it may at a time,
    and hands out no other one before it is told to go on."""
    return [*stages(sizes), lambda: os.kill(os.getpid(), signal.SIGSTOP)]


def broken() -> list[Callable[[], None]]:
    raise ValueError("no such shape")


class Forked:
    """A process in the place of `ChildProcess`'s: forked, since its imports take seconds."""

    def __init__(self, *_: object, **__: object) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            triton_cache.when_missing.clear()
            lead(Channel(theirs, TO_LEADER))
            os._exit(0)
        theirs.close()
        self.channel = Channel(ours, FROM_LEADER)

    def close(self) -> None:
        self.channel.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
