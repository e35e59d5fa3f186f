"""The kernel of gated linear units and the quantization of the result, with its vector code."""

from __future__ import annotations

import math

from llvmlite import ir

from quengine.kernels.cpu.ir.attention_ir import emit_exp
from quengine.kernels.cpu.ir.row_ir import quantize_row
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.ops.glu import GLUArguments, InputGLUArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.glu import CLAMP, GATELESS, SWISH_SLOPE, Activation, Gating

_LANES = 16
_MOST = 88.0  # exp of more overflows; silu(-88) is -5e-37
_GELU = 2 * math.sqrt(2 / math.pi)  # GELU's tanh form is x / (1 + exp(-_GELU * (x + _GELU_CUBE * x^3)))
_GELU_CUBE = 0.044715


def glu_kernel(activation: Activation) -> bytes:
    """A task is a run of `task_cols` columns of `task_rows` rows; tasks go through the runs first."""
    assert activation not in ("gelu", "gelu_erf"), "only encoders have it, whose feed-forwards torch computes"
    parts = 1 if activation in GATELESS else 2

    def glu_span(args: GLUArguments, task: int) -> None:
        width, runs = args.cols, (args.cols + args.task_cols - 1) // args.task_cols
        first, begin = task % runs * args.task_cols, task // runs * args.task_rows
        last = min(width, first + args.task_cols)
        for row in range(begin, min(begin + args.task_rows, args.rows)):
            gate, out = args.gate_up + 4 * parts * width * row, args.out + 4 * width * row
            gated_span(activation, gate, gate + 4 * width * (parts - 1), first, last, out)
            if args.records:
                quantize_row(out, width, first, last, args.records + row * args.record_stride)

    return compile_kernel(glu_span, GLUArguments)


def input_glu_kernel(activation: Gating) -> bytes:
    """As `glu_kernel`, of gate and up rows with strides of their own."""

    def input_glu_span(args: InputGLUArguments, task: int) -> None:
        width = args.cols
        first, last = task * args.task_cols, min(width, (task + 1) * args.task_cols)
        for row in range(args.rows):
            gate, up = args.gate + row * args.gate_stride, args.up + row * args.up_stride
            out = args.out + 4 * width * row
            gated_span(activation, gate, up, first, last, out)
            if args.records:
                quantize_row(out, width, first, last, args.records + row * args.record_stride)

    return compile_kernel(input_glu_span, InputGLUArguments)


@vector_code
def gated_span(
    e: Emitter, activation: str, gate: ir.Value, up: ir.Value, first: ir.Value, last: ir.Value, out: ir.Value
) -> None:
    """activation(gate) * up, fp32 at addresses, elements first .. last - 1; without a gate, activation(up)."""
    if activation == "relu2":
        _squared_relu(e, up, first, last, out)
        return

    def span(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        g = e.load(lane, e.at(gate, at))
        if activation == "clamped_swish":
            g = _at_most(e, g, e.const(lane, CLAMP))
        power = _at_most(e, e.b.fneg(_exponent(e, g, activation)), e.const(lane, _MOST))
        activated = e.b.fdiv(g, e.b.fadd(e.const(lane, 1.0), emit_exp(e, power)))
        factor = _factor(e, e.load(lane, e.at(up, at)), activation)
        e.store(e.b.fmul(activated, factor), e.at(out, at))

    e.spans(first, last, span, _LANES)


def _squared_relu(e: Emitter, up: ir.Value, first: ir.Value, last: ir.Value, out: ir.Value) -> None:
    def span(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        value, zero = e.load(lane, e.at(up, at)), e.const(lane, 0.0)
        value = e.b.select(e.b.fcmp_ordered("<", value, zero), zero, value)  # NaN stays
        e.store(e.b.fmul(value, value), e.at(out, at))

    e.spans(first, last, span, _LANES)


def _at_most(e: Emitter, x: ir.Value, most: ir.Value) -> ir.Value:
    """The lane-wise minimum of x and most; x where it is NaN."""
    return e.b.select(e.b.fcmp_ordered(">", x, most), most, x)


def _factor(e: Emitter, up: ir.Value, activation: str) -> ir.Value:
    """The factor of the activated gate."""
    if activation != "clamped_swish":
        return up
    limit = e.const(up.type, CLAMP)
    up = _at_most(e, up, limit)
    up = e.b.select(e.b.fcmp_ordered("<", up, e.b.fneg(limit)), e.b.fneg(limit), up)
    return e.b.fadd(up, e.const(up.type, 1.0))


def _exponent(e: Emitter, x: ir.Value, activation: str) -> ir.Value:
    """y in the activation x / (1 + exp(-y))."""
    if activation == "silu":
        return x
    if activation == "clamped_swish":
        return e.b.fmul(x, e.const(x.type, SWISH_SLOPE))
    cubic, linear = e.const(x.type, _GELU * _GELU_CUBE), e.const(x.type, _GELU)
    return e.b.fmul(x, e.fma(e.b.fmul(x, x), cubic, linear))
