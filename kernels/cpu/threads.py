"""The thread team of the CPU backend: runs lists of kernels, each split into tasks that threads take in turn.

The calling thread works too, and waits only for tasks that another thread has already taken. So a thread that the
machine slows down or does not start holds nothing up. A task writes its own results only: what is computed does not
depend on who computes it, nor on how many threads there are.

Between lists the other threads watch for the next one for a fraction of a millisecond, then sleep.

Does not know: what the kernels compute.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from ctypes import memset
from dataclasses import dataclass, field
from threading import Lock, Semaphore, Thread
from typing import Any, NamedTuple

import torch

from quengine.errors import EngineError
from quengine.kernels.cpu.atomics import atomic_load, atomic_store, call_kernel, fetch_add, nap, yield_cpu
from quengine.kernels.cpu.compiled import compiled_function

_YIELD_AFTER = (
    2_000  # turns of a waiting loop, microseconds, before each further turn offers the CPU to others
)
# Turns after which a thread that waits for a task sleeps: the owner was taken off its CPU, maybe to run the waiting
# one. A scheduler need not take an offer to yield as a reason to run the other; on a busy machine a token took 3 times
# as long.
_NAP_AFTER, _NAP_MICROSECONDS = _YIELD_AFTER + 50, 50
_WATCH = 4_000  # turns of the watching loop before a thread sleeps: about a millisecond, most of it offered

# The team's state, int64, each on its own cache line: which list is open (0: none), its table, its length, its
# counters; how many threads are at work on it; whether the team is dismissed.
_OPEN, _TABLE, _LENGTH, _COUNTERS, _INSIDE, _DISMISSED = (64 * i for i in range(6))
# A launch in the table: kernel, where its parameters lie in the table (bytes), tasks, after_previous. Its counters:
# tasks taken and tasks done, a cache line each.
_LAUNCH_BYTES, _COUNTER_BYTES = 32, 128


class Launch(NamedTuple):
    """One kernel over `tasks` tasks.

    parameters      its int64 context
    after_previous  it reads what earlier launches of the list write, so it starts when those have finished
    keep            the tensors that the parameters point into
    """

    kernel: int
    parameters: tuple[int, ...]
    tasks: int
    after_previous: bool = True
    keep: tuple[Any, ...] = ()


@dataclass
class _Team:
    """Threads beside the calling one."""

    threads: int
    state: array[int] = field(default_factory=lambda: array("q", bytes(512)))
    lists: int = 0
    lock: Lock = field(default_factory=Lock)
    bell: Semaphore = field(default_factory=lambda: Semaphore(0))
    asleep: int = 0
    asleep_lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.address = self.state.buffer_info()[0]
        for i in range(self.threads - 1):
            Thread(target=self._follow, name=f"quengine-{i + 1}", daemon=True).start()

    def _follow(self) -> None:
        seen = 0
        while not self.state[_DISMISSED // 8]:
            seen = _watch(self.address, seen)
            with self.asleep_lock:
                self.asleep += 1
            self.bell.acquire()

    def wake(self) -> None:
        with self.asleep_lock:
            if self.asleep:
                self.bell.release(self.asleep)
                self.asleep = 0

    def dismiss(self) -> None:
        self.state[_DISMISSED // 8] = 1
        self.wake()


_team: _Team | None = None
_team_lock = Lock()


def max_threads() -> int:
    """The most threads that `set_threads` accepts: the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux; elsewhere all CPUs
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(threads: int) -> None:
    """Use this many threads in the CPU kernels and in torch. Raises EngineError outside 1 .. max_threads()."""
    global _team
    if not 1 <= threads <= max_threads():
        raise EngineError(f"{threads} threads asked for; this machine allows 1 to {max_threads()}")
    torch.set_num_threads(threads)
    with _team_lock:
        if _team is None or _team.threads != threads:
            previous, _team = _team, _Team(threads)
            if previous is not None:
                previous.dismiss()


def get_threads() -> int:
    """Threads in use: all that the process may use, until `set_threads` is called."""
    return _the_team().threads


def _the_team() -> _Team:
    if _team is None:
        set_threads(max_threads())
    assert _team is not None
    return _team


def run(launches: Sequence[Launch]) -> None:
    """Run kernels in order and return when all have finished. The interpreter is free meanwhile."""
    Program(launches).run()


class Program:
    """A list of kernels in the form that the team reads: made once, run any number of times."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        table, parameters = array("q"), array("q")
        for launch in launches:
            offset = _LAUNCH_BYTES * len(launches) + 8 * len(parameters)
            table.extend((launch.kernel, offset, launch.tasks, launch.after_previous))
            parameters.extend(launch.parameters)
        table.extend(parameters)
        self._launches = tuple(launches)  # holds the tensors
        self._table = table
        self._counters = array("q", bytes(_COUNTER_BYTES * len(launches)))
        self._lock = Lock()

    def set_tasks(self, launch: int, tasks: int) -> None:
        """From the next run on, launch number `launch` has this many tasks."""
        self._table[launch * _LAUNCH_BYTES // 8 + 2] = tasks

    def run(self) -> None:
        """Run the kernels in order and return when all have finished. The interpreter is free meanwhile."""
        team = _the_team()
        table, counters = self._table.buffer_info()[0], self._counters.buffer_info()[0]
        with self._lock, team.lock:
            memset(counters, 0, _COUNTER_BYTES * len(self._launches))
            team.lists += 1
            if team.asleep:
                team.wake()
            _lead(team.address, team.lists, table, len(self._launches), counters)


@compiled_function
def _wait(turns: int) -> None:
    if turns > _NAP_AFTER:
        nap(_NAP_MICROSECONDS)
    elif turns > _YIELD_AFTER:
        yield_cpu()


@compiled_function
def _lead(state: int, number: int, table: int, length: int, counters: int) -> None:
    """Publish a list, work on it, and return when it is finished and nobody looks at it any more."""
    atomic_store(state + _TABLE, table)
    atomic_store(state + _LENGTH, length)
    atomic_store(state + _COUNTERS, counters)
    atomic_store(state + _OPEN, number)
    _work(table, length, counters)
    for i in range(length):
        _await(counters + i * _COUNTER_BYTES + 64, atomic_load(table + i * _LAUNCH_BYTES + 16))
    atomic_store(state + _OPEN, 0)
    turns = 0
    while atomic_load(state + _INSIDE) > 0:
        turns += 1
        _wait(turns)


@compiled_function
def _watch(state: int, seen: int) -> int:
    """Join every list published after number `seen`; return the last one's number when none comes for a while."""
    turns = 0
    while turns < _WATCH and atomic_load(state + _DISMISSED) == 0:
        turns += 1
        if turns > _YIELD_AFTER:
            yield_cpu()
        number = atomic_load(state + _OPEN)
        if number > seen:
            # The leader closes the list and then waits for those inside: whoever enters looks again.
            fetch_add(state + _INSIDE, 1)
            if atomic_load(state + _OPEN) == number:
                _work(
                    atomic_load(state + _TABLE), atomic_load(state + _LENGTH), atomic_load(state + _COUNTERS)
                )
                turns = 0
            fetch_add(state + _INSIDE, -1)
            seen = number
    return seen


@compiled_function
def _work(table: int, length: int, counters: int) -> None:
    finished = 0
    for i in range(length):
        launch, counter = table + i * _LAUNCH_BYTES, counters + i * _COUNTER_BYTES
        kernel, context = atomic_load(launch), table + atomic_load(launch + 8)
        tasks, after_previous = atomic_load(launch + 16), atomic_load(launch + 24)
        if after_previous:
            while finished < i:
                _await(
                    counters + finished * _COUNTER_BYTES + 64,
                    atomic_load(table + finished * _LAUNCH_BYTES + 16),
                )
                finished += 1
        task = fetch_add(counter, 1)
        while task < tasks:
            call_kernel(kernel, context, task)
            fetch_add(counter + 64, 1)
            task = fetch_add(counter, 1)


@compiled_function
def _await(done: int, tasks: int) -> None:
    turns = 0
    while atomic_load(done) < tasks:
        turns += 1
        _wait(turns)
