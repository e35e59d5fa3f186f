"""The kernel of activations without a gate and the quantization of the result, with its vector code."""

from __future__ import annotations

from llvmlite import ir

from quengine.kernels.cpu.ir.row_ir import quantize_row
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.ops.pointwise import PointwiseArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.pointwise import Pointwise

_LANES = 16


def pointwise_kernel(activation: Pointwise) -> bytes:
    """Task i is the i-th run of `task_cols` columns of every row."""
    assert activation == "relu2"

    def span(args: PointwiseArguments, task: int) -> None:
        first, last = task * args.task_cols, min(args.cols, (task + 1) * args.task_cols)
        for row in range(args.rows):
            x = args.x + 4 * args.cols * row
            _squared_relu(x, first, last)
            if args.records:
                quantize_row(x, args.cols, first, last, args.records + row * args.record_stride)

    return compile_kernel(span, PointwiseArguments)


@vector_code
def _squared_relu(e: Emitter, x: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """max(x, 0)^2 of fp32 at an address, elements first .. last - 1; a NaN stays one."""

    def span(i: ir.Value, lanes: int) -> None:
        lane, at = vec(F32, lanes), e.at(x, e.b.mul(i, e.i64(4)))
        value, zero = e.load(lane, at), e.const(lane, 0.0)
        positive = e.b.select(e.b.fcmp_ordered("<", value, zero), zero, value)
        e.store(e.b.fmul(positive, positive), at)

    e.spans(first, last, span, _LANES)
