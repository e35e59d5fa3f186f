"""Stages: kernels fused so that the threads synchronise once instead of several times.

A task of a stage runs several kernels one after another (a matvec, then the residual of the rows that it computed).
Work that needs all tasks of the stage and is too small to split (a norm, the quantization of a row) is run by the
thread that finishes the last task, before the next stage starts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import chain_kernel
from quengine.kernels.cpu.runtime.threads import Launch

_LINE = 8  # int64 in a cache line


@dataclass
class ChainEntry(Arguments):
    """A kernel of a chain: its code, the address of its arguments, its number of tasks."""

    kernel: int
    arguments: int
    tasks: int


@dataclass
class ChainArguments(Arguments):
    """counter: address of the count of finished tasks; the stage's number of tasks is 64 bytes after it.

    entries: address of a `ChainEntry` for each of `parts` kernels of a task, then of `finals` kernels after the last
    task.
    """

    counter: int
    parts: int
    finals: int
    entries: int


@dataclass
class KernelStage:
    """The work between two synchronisations of the threads.

    parts   independent of each other. A part has kernels with equal numbers of tasks: one thread runs task i of the
            first, then task i of the second, and so on
    finals  kernels that one thread runs in order, every task of each, when all tasks of all parts are done
    """

    parts: list[list[Launch]] = field(default_factory=list)
    finals: list[Launch] = field(default_factory=list)
    # The count of finished tasks, and the number of tasks, on separate cache lines.
    _shared: array[int] = field(default_factory=lambda: array("q", bytes(8 * 3 * _LINE)))

    def launches(self) -> list[Launch]:
        """The stage for `run`, one launch per part; the first waits for earlier launches."""
        self.set_tasks(sum(part[0].tasks for part in self.parts))
        return [self._launch(part, i == 0) for i, part in enumerate(self.parts)]

    def set_tasks(self, tasks: int) -> None:
        """Sets the number of tasks of all parts together, from the next run on."""
        self._shared[_LINE] = tasks

    def _launch(self, part: Sequence[Launch], first: bool) -> Launch:
        assert all(launch.tasks == part[0].tasks for launch in part)
        if len(part) == 1 and not self.finals:
            return part[0]._replace(after_previous=first)
        keep: list[object] = []
        entries = array("q")
        for launch in (*part, *self.finals):
            arguments = array("q", launch.arguments.to_bytes())
            entry = ChainEntry(launch.kernel, arguments.buffer_info()[0], launch.tasks)
            entries.frombytes(entry.to_bytes())
            keep += [arguments, launch.keep]
        chain = ChainArguments(
            counter=self._shared.buffer_info()[0],
            parts=len(part),
            finals=len(self.finals),
            entries=entries.buffer_info()[0],
        )
        lead = part[0]
        held = (self._shared, entries, *keep)
        return Launch(chain_kernel(), chain, lead.tasks, first, held, lead.weights, lead.task_bytes)
