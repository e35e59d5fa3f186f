"""Vector code of a prompt's attention, as numba intrinsics: cache rows to fp32, a block's part of a running softmax.

Does not know: heads, masks, threads.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.cpu.ir.attention_ir import emit_exp
from quengine.kernels.cpu.ir.row_ir import emit_scaled, emitter
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I32, vec
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.kv.cache_types import Q8_0_GROUP


@intrinsic(prefer_literal=True)
def cache_row(typingctx: Any, variant: Any, row: Any, scales: Any, first: Any, last: Any, out: Any) -> Any:
    """Values first .. last - 1 of a stored key or value as fp32 at address out. `variant`: "f16/..." or "q8_0/...".

    row: address of fp16, or of int8 codes with fp16 at address scales, one per 32.
    """
    cache_type = variant.literal_value.split("/")[0]

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, row, scales, first, last, out = args
        e = emitter(context, builder)

        def widen(i: ir.Value, lanes: int) -> None:
            if cache_type == "f16":
                values = e.load_halves(lanes, e.at(row, builder.mul(i, e.i64(2))))
            else:
                codes = e.load(vec(I8, lanes), e.at(row, i))
                group = builder.udiv(i, e.i64(Q8_0_GROUP))
                scale = e.load_halves(1, e.at(scales, builder.mul(group, e.i64(2))))
                values = builder.fmul(e.to_float(e.widen(codes, I32, True)), e.splat_lane(scale, 0, lanes))
            e.store(values, e.at(out, builder.mul(builder.sub(i, first), e.i64(4))))

        e.spans(first, last, widen)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 5), codegen


@intrinsic(prefer_literal=True)
def divide_row(typingctx: Any, variant: Any, x: Any, divisor: Any, count: Any, out: Any) -> Any:
    """`count` fp32 at address x divided by the fp32 at address divisor, to address out."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, x, divisor, count, out = args
        e = emitter(context, builder)
        emit_scaled(e, x, builder.fdiv(e.const(F32, 1.0), e.load(F32, divisor)), count, out)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def fill_row(typingctx: Any, variant: Any, x: Any, first: Any, last: Any, value: Any) -> Any:
    """Elements first .. last - 1 of fp32 at address x become value."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, x, first, last, value = args
        e = emitter(context, builder)

        def fill(i: ir.Value, lanes: int) -> None:
            e.store(e.splat(value, lanes), e.at(x, builder.mul(i, e.i64(4))))

        e.spans(first, last, fill)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 3, types.float32), codegen


@intrinsic(prefer_literal=True)
def softmax_block(
    typingctx: Any, variant: Any, scores: Any, count: Any, state: Any, sums: Any, width: Any
) -> Any:
    """`count` scores (fp32 at an address, a multiple of a vector's lanes) become exp(score - max), in place.

    state: the largest score so far and the sum of all weights, fp32, brought up to date. sums: `width` fp32, scaled as
    the larger maximum asks. Scores of -inf weigh exactly nothing, so results do not depend on how many are behind.
    """

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, scores, count, state, sums, width = args
        e, lanes = emitter(context, builder), host_tile().lanes
        wide = vec(F32, lanes)

        def larger(x: ir.Value, y: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        def place(i: ir.Value) -> ir.Value:
            return e.at(scores, builder.mul(i, e.i64(4)))

        old = e.load(F32, state)
        top = e.loop(
            e.i64(0), count, lanes, [e.splat(old, lanes)], lambda i, s: [larger(e.load(wide, place(i)), s[0])]
        )[0]
        while top.type.count > 1:
            top = larger(*e.halves(top))
        maximum = e.lane(top, 0)

        def weigh(i: ir.Value, total: list[ir.Value]) -> list[ir.Value]:
            weights = emit_exp(e, builder.fsub(e.load(wide, place(i)), e.splat(maximum, lanes)))
            e.store(weights, place(i))
            return [builder.fadd(total[0], weights)]

        total = e.total(e.loop(e.i64(0), count, lanes, [e.const(wide, 0.0)], weigh)[0])
        shrink = e.lane(emit_exp(e, e.splat(builder.fsub(old, maximum), 1)), 0)
        e.store(maximum, state)
        e.store(e.fma(e.load(F32, state, 4), shrink, total), state, 4)
        emit_scaled(e, sums, shrink, width, sums)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 5), codegen
