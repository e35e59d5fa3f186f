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
    prefetch_lines,
    yield_cpu,
)
from quengine.kernels.cpu.runtime.compiled import compile_function
from quengine.kernels.cpu.runtime.threads import (
    COUNTERS,
    DISMISSED,
    INSIDE,
    LAUNCH_BYTES,
    LENGTH,
    OPEN,
    TABLE,
    THREADS,
)

# Turns of a wait loop, each a pause of 10 to 60 ns, after which every turn yields the CPU.
_YIELD_AFTER = 1_000
# Turns after which a thread that waits for a task sleeps: the task's owner was descheduled, maybe in favour of the
# waiting thread. A scheduler may ignore sched_yield; without the sleep a token took 3 times as long on a busy machine.
_NAP_AFTER, _NAP_MICROSECONDS = _YIELD_AFTER + 50, 5
# The most bytes of its own tasks' weights that a waiting thread prefetches, and cache lines per turn. Waits take an
# eighth of a step on 16 threads, during which the memory is idle.
_MOST_AHEAD, _LINES = 1 << 17, 4
# Turns of the watch loop before a thread sleeps: some 2 ms, mostly yielding. Between two tokens Python takes 0.4 ms.
_WATCH = 10_000


def lead_function() -> bytes:
    """lead(state, number, table, length, counters), below."""
    return compile_function(lead, types.void, 5)


def watch_function() -> bytes:
    """watch(state, seen, thread), below; it returns an int64."""
    return compile_function(watch, types.int64, 3)


def lead(state: int, number: int, table: int, length: int, counters: int) -> None:
    """Publishes a list, works on it, and returns when it is finished and no thread reads it any more."""
    atomic_store(state + TABLE, table)
    atomic_store(state + LENGTH, length)
    atomic_store(state + COUNTERS, counters)
    atomic_store(state + OPEN, number)
    threads = atomic_load(state + THREADS)
    counter_bytes = 64 * (1 + threads)
    _work(table, length, counters, threads, 0)
    for i in range(length):
        _await(counters + i * counter_bytes, atomic_load(table + i * LAUNCH_BYTES + 16), 0, 0)
    atomic_store(state + OPEN, 0)
    turns = 0
    while atomic_load(state + INSIDE) > 0:
        turns += 1
        _wait(turns)


def watch(state: int, seen: int, thread: int) -> int:
    """As thread number `thread`, from 1 on, joins every list published after number `seen`.

    Returns the last one's number when none comes for a while.
    """
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
                table, length, counters = state + TABLE, state + LENGTH, state + COUNTERS
                threads = atomic_load(state + THREADS)
                _work(atomic_load(table), atomic_load(length), atomic_load(counters), threads, thread)
                turns = 0
            fetch_add(state + INSIDE, -1)
            seen = number
    return seen


@njit
def _work(table: int, length: int, counters: int, threads: int, thread: int) -> None:
    """Takes tasks of each kernel of a list: the thread's own, in order, then those that others have not taken yet."""
    finished, counter_bytes = 0, 64 * (1 + threads)
    for i in range(length):
        launch, counter = table + i * LAUNCH_BYTES, counters + i * counter_bytes
        tasks, after_previous = atomic_load(launch + 16), atomic_load(launch + 24)
        if after_previous:
            first, last = thread * tasks // threads, (thread + 1) * tasks // threads
            weights, task_bytes = atomic_load(launch + 32), atomic_load(launch + 40)
            ahead = weights + first * task_bytes
            end = ahead + min((last - first) * task_bytes, _MOST_AHEAD)
            while finished < i:
                of = atomic_load(table + finished * LAUNCH_BYTES + 16)
                ahead = _await(counters + finished * counter_bytes, of, ahead, end)
                finished += 1
        _take(launch, table, counter, threads, thread)
        for other in range(thread + 1, thread + threads):
            if atomic_load(counter) == tasks:
                break
            _take(launch, table, counter, threads, other % threads)


@njit
def _take(launch: int, table: int, counter: int, threads: int, owner: int) -> None:
    """Runs those tasks of an owner that nobody has taken yet."""
    kernel, context = atomic_load(launch), table + atomic_load(launch + 8)
    tasks, taken = atomic_load(launch + 16), counter + 64 * (1 + owner)
    first, last = owner * tasks // threads, (owner + 1) * tasks // threads
    done, task = 0, first + atomic_load(taken)
    while task < last:
        task = first + fetch_add(taken, 1)
        if task < last:
            call_kernel(kernel, context, task)
            done += 1
    if done:
        fetch_add(counter, done)


@njit
def _await(done: int, tasks: int, ahead: int, last: int) -> int:
    """Waits for tasks, and meanwhile prefetches `ahead` .. last - 1; returns the first address that is not."""
    turns = 0
    while atomic_load(done) < tasks:
        if ahead < last:
            prefetch_lines(ahead, _LINES)
            ahead += 64 * _LINES
        else:
            turns += 1
            _wait(turns)
    return ahead


@njit
def _wait(turns: int) -> None:
    if turns > _NAP_AFTER:
        nap(_NAP_MICROSECONDS)
    elif turns > _YIELD_AFTER:
        yield_cpu()
    else:
        pause()
