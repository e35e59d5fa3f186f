"""The kernels that add a residual or bias to matvec results and scale their rows (add.py), with their vector code."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from quengine.kernels.cpu.ir.row_ir import float_at, scale_row
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.ops.add import AddArguments, ScaleArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def add_kernel() -> bytes:
    """A task is `task_cols` columns of all rows."""

    def add_span(args: AddArguments, task: int) -> None:
        first, last = task * args.task_cols, min(args.cols, (task + 1) * args.task_cols)
        for row in range(args.rows):
            addend = args.addend + row * args.addend_stride
            _add(args.y + row * args.y_stride, addend, args.scale, first, last)

    return compile_kernel(add_span, AddArguments)


def scale_kernel() -> bytes:
    """A task is `task_cols` columns of all rows."""

    def scale_span(args: ScaleArguments, task: int) -> None:
        first, last = task * args.task_cols, min(args.cols, (task + 1) * args.task_cols)
        for row in range(args.rows):
            x = args.y + row * args.y_stride + 4 * first
            scale_row(x, float_at(args.scales, row), last - first, x)

    return compile_kernel(scale_span, ScaleArguments)


@vector_code(scale=types.float32)
def _add(e: Emitter, y: ir.Value, addend: ir.Value, scale: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """y += scale * addend, fp32 at addresses, elements first .. last - 1; the product is rounded."""

    def add(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        added = e.b.fmul(e.load(lane, e.at(addend, at)), e.splat(scale, lanes))
        e.store(e.b.fadd(e.load(lane, e.at(y, at)), added), e.at(y, at))

    e.spans(first, last, add)
