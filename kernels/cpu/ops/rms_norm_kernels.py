"""The kernel of RMSNorm, with its vector code.

The squares add into 8 lanes of four accumulators in turn, what is left of 32 into one lane more; the order depends on
the width alone.

Does not know: what is normalised, or what reads the result.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.cpu.ir.row_ir import emitter, get
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def rms_norm_kernel() -> bytes:
    """Task i is row i.

    0 x (fp32), 1 its stride, 2 weight (fp32), 3 columns, 4 eps (the bits of an fp32), 5 output (fp32), 6 its stride.
    """
    variant = "rms_norm"

    def rms_norm_row(context: int, task: int) -> None:
        x, out = get(context, 0) + task * get(context, 1), get(context, 5) + task * get(context, 6)
        norm_row(variant, x, get(context, 2), get(context, 3), context + 32, out)

    return compile_kernel(rms_norm_row)


@intrinsic(prefer_literal=True)
def norm_row(typingctx: Any, variant: Any, x: Any, weight: Any, cols: Any, eps: Any, out: Any) -> Any:
    """RMSNorm of `cols` fp32 at address x to address out, which may be x. eps: the address of an fp32."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, x, weight, cols, eps, out = args
        e = emitter(context, builder)
        mean = builder.fdiv(_sum_of_squares(e, x, cols), e.to_float(cols))
        root = e.sqrt(builder.fadd(mean, e.load(F32, eps)))
        inverse = builder.fdiv(e.const(F32, 1.0), root)

        def scale(i: ir.Value, lanes: int) -> None:
            at = builder.mul(i, e.i64(4))
            value = builder.fmul(e.load(vec(F32, lanes), e.at(x, at)), e.splat(inverse, lanes))
            e.store(builder.fmul(value, e.load(vec(F32, lanes), e.at(weight, at))), e.at(out, at))

        e.spans(e.i64(0), cols, scale)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 5), codegen


def _sum_of_squares(e: Emitter, x: ir.Value, cols: ir.Value) -> ir.Value:
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
