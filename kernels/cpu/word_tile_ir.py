"""Vector code of a matmul on 16-bit integers (word_tiles.py), as numba intrinsics.

A panel is DEPTH columns of `TILE.columns` weight rows: int32 lanes [DEPTH / 2, columns], each the two int16 of a pair
of columns; then d [vectors, lanes] and minimums [vectors, GROUPS, lanes], fp32, on their own.

Does not know: how tiles are shared among threads.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.panel_ir import GROUPS
from quengine.kernels.cpu.row_ir import emitter, greater, round_within, total_int
from quengine.kernels.cpu.tiles import DEPTH
from quengine.kernels.cpu.vector_ir import F32, I32, Emitter, vec
from quengine.kernels.cpu.word_tiles import (
    ACTIVATION_MOST,
    BY_16,
    BY_32,
    FLUSH,
    HALF_NORM,
    ORDER,
    SCALE,
    TAIL,
    TILE,
)

_LANES = 32
_WIDE = vec(F32, _LANES)


@intrinsic(prefer_literal=True)
def round_words(typingctx: Any, variant: Any, x: Any, words: Any, tail: Any) -> Any:
    """DEPTH fp32 at address x as pairs of int16, a pair every 4 * `TILE.rows` bytes, and a tail."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, x, words, tail = args
        e, b = emitter(context, builder), builder
        largest = _largest(e, x)
        zero = b.fcmp_ordered("==", largest, e.const(F32, 0.0))
        inverse = b.fdiv(e.const(F32, 1.0), b.select(zero, e.const(F32, 1.0), largest))
        unit = _unit(e, x, inverse)
        t = b.fmul(largest, unit)
        times = e.splat(b.fdiv(inverse, unit), _LANES)
        for k in range(0, DEPTH, _LANES):
            a = round_within(e, b.fmul(e.load(_WIDE, x, 4 * k), times), ACTIVATION_MOST)
            ordered = e.pick(a, [4 * i + j for i in range(_LANES // 4) for j in ORDER])
            pairs = b.bitcast(ordered, vec(I32, _LANES // 2))
            for p in range(_LANES // 2):
                e.store(e.lane(pairs, p), words, 4 * TILE.rows * (k // 2 + p))
            sums = [total_int(e, half) for half in e.halves(e.widen(a, I32, True))]
            for i, value in enumerate(sums):
                e.store(b.fmul(b.fneg(t), e.to_float(value)), tail, BY_16 + 4 * (k // 16 + i))
            e.store(b.fmul(b.fneg(t), e.to_float(b.add(*sums))), tail, BY_32 + 4 * (k // 32))
        e.store(t, tail, SCALE)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 3), codegen


def _largest(e: Emitter, x: ir.Value) -> ir.Value:
    """The largest |x| of DEPTH fp32. As integers the bits of |x| order like |x|, and a NaN is above all."""
    largest = None
    for k in range(0, DEPTH, _LANES):
        bits = e.and_(e.b.bitcast(e.load(_WIDE, x, 4 * k), vec(I32, _LANES)), 0x7FFFFFFF)
        largest = bits if largest is None else greater(e, largest, bits)
    assert largest is not None
    while largest.type.count > 1:
        largest = greater(e, *e.halves(largest))
    return e.b.bitcast(e.lane(largest, 0), F32)


def _unit(e: Emitter, x: ir.Value, inverse: ir.Value) -> ir.Value:
    """t of DEPTH fp32 divided by the largest of them, whose inverse is given."""
    b, unit = e.b, e.const(F32, 1 / ACTIVATION_MOST)
    for first in range(0, DEPTH, DEPTH // 2):
        squares = e.const(_WIDE, 0.0)
        for k in range(first, first + DEPTH // 2, _LANES):
            value = b.fmul(e.load(_WIDE, x, 4 * k), e.splat(inverse, _LANES))
            squares = e.fma(value, value, squares)
        norm = b.fmul(e.sqrt(e.total(squares)), e.const(F32, 1 / HALF_NORM))
        unit = b.select(b.fcmp_ordered(">", norm, unit), norm, unit)
    return unit


@intrinsic(prefer_literal=True)
def multiply_words(typingctx: Any, variant: Any, panel: Any, d: Any, mins: Any, x: Any, totals: Any) -> Any:
    """totals[i, j] += a panel's columns of row j times those of row i of x: a whole tile, fp32 [TILE.rows, columns].

    x: a block of packed activations.
    """
    fmt = FORMATS[variant.literal_value.split("/")[0]]

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, panel, d, mins, x, totals = args
        e, tile = emitter(context, builder), TILE
        ints, floats, size = vec(I32, tile.lanes), vec(F32, tile.lanes), 4 * tile.lanes
        cells = tile.rows * tile.vectors
        tails = e.at(x, 2 * DEPTH * tile.rows)

        # One pair a turn: of several, LLVM makes multiplications and additions, to break chains that bound nothing.
        def pair(k: ir.Value, products: list[ir.Value]) -> list[ir.Value]:
            line = e.at(panel, builder.mul(k, e.i64(2 * tile.columns)))
            place = e.at(x, builder.mul(k, e.i64(2 * tile.rows)))
            weights = [e.load(ints, line, size * j) for j in range(tile.vectors)]
            result = []
            for i in range(tile.rows):
                value = e.splat(e.load(I32, place, 4 * i), tile.lanes)
                for j, weight in enumerate(weights):
                    result.append(e.add_pair_products(products[i * tile.vectors + j], value, weight))
            return result

        sums = [e.const(floats, 0.0)] * cells
        for first in range(0, DEPTH, FLUSH[fmt.name]):
            zeros = [e.const(ints, 0)] * cells
            products = e.loop(e.i64(first), e.i64(first + FLUSH[fmt.name]), 2, zeros, pair)
            parts = [e.to_float(product) for product in products]
            sums = [builder.fadd(*both) for both in zip(sums, parts, strict=True)] if first else parts
        for j in range(tile.vectors):
            places = [size * (i * tile.vectors + j) for i in range(tile.rows)]
            scale = e.load(floats, d, size * j)
            added = [e.load(floats, totals, place) for place in places]
            for i in range(tile.rows):
                t = e.splat(e.load(F32, tails, TAIL * i + SCALE), tile.lanes)
                added[i] = e.fma(builder.fmul(sums[i * tile.vectors + j], scale), t, added[i])
            for g in range(DEPTH // fmt.group if fmt.has_min else 0):
                line = e.load(floats, mins, size * (j * GROUPS + g))
                by = (BY_32 if fmt.group == 32 else BY_16) + 4 * g
                for i in range(tile.rows):
                    added[i] = e.fma(line, e.splat(e.load(F32, tails, TAIL * i + by), tile.lanes), added[i])
            for value, place in zip(added, places, strict=True):
                e.store(value, totals, place)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 5), codegen
