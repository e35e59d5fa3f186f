"""Numba intrinsics for threads: atomic int64 at addresses, calls through a kernel's address, giving the CPU away."""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.cpu.ir.vector_ir import I32, I64

_ORDER = "seq_cst"


@intrinsic
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Atomically add to the int64 at an address; returns what was there before."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], _ORDER)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Any:
    """The int64 at an address."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), _ORDER, 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the int64 at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_kernel(typingctx: Any, kernel: Any, arguments: Any, task: Any) -> Any:
    """Call the machine code at an address as `kernel(arguments, task)`; the arguments may be given by address."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        signature = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(builder.inttoptr(args[0], signature.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, arguments, types.int64), codegen


@intrinsic
def nap(typingctx: Any, microseconds: Any) -> Any:
    """POSIX usleep: the CPU is free for about this long; a number below a million."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        function = builder.module.globals.get("usleep")
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(I32, [I32]), "usleep")
        builder.call(function, [builder.trunc(args[0], I32)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def yield_cpu(typingctx: Any) -> Any:
    """POSIX sched_yield: another thread may run on this CPU."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, _args: Any) -> ir.Value:
        function = builder.module.globals.get("sched_yield")
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen
