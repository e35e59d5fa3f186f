"""The kernel that adds a residual or a bias to matvec results (add.py), with its vector code.

Does not know: which of the two it adds.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.cpu.ir.row_ir import emitter, get
from quengine.kernels.cpu.ir.vector_ir import F32, vec
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def add_kernel() -> bytes:
    """0 y (fp32), 1 addend (fp32), 2 columns, 3 columns per task, 4 rows, 5 y stride, 6 addend stride."""
    variant = "add"

    def add_span(context: int, task: int) -> None:
        first, last = task * get(context, 3), min(get(context, 2), (task + 1) * get(context, 3))
        for row in range(get(context, 4)):
            y, addend = get(context, 0) + row * get(context, 5), get(context, 1) + row * get(context, 6)
            _add(variant, y, addend, first, last)

    return compile_kernel(add_span)


@intrinsic(prefer_literal=True)
def _add(typingctx: Any, variant: Any, y: Any, addend: Any, first: Any, last: Any) -> Any:
    """fp32 at address y plus those at address addend, elements first .. last - 1."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, y, addend, first, last = args
        e = emitter(context, builder)

        def add(i: ir.Value, lanes: int) -> None:
            at, lane = builder.mul(i, e.i64(4)), vec(F32, lanes)
            e.store(builder.fadd(e.load(lane, e.at(y, at)), e.load(lane, e.at(addend, at))), e.at(y, at))

        e.spans(first, last, add)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 4), codegen
