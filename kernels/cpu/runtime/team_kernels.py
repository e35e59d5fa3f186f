"""The compiled loops of the thread team (threads.py): publish a list of kernels, watch for one, work on it, wait."""

from __future__ import annotations

from numba import njit, types

from quengine.kernels.cpu.runtime.atomics import (
    atomic_load,
    atomic_store,
    call_kernel,
    fetch_add,
    nap,
    pause,
    yield_cpu,
)
from quengine.kernels.cpu.runtime.compiled import compile_function
from quengine.kernels.cpu.runtime.threads import (
    COUNTER_BYTES,
    COUNTERS,
    DISMISSED,
    INSIDE,
    LAUNCH_BYTES,
    LENGTH,
    OPEN,
    TABLE,
)

# Turns of a wait loop, each a pause of 10 to 60 ns, after which every turn yields the CPU.
_YIELD_AFTER = 1_000
# Turns after which a thread that waits for a task sleeps: the task's owner was descheduled, maybe in favour of the
# waiting thread. A scheduler may ignore sched_yield; without the sleep a token took 3 times as long on a busy machine.
_NAP_AFTER, _NAP_MICROSECONDS = _YIELD_AFTER + 50, 5
# Turns of the watch loop before a thread sleeps: some 2 ms, mostly yielding. Between two tokens Python takes 0.4 ms.
_WATCH = 10_000


def lead_function() -> bytes:
    """lead(state, number, table, length, counters), below."""
    return compile_function(lead, types.void, 5)


def watch_function() -> bytes:
    """watch(state, seen), below; it returns an int64."""
    return compile_function(watch, types.int64, 2)


def lead(state: int, number: int, table: int, length: int, counters: int) -> None:
    """Publishes a list, works on it, and returns when it is finished and no thread reads it any more."""
    atomic_store(state + TABLE, table)
    atomic_store(state + LENGTH, length)
    atomic_store(state + COUNTERS, counters)
    atomic_store(state + OPEN, number)
    _work(table, length, counters)
    for i in range(length):
        _await(counters + i * COUNTER_BYTES + 64, atomic_load(table + i * LAUNCH_BYTES + 16))
    atomic_store(state + OPEN, 0)
    turns = 0
    while atomic_load(state + INSIDE) > 0:
        turns += 1
        _wait(turns)


def watch(state: int, seen: int) -> int:
    """Joins every list published after number `seen`; returns the last one's number when none comes for a while."""
    turns = 0
    while turns < _WATCH and atomic_load(state + DISMISSED) == 0:
        turns += 1
        if turns > _YIELD_AFTER:
            yield_cpu()
        else:
            pause()
        number = atomic_load(state + OPEN)
        if number > seen:
            # The leader closes the list and then waits for the threads inside, so a thread that enters checks again.
            fetch_add(state + INSIDE, 1)
            if atomic_load(state + OPEN) == number:
                _work(atomic_load(state + TABLE), atomic_load(state + LENGTH), atomic_load(state + COUNTERS))
                turns = 0
            fetch_add(state + INSIDE, -1)
            seen = number
    return seen


@njit
def _work(table: int, length: int, counters: int) -> None:
    finished = 0
    for i in range(length):
        launch, counter = table + i * LAUNCH_BYTES, counters + i * COUNTER_BYTES
        kernel, context = atomic_load(launch), table + atomic_load(launch + 8)
        tasks, after_previous = atomic_load(launch + 16), atomic_load(launch + 24)
        if after_previous:
            while finished < i:
                _await(
                    counters + finished * COUNTER_BYTES + 64,
                    atomic_load(table + finished * LAUNCH_BYTES + 16),
                )
                finished += 1
        task = fetch_add(counter, 1)
        while task < tasks:
            call_kernel(kernel, context, task)
            fetch_add(counter + 64, 1)
            task = fetch_add(counter, 1)


@njit
def _await(done: int, tasks: int) -> None:
    turns = 0
    while atomic_load(done) < tasks:
        turns += 1
        _wait(turns)


@njit
def _wait(turns: int) -> None:
    if turns > _NAP_AFTER:
        nap(_NAP_MICROSECONDS)
    elif turns > _YIELD_AFTER:
        yield_cpu()
    else:
        pause()
