"""Vector code of prefill attention: cache rows to fp32, one block's update of the online softmax."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from quengine.kernels.cpu.ir.attention_ir import emit_exp
from quengine.kernels.cpu.ir.cache_ir import emit_some_codes
from quengine.kernels.cpu.ir.row_ir import emit_scaled
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.kv.cache_types import CODE_GROUP


@vector_code
def cache_row(
    e: Emitter,
    cache_type: str,
    row: ir.Value,
    scales: ir.Value,
    first: ir.Value,
    last: ir.Value,
    out: ir.Value,
) -> None:
    """Elements first .. last - 1 of a stored key or value as fp32 at address out.

    row: address of fp16, or of codes whose fp16 scales, one per 32, are at address scales. first: a multiple
    of 8, and of `Tile.lanes`.
    """

    def widen(i: ir.Value, lanes: int) -> None:
        if cache_type == "f16":
            values = e.load_halves(lanes, e.at(row, e.b.mul(i, e.i64(2))))
        else:
            group = e.b.udiv(i, e.i64(CODE_GROUP))
            scale = e.load_halves(1, e.at(scales, e.b.mul(group, e.i64(2))))
            codes = emit_some_codes(e, cache_type, row, i, lanes)
            values = e.b.fmul(codes, e.splat_lane(scale, 0, lanes))
        e.store(values, e.at(out, e.b.mul(e.b.sub(i, first), e.i64(4))))

    e.spans(first, last, widen, max(8, host_tile().lanes))


@vector_code(divisor=types.float32)
def divide_row(e: Emitter, x: ir.Value, divisor: ir.Value, count: ir.Value, out: ir.Value) -> None:
    """`count` fp32 at address x divided by a divisor, to address out."""
    emit_scaled(e, x, e.b.fdiv(e.const(F32, 1.0), divisor), count, out)


@vector_code(value=types.float32)
def fill_row(e: Emitter, x: ir.Value, first: ir.Value, last: ir.Value, value: ir.Value) -> None:
    """Sets elements first .. last - 1 of fp32 at address x to value."""

    def fill(i: ir.Value, lanes: int) -> None:
        e.store(e.splat(value, lanes), e.at(x, e.b.mul(i, e.i64(4))))

    e.spans(first, last, fill)


@vector_code
def softmax_block(
    e: Emitter, scores: ir.Value, count: ir.Value, state: ir.Value, sums: ir.Value, width: ir.Value
) -> None:
    """Replaces `count` scores (fp32 at an address, a multiple of a vector's lanes) by exp(score - max), in place.

    state: the running maximum and sum of weights, fp32, updated. sums: `width` fp32, rescaled to the new maximum.
    Scores of -inf have weight zero exactly, so the result does not depend on the padding of the block.
    """
    lanes = host_tile().lanes
    wide = vec(F32, lanes)

    def place(i: ir.Value) -> ir.Value:
        return e.at(scores, e.b.mul(i, e.i64(4)))

    old = e.load(F32, state)
    top = e.loop(
        e.i64(0), count, lanes, [e.splat(old, lanes)], lambda i, s: [e.maximum(e.load(wide, place(i)), s[0])]
    )[0]
    maximum = e.lane(e.largest(top), 0)

    def weigh(i: ir.Value, total: list[ir.Value]) -> list[ir.Value]:
        weights = emit_exp(e, e.b.fsub(e.load(wide, place(i)), e.splat(maximum, lanes)))
        e.store(weights, place(i))
        return [e.b.fadd(total[0], weights)]

    total = e.total(e.loop(e.i64(0), count, lanes, [e.const(wide, 0.0)], weigh)[0])
    rescale = e.lane(emit_exp(e, e.splat(e.b.fsub(old, maximum), 1)), 0)
    e.store(maximum, state)
    e.store(e.fma(e.load(F32, state, 4), rescale, total), state, 4)
    emit_scaled(e, sums, rescale, width, sums)
