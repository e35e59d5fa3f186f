"""The kernel of LayerNorm, with its vector code.

The values, and then the squares of their distances from the mean, are added as RMSNorm's squares are (in
rms_norm_kernels.py): the order depends on the width alone.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types

from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.ops.layer_norm import LayerNormArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def layer_norm_kernel() -> bytes:
    """Task i normalises row i."""

    def layer_norm_row(args: LayerNormArguments, task: int) -> None:
        x, out = args.x + task * args.x_stride, args.out + task * args.out_stride
        _centre_and_scale(x, args.weight, args.cols, args.eps, out)
        if args.bias:
            _add(args.bias, args.cols, out)

    return compile_kernel(layer_norm_row, LayerNormArguments)


@vector_code(eps=types.float32)
def _centre_and_scale(
    e: Emitter, x: ir.Value, weight: ir.Value, cols: ir.Value, eps: ir.Value, out: ir.Value
) -> None:
    """LayerNorm without its bias of `cols` fp32 at address x to address out, which may be x."""
    mean = e.b.fdiv(_emit_sum(e, x, cols, lambda value, total: e.b.fadd(total, value)), e.to_float(cols))

    def square(value: ir.Value, total: ir.Value) -> ir.Value:
        centred = e.b.fsub(value, e.splat(mean, value.type.count))
        return e.fma(centred, centred, total)

    variance = e.b.fdiv(_emit_sum(e, x, cols, square), e.to_float(cols))
    inverse = e.b.fdiv(e.const(F32, 1.0), e.sqrt(e.b.fadd(variance, eps)))

    def scale(i: ir.Value, lanes: int) -> None:
        at = e.b.mul(i, e.i64(4))
        centred = e.b.fsub(e.load(vec(F32, lanes), e.at(x, at)), e.splat(mean, lanes))
        value = e.b.fmul(centred, e.splat(inverse, lanes))
        e.store(e.b.fmul(value, e.load(vec(F32, lanes), e.at(weight, at))), e.at(out, at))

    e.spans(e.i64(0), cols, scale)


@vector_code
def _add(e: Emitter, bias: ir.Value, cols: ir.Value, out: ir.Value) -> None:
    def add(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        total = e.b.fadd(e.load(lane, e.at(out, at)), e.load(lane, e.at(bias, at)))
        e.store(total, e.at(out, at))

    e.spans(e.i64(0), cols, add)


def _emit_sum(
    e: Emitter, x: ir.Value, cols: ir.Value, add: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """A scalar: `add` of each of `cols` fp32 at address x to 8 lanes of four accumulators in turn, and of the last
    cols % 32 to one more lane."""

    def one(i: ir.Value, lanes: int, offset: int, total: ir.Value) -> ir.Value:
        return add(e.load(vec(F32, lanes), e.at(x, e.b.mul(i, e.i64(4))), offset), total)

    whole = e.b.and_(cols, e.i64(-32))
    zeros = [e.const(vec(F32, 8), 0.0)] * 4
    s = e.loop(e.i64(0), whole, 32, zeros, lambda i, state: [one(i, 8, 32 * k, state[k]) for k in range(4)])
    zero = [e.const(vec(F32, 1), 0.0)]
    rest = e.loop(whole, cols, 1, zero, lambda i, state: [one(i, 1, 0, state[0])])
    total = e.total(e.b.fadd(e.b.fadd(s[0], s[1]), e.b.fadd(s[2], s[3])))
    return e.b.fadd(total, e.lane(rest[0], 0))
