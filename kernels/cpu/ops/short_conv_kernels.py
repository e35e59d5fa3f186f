"""The kernel of the gated short convolution (short_conv.py), with its vector code."""

from __future__ import annotations

from llvmlite import ir

from quengine.kernels.cpu.ir.row_ir import int64_at, multiply_span
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.ops.short_conv import ShortConvArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def short_conv_kernel() -> bytes:
    """A task is `task_channels` channels of all rows in order, as a row may read state that an earlier row wrote."""

    def short_conv_span(args: ShortConvArguments, task: int) -> None:
        first = task * args.task_channels
        last = min(args.channels, first + args.task_channels)
        width = 4 * args.channels
        for row in range(args.rows):
            position, b = int64_at(args.positions, row), args.bcx + 3 * row * width
            slot = int64_at(args.tables + row * args.table_stride, 0)
            state, out = args.state + slot * args.history * width, args.out + row * width
            multiply_span(b, b + 2 * width, state + position % args.history * width, first, last)
            _clear(out, first, last)
            for tap in range(args.taps):
                read = position - args.taps + 1 + tap
                if read >= 0:
                    _add_product(
                        args.weight + tap * width, state + read % args.history * width, out, first, last
                    )
            multiply_span(b + width, out, out, first, last)

    return compile_kernel(short_conv_span, ShortConvArguments)


@vector_code
def _clear(e: Emitter, out: ir.Value, first: ir.Value, last: ir.Value) -> None:
    def clear(i: ir.Value, lanes: int) -> None:
        e.store(e.const(vec(F32, lanes), 0.0), e.at(out, e.b.mul(i, e.i64(4))))

    e.spans(first, last, clear)


@vector_code
def _add_product(
    e: Emitter, x: ir.Value, y: ir.Value, out: ir.Value, first: ir.Value, last: ir.Value
) -> None:
    """out += x * y, fp32 at addresses, elements first .. last - 1; product and sum are rounded separately."""

    def add(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        product = e.b.fmul(e.load(lane, e.at(x, at)), e.load(lane, e.at(y, at)))
        e.store(e.b.fadd(e.load(lane, e.at(out, at)), product), e.at(out, at))

    e.spans(first, last, add)
