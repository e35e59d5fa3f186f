"""The thread team of the CPU backend: runs lists of kernels, each split into tasks that threads take in turn.

The calling thread works too, and waits only for tasks that another thread has already taken, so a thread that is slow
or not scheduled holds nothing up. A task writes only its own results, which do not depend on the thread that computes
them or on the number of threads.

Between lists the other threads watch for the next one for about two milliseconds, then sleep.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL, CFUNCTYPE, c_int64, memset
from dataclasses import dataclass, field
from threading import Lock, Semaphore, Thread, local
from typing import Any, NamedTuple

import torch

from quengine.errors import EngineError
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import lead_function, watch_function

# The team's state, int64, each on its own cache line: number of the open list (0: none), its table, its length, its
# counters; the number of threads working on it; whether the team is dismissed; the number of its threads.
OPEN, TABLE, LENGTH, COUNTERS, INSIDE, DISMISSED, THREADS = (64 * i for i in range(7))
# A launch in the table: kernel, offset of its arguments in the table (bytes), tasks, after_previous, weights, bytes of
# weights per task. Its counters, a cache line each: the tasks that are done; how many of each thread's own are taken.
LAUNCH_BYTES = 48
_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of Linux's prctl, in nanoseconds


class Launch(NamedTuple):
    """One kernel over `tasks` tasks.

    after_previous  it reads what earlier launches of the list write, so it starts when they have finished
    keep            objects kept alive: the tensors that the arguments point into
    weights         the address of what task 0 reads from memory first, or 0; that of task i is i * task_bytes after it
    """

    kernel: int
    arguments: Arguments
    tasks: int
    after_previous: bool = True
    keep: tuple[Any, ...] = ()
    weights: int = 0
    task_bytes: int = 0


def sleep_precisely() -> None:
    """Lets Linux end this thread's naps within a microsecond; by default it waits up to 50 more, longer than a nap."""
    if sys.platform == "linux":
        CDLL(None).prctl(_SET_TIMER_SLACK, 1_000, 0, 0, 0)


@dataclass
class _Team:
    """A team of `threads` threads, the calling one included."""

    threads: int
    state: array[int] = field(default_factory=lambda: array("q", bytes(512)))
    counters: array[int] = field(default_factory=lambda: array("q"))
    lists: int = 0
    lock: Lock = field(default_factory=Lock)
    bell: Semaphore = field(default_factory=lambda: Semaphore(0))
    asleep: int = 0
    asleep_lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.address = self.state.buffer_info()[0]
        self.state[THREADS // 8] = self.threads
        # CFUNCTYPE releases the GIL during the call.
        self.lead = CFUNCTYPE(None, *[c_int64] * 5)(lead_function())
        self.watch = CFUNCTYPE(c_int64, *[c_int64] * 3)(watch_function())
        for i in range(1, self.threads):
            Thread(target=self._follow, args=(i,), name=f"quengine-{i}", daemon=True).start()

    def _follow(self, thread: int) -> None:
        sleep_precisely()
        seen = 0
        while not self.state[DISMISSED // 8]:
            known = self.lists
            seen = self.watch(self.address, seen, thread)
            if self.goes_to_sleep(max(seen, known)):
                self.bell.acquire()

    def cleared_counters(self, launches: int) -> int:
        """The address of counters for a list of `launches` launches, all 0."""
        nbytes = 64 * (1 + self.threads) * launches
        if 8 * len(self.counters) < nbytes + 64:
            self.counters = array("q", bytes(nbytes + 64))
        address = self.counters.buffer_info()[0]
        address += -address % 64
        memset(address, 0, nbytes)
        return address

    def goes_to_sleep(self, known: int) -> bool:
        """Whether a thread may sleep until it is woken: not if a list was announced after it stopped watching."""
        with self.asleep_lock:
            if self.lists > known:
                return False
            self.asleep += 1
            return True

    def announce(self) -> int:
        """Wakes sleeping threads and keeps others awake for a list about to open; returns its number."""
        with self.asleep_lock:
            self.lists += 1
            if self.asleep:
                self.bell.release(self.asleep)
                self.asleep = 0
            return self.lists

    def dismiss(self) -> None:
        self.state[DISMISSED // 8] = 1
        self.announce()


class _Leader(local):
    """State of each thread that runs lists."""

    def __init__(self) -> None:
        sleep_precisely()
        self.ready = True
        self.collected: list[Launch] | None = None  # the kernels of the innermost `joined`


_leader = _Leader()
_team: _Team | None = None
_last_threads = 0
_team_lock = Lock()


def max_threads() -> int:
    """The most threads that `set_threads` accepts: the CPUs available to this process."""
    if hasattr(os, "sched_getaffinity"):  # Linux; elsewhere all CPUs
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(threads: int) -> None:
    """Sets the threads of the CPU kernels and of torch. Raises EngineError outside 1 .. max_threads()."""
    global _team
    if not 1 <= threads <= max_threads():
        raise EngineError(f"{threads} threads requested; this machine allows 1 to {max_threads()}")
    torch.set_num_threads(threads)
    with _team_lock:
        if _team is None or _team.threads != threads:
            previous, _team = _team, _Team(threads)
            if previous is not None:
                previous.dismiss()


def dismiss_threads() -> None:
    """Ends the threads of the CPU kernels; the next list starts the same number again."""
    global _team, _last_threads
    with _team_lock:
        if _team is not None:
            _last_threads = _team.threads
            _team.dismiss()
            _team = None


def get_threads() -> int:
    """The number of threads in use: `max_threads()` until `set_threads` is called."""
    return _the_team().threads


def _the_team() -> _Team:
    if _team is None:
        set_threads(_last_threads or max_threads())
    assert _team is not None
    return _team


def run(launches: Sequence[Launch]) -> None:
    """Runs kernels in order and returns when all have finished, without the GIL; within `joined` they run later."""
    if _leader.collected is None:
        Program(launches).run()
    else:
        _leader.collected += launches


@contextmanager
def joined() -> Iterator[None]:
    """Within this context, in this thread, `run` only collects kernels. They run at its end, as one list: until then
    nothing else may read what they compute."""
    outer, _leader.collected = _leader.collected, []
    try:
        yield
    except BaseException:
        _leader.collected = outer
        raise
    launches, _leader.collected = _leader.collected, outer
    run(launches)


class Program:
    """A list of kernels in the team's format: made once, run any number of times."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        entries, arguments, offset = list[int](), list[bytes](), LAUNCH_BYTES * len(launches)
        for kernel, values, tasks, after_previous, _, weights, task_bytes in launches:
            content = values.to_bytes()
            entries += (kernel, offset, tasks, after_previous, weights, task_bytes)
            arguments.append(content)
            offset += len(content)
        self._launches = tuple(launches)  # keeps the tensors alive
        self._table = array("q", entries)
        self._table.frombytes(b"".join(arguments))
        self._lock = Lock()

    def set_tasks(self, launch: int, tasks: int) -> None:
        """Sets the number of tasks of launch number `launch`, from the next run on."""
        self._table[launch * LAUNCH_BYTES // 8 + 2] = tasks

    def run(self) -> None:
        """Runs the kernels in order and returns when all have finished, without the GIL."""
        team = _team or _the_team()
        table = self._table.buffer_info()[0]
        with self._lock, team.lock:
            assert _leader.ready
            counters = team.cleared_counters(len(self._launches))
            team.lead(team.address, team.announce(), table, len(self._launches), counters)
