"""Sigmoid, SiLU and softplus of fp32 lanes, and rows that are multiplied by gates."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from quengine.kernels.cpu.ir.attention_ir import emit_exp
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec

_LANES = 16
_MOST = 88.0  # exp of more overflows; sigmoid(-88) is 6e-39
_SMALL = 0.0625  # below, what the series of tanh leaves out is 1e-8 of it
_SERIES = 9  # terms of atanh(s) for s up to 1/3: what they leave out is 2e-10 of it


def emit_sigmoid(e: Emitter, x: ir.Value) -> ir.Value:
    """1 / (1 + exp(-x))."""
    one, most = e.const(x.type, 1.0), e.const(x.type, _MOST)
    power = e.b.fneg(x)
    power = e.b.select(e.b.fcmp_ordered(">", power, most), most, power)
    return e.b.fdiv(one, e.b.fadd(one, emit_exp(e, power)))


def emit_tanh(e: Emitter, x: ir.Value) -> ir.Value:
    """(1 - u) / (1 + u) with u = exp(-2 |x|), with the sign of x; for small |x|, x - x^3 / 3 + 2 x^5 / 15."""
    one, zero = e.const(x.type, 1.0), e.const(x.type, 0.0)
    negative = e.b.fcmp_ordered("<", x, zero)
    size = e.b.select(negative, e.b.fneg(x), x)
    u = emit_exp(e, e.b.fmul(size, e.const(x.type, -2.0)))
    large = e.b.fdiv(e.b.fsub(one, u), e.b.fadd(one, u))
    square = e.b.fmul(x, x)
    series = e.fma(square, e.const(x.type, 2.0 / 15.0), e.const(x.type, -1.0 / 3.0))
    small = e.fma(e.b.fmul(square, x), series, x)
    signed = e.b.select(negative, e.b.fneg(large), large)
    return e.b.select(e.b.fcmp_ordered("<", size, e.const(x.type, _SMALL)), small, signed)


def emit_softplus(e: Emitter, x: ir.Value) -> ir.Value:
    """log(1 + exp(x)), as max(x, 0) + 2 atanh(u / (2 + u)) with u = exp(-|x|)."""
    zero = e.const(x.type, 0.0)
    positive = e.b.fcmp_ordered(">", x, zero)
    u = emit_exp(e, e.b.select(positive, e.b.fneg(x), x))
    s = e.b.fdiv(u, e.b.fadd(u, e.const(x.type, 2.0)))
    square, series = e.b.fmul(s, s), e.const(x.type, 1.0 / (2 * _SERIES - 1))
    for term in reversed(range(_SERIES - 1)):
        series = e.fma(series, square, e.const(x.type, 1.0 / (2 * term + 1)))
    return e.fma(e.b.fadd(s, s), series, e.b.select(positive, x, zero))


@vector_code(cap=types.float32)
def cap_floats(e: Emitter, x: ir.Value, first: ir.Value, last: ir.Value, cap: ir.Value) -> None:
    """x[i] = cap * tanh(x[i] / cap), first <= i < last: fp32 at an address."""

    def bound(i: ir.Value, lanes: int) -> None:
        at, wide = e.at(x, e.b.mul(i, e.i64(4))), e.splat(cap, lanes)
        ratio = e.b.fdiv(e.load(vec(F32, lanes), at), wide)
        e.store(e.b.fmul(wide, emit_tanh(e, ratio)), at)

    e.spans(first, last, bound, _LANES)


@vector_code
def gate_row(e: Emitter, activation: str, gates: ir.Value, x: ir.Value, count: ir.Value) -> None:
    """`count` fp32 at address x times activation(gates), "sigmoid" or "silu", in place."""

    def multiply(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        gate = e.load(lane, e.at(gates, at))
        factor = emit_sigmoid(e, gate)
        if activation == "silu":
            factor = e.b.fmul(factor, gate)
        e.store(e.b.fmul(e.load(lane, e.at(x, at)), factor), e.at(x, at))

    e.spans(e.i64(0), count, multiply, _LANES)


@vector_code(result=types.float32, x=types.float32)
def sigmoid(e: Emitter, x: ir.Value) -> ir.Value:
    """1 / (1 + exp(-x)) of one fp32."""
    return e.lane(emit_sigmoid(e, e.splat(x, 1)), 0)


@vector_code(result=types.float32, x=types.float32)
def softplus(e: Emitter, x: ir.Value) -> ir.Value:
    """log(1 + exp(x)) of one fp32."""
    return e.lane(emit_softplus(e, e.splat(x, 1)), 0)


@vector_code(result=types.float32, x=types.float32)
def exponential(e: Emitter, x: ir.Value) -> ir.Value:
    """exp of one fp32 that is at most 88."""
    return e.lane(emit_exp(e, e.splat(x, 1)), 0)
