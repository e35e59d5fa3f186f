"""Atomics on int64 at addresses, calls of kernels by address, and yielding the CPU, for use in kernels."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import I32, I64, Emitter

_ORDER = "seq_cst"


@vector_code(result=types.int64)
def fetch_add(e: Emitter, address: ir.Value, value: ir.Value) -> ir.Value:
    """Atomically adds to the int64 at an address; returns the previous value."""
    return e.b.atomic_rmw("add", e.b.inttoptr(address, I64.as_pointer()), value, _ORDER)


@vector_code(result=types.int64)
def atomic_load(e: Emitter, address: ir.Value) -> ir.Value:
    """Atomically loads the int64 at an address."""
    return e.b.load_atomic(e.b.inttoptr(address, I64.as_pointer()), _ORDER, 8)


@vector_code
def read_lines(e: Emitter, address: ir.Value, count: ir.Value) -> None:
    """Reads each cache line of `count` bytes at an address, by atomic loads, which LLVM does not remove."""
    first = e.b.and_(address, e.i64(-64))

    def line(at: ir.Value) -> None:
        e.b.load_atomic(e.b.inttoptr(at, I64.as_pointer()), _ORDER, 8)

    e.each(first, e.b.add(address, count), 64, line)


@vector_code
def prefetch_lines(e: Emitter, address: ir.Value, count: int) -> None:
    """Prefetches `count` cache lines from an address on, which need not be mapped."""
    for line in range(count):
        e.prefetch(e.at(address, 64 * line))


@vector_code
def atomic_store(e: Emitter, address: ir.Value, value: ir.Value) -> None:
    """Atomically stores the int64 at an address."""
    e.b.store_atomic(value, e.b.inttoptr(address, I64.as_pointer()), _ORDER, 8)


@vector_code
def call_kernel(e: Emitter, kernel: ir.Value, arguments: ir.Value, task: ir.Value) -> None:
    """Calls the machine code at an address as `kernel(arguments, task)`."""
    signature = ir.FunctionType(ir.VoidType(), [I64, I64])
    e.b.call(e.b.inttoptr(kernel, signature.as_pointer()), [arguments, task])


@vector_code
def nap(e: Emitter, microseconds: ir.Value) -> None:
    """POSIX usleep: frees the CPU for about `microseconds`, below a million."""
    e.b.call(_c_function(e, "usleep", [I32]), [e.b.trunc(microseconds, I32)])


@vector_code
def pause(e: Emitter) -> None:
    """Tells the processor that this thread waits in a loop: the core's other thread and the bus get its share."""
    triple = e.b.module.triple
    if triple.startswith(("x86_64", "i686")):
        name, arguments = "llvm.x86.sse2.pause", []
    elif triple.startswith(("aarch64", "arm64")):
        name, arguments = "llvm.aarch64.hint", [ir.Constant(I32, 1)]
    else:
        return
    declared = e.b.module.globals.get(name)
    if declared is None:
        signature = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        declared = ir.Function(e.b.module, signature, name)
    e.b.call(declared, arguments)


@vector_code
def yield_cpu(e: Emitter) -> None:
    """POSIX sched_yield: lets another thread run on this CPU."""
    e.b.call(_c_function(e, "sched_yield", []), [])


def _c_function(e: Emitter, name: str, parameters: list[ir.Type]) -> ir.Function:
    declared = e.b.module.globals.get(name)
    return declared or ir.Function(e.b.module, ir.FunctionType(I32, parameters), name)
