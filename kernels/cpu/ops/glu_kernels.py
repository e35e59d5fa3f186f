"""The kernel of gated linear units with the quantization of the result, with its vector code."""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.backend import Activation
from quengine.kernels.cpu.ir.attention_ir import emit_exp
from quengine.kernels.cpu.ir.row_ir import emitter, get, round_row
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.runtime.compiled import compile_kernel

_LANES = 16
_MOST = 88.0  # exp of more overflows; silu(-88) is -5e-37
_GELU = 2 * math.sqrt(2 / math.pi)  # GELU's tanh form is x / (1 + exp(-_GELU * (x + _GELU_CUBE * x^3)))
_GELU_CUBE = 0.044715


def glu_kernel(activation: Activation) -> bytes:
    """Task i is the i-th span of columns of every row.

    0 gate (fp32) with up after it, 1 columns of each, 2 columns per span, 3 rows, 4 output (fp32), 5 records (0:
    none), 6 their stride.
    """
    variant = activation

    def glu_span(context: int, task: int) -> None:
        width, record = get(context, 1), get(context, 5)
        first, last = task * get(context, 2), min(width, (task + 1) * get(context, 2))
        for row in range(get(context, 3)):
            gate, out = get(context, 0) + 8 * width * row, get(context, 4) + 4 * width * row
            _gated(variant, gate, gate + 4 * width, first, last, out)
            if record:
                round_row(variant, out, width, first, last, record + row * get(context, 6))

    return compile_kernel(glu_span)


@intrinsic(prefer_literal=True)
def _gated(typingctx: Any, variant: Any, gate: Any, up: Any, first: Any, last: Any, out: Any) -> Any:
    """activation(gate) * up, fp32 at addresses, elements first .. last - 1. `variant`: the activation."""
    activation = variant.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, gate, up, first, last, out = args
        e = emitter(context, builder)

        def span(i: ir.Value, lanes: int) -> None:
            at, lane = builder.mul(i, e.i64(4)), vec(F32, lanes)
            g = e.load(lane, e.at(gate, at))
            most = e.const(lane, _MOST)
            power = builder.fneg(_exponent(e, g, activation))
            power = builder.select(builder.fcmp_ordered(">", power, most), most, power)
            activated = builder.fdiv(g, builder.fadd(e.const(lane, 1.0), emit_exp(e, power)))
            e.store(builder.fmul(activated, e.load(lane, e.at(up, at))), e.at(out, at))

        e.spans(first, last, span, _LANES)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 5), codegen


def _exponent(e: Emitter, x: ir.Value, activation: Activation) -> ir.Value:
    """What the activation x / (1 + exp(-y)) has as y."""
    if activation == "silu":
        return x
    cubic, linear = e.const(x.type, _GELU * _GELU_CUBE), e.const(x.type, _GELU)
    return e.b.fmul(x, e.fma(e.b.fmul(x, x), cubic, linear))
