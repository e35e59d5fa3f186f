"""The thread team with a log: the cycles at which each call of a kernel begins and ends.

`log_calls` compiles the team's loops and the kernel that chains others anew for this process, with a call of a kernel
that is logged in place of theirs; nothing of it is stored. It must come before the first kernel runs.
"""

import time
from array import array

import numpy as np
from llvmlite import ir
from numba import njit, types
from numpy.typing import NDArray

from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import I64, Emitter
from quengine.kernels.cpu.runtime import stage, stage_kernels, team_kernels, threads
from quengine.kernels.cpu.runtime.atomics import call_kernel, fetch_add
from quengine.kernels.cpu.runtime.machine_code import link

MOST_CALLS = 1 << 20
CALL_BYTES = 32
"""A call in the log: the address of its arguments, its task, the cycles at which it began and ended."""

_calls = array("q", bytes(CALL_BYTES * MOST_CALLS))
_count = array("q", bytes(64))
_CALLS_AT, _COUNT_AT = _calls.buffer_info()[0], _count.buffer_info()[0]


@vector_code(result=types.int64)
def _cycles(e: Emitter) -> ir.Value:
    name = "llvm.readcyclecounter"
    declared = e.b.module.globals.get(name)
    return e.b.call(declared or ir.Function(e.b.module, ir.FunctionType(I64, []), name), [])


@vector_code
def _put(
    e: Emitter, call: ir.Value, arguments: ir.Value, task: ir.Value, began: ir.Value, ended: ir.Value
) -> None:
    for i, value in enumerate((arguments, task, began, ended)):
        e.store(value, call, 8 * i)


@njit
def _logged_call(kernel: int, arguments: int, task: int) -> None:
    began = _cycles()
    call_kernel(kernel, arguments, task)
    ended = _cycles()
    number = fetch_add(_COUNT_AT, 1)
    if number < MOST_CALLS:
        _put(_CALLS_AT + number * CALL_BYTES, arguments, task, began, ended)


def log_calls() -> None:
    """From now on, in this process, every call of a kernel by the team is logged."""
    team_kernels.call_kernel = stage_kernels.call_kernel = _logged_call
    lead, watch, chain = (
        link(code)
        for code in (
            team_kernels.lead_function(),
            team_kernels.watch_function(),
            stage_kernels.chain_kernel(),
        )
    )
    threads.lead_function, threads.watch_function, stage.chain_kernel = (
        (lambda address=address: address) for address in (lead, watch, chain)
    )


def clear() -> None:
    _count[0] = 0


def calls() -> NDArray[np.int64]:
    """The calls since `clear`, [calls, 4], in the order in which they ended."""
    held = np.frombuffer(_calls, np.int64).reshape(MOST_CALLS, 4)
    return held[: min(_count[0], MOST_CALLS)].copy()


def cycles_a_second() -> float:
    """The rate of the processor's counter."""
    import ctypes

    read = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(_cycle_function())
    first, began = read(0), time.perf_counter()
    time.sleep(0.05)
    last, ended = read(0), time.perf_counter()
    return (last - first) / (ended - began)


def _cycle_function() -> int:
    from quengine.kernels.cpu.runtime.compiled import compile_function

    def read(_: int) -> int:
        return _cycles()

    return link(compile_function(read, types.int64, 1))
