"""SwiGLU of one row in compiled code, in the tasks of the matvecs before it: the twin of kernels/swiglu.py.

Does not know: the matmuls around it.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from quengine.kernels.cpu.attention_ir import emit_exp
from quengine.kernels.cpu.compiled import compile_kernel, source_stamp
from quengine.kernels.cpu.row_ir import emitter, get, round_row
from quengine.kernels.cpu.threads import Launch
from quengine.kernels.cpu.vector_ir import F32, vec

_MOST = 88.0  # exp of more overflows; silu(-88) is -5e-37


def swiglu_launch(gate_up: Tensor, out: Tensor, records: Tensor | None, step: int) -> Launch:
    """silu(gate) * up of one row: gate_up fp32 [1, 2F], out fp32 [1, F], all contiguous. A task takes `step` columns.

    With `records`, uint8 [1, record_bytes(F)], the results are rounded into it as well; `step` and F are then
    multiples of 32.
    """
    width = out.shape[1]
    assert records is None or (step % 32 == 0 and width % 32 == 0)
    address = 0 if records is None else records.data_ptr()
    parameters = (gate_up.data_ptr(), width, step, out.data_ptr(), address)
    return Launch(_swiglu_kernel(), parameters, -(-width // step), keep=(gate_up, out, records))


@cache
def _swiglu_kernel() -> int:
    """0 gate (fp32) with up behind it, 1 columns of each, 2 columns per task, 3 output (fp32), 4 record, 0 for none."""
    variant = f"swiglu/{source_stamp()}"

    def swiglu_span(context: int, task: int) -> None:
        gate, width, step = get(context, 0), get(context, 1), get(context, 2)
        out, record = get(context, 3), get(context, 4)
        first, last = task * step, min(width, (task + 1) * step)
        _gated(variant, gate, gate + 4 * width, first, last, out)
        if record:
            round_row(variant, out, width, first, last, record)

    return compile_kernel(swiglu_span)


@intrinsic(prefer_literal=True)
def _gated(typingctx: Any, variant: Any, gate: Any, up: Any, first: Any, last: Any, out: Any) -> Any:
    """gate / (1 + exp(-gate)) * up, fp32 at addresses, elements first .. last - 1."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, gate, up, first, last, out = args
        e = emitter(context, builder)

        def span(i: ir.Value, lanes: int) -> None:
            at, lane = builder.mul(i, e.i64(4)), vec(F32, lanes)
            g = e.load(lane, e.at(gate, at))
            most = e.const(lane, _MOST)
            power = builder.fneg(g)
            power = builder.select(builder.fcmp_ordered(">", power, most), most, power)
            silu = builder.fdiv(g, builder.fadd(e.const(lane, 1.0), emit_exp(e, power)))
            e.store(builder.fmul(silu, e.load(lane, e.at(up, at))), e.at(out, at))

        e.spans(first, last, span)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 5), codegen
