"""The kernel of RMSNorm, with its vector code.

The squares are added into 8 lanes of four accumulators in turn, and the last width % 32 of them into one more lane;
the order depends on the width alone.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.ops.rms_norm import RMSNormArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def rms_norm_kernel() -> bytes:
    """Task i normalises row i."""

    def rms_norm_row(args: RMSNormArguments, task: int) -> None:
        x, out = args.x + task * args.x_stride, args.out + task * args.out_stride
        norm_row(x, args.weight, args.cols, args.eps, out)

    return compile_kernel(rms_norm_row, RMSNormArguments)


@vector_code(eps=types.float32)
def norm_row(e: Emitter, x: ir.Value, weight: ir.Value, cols: ir.Value, eps: ir.Value, out: ir.Value) -> None:
    """RMSNorm of `cols` fp32 at address x to address out, which may be x."""
    mean = e.b.fdiv(emit_sum_of_squares(e, x, cols), e.to_float(cols))
    root = e.sqrt(e.b.fadd(mean, eps))
    inverse = e.b.fdiv(e.const(F32, 1.0), root)

    def scale(i: ir.Value, lanes: int) -> None:
        at = e.b.mul(i, e.i64(4))
        value = e.b.fmul(e.load(vec(F32, lanes), e.at(x, at)), e.splat(inverse, lanes))
        e.store(e.b.fmul(value, e.load(vec(F32, lanes), e.at(weight, at))), e.at(out, at))

    e.spans(e.i64(0), cols, scale)


def emit_sum_of_squares(e: Emitter, x: ir.Value, cols: ir.Value) -> ir.Value:
    """The sum of squares of `cols` fp32 at address x, a scalar."""

    def square(i: ir.Value, lanes: int, offset: int, total: ir.Value) -> ir.Value:
        value = e.load(vec(F32, lanes), e.at(x, e.b.mul(i, e.i64(4))), offset)
        return e.fma(value, value, total)

    whole = e.b.and_(cols, e.i64(-32))
    zeros = [e.const(vec(F32, 8), 0.0)] * 4
    s = e.loop(
        e.i64(0), whole, 32, zeros, lambda i, state: [square(i, 8, 32 * k, state[k]) for k in range(4)]
    )
    zero = [e.const(vec(F32, 1), 0.0)]
    rest = e.loop(whole, cols, 1, zero, lambda i, state: [square(i, 1, 0, state[0])])
    total = e.total(e.b.fadd(e.b.fadd(s[0], s[1]), e.b.fadd(s[2], s[3])))
    return e.b.fadd(total, e.lane(rest[0], 0))
