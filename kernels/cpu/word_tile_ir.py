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
from quengine.kernels.cpu.block_ir import emit_blocks
from quengine.kernels.cpu.panel_ir import GROUPS
from quengine.kernels.cpu.row_ir import emitter, greater, round_within, total_int
from quengine.kernels.cpu.tile_ir import transposed
from quengine.kernels.cpu.tiles import DEPTH
from quengine.kernels.cpu.vector_ir import F32, I16, I32, Emitter, vec
from quengine.kernels.cpu.word_tiles import ACTIVATION_MOST, BY_16, BY_32, FLUSH, SCALE, TAIL, TILE

_LANES = 32
_WIDE = vec(F32, _LANES)


@intrinsic(prefer_literal=True)
def round_words(typingctx: Any, variant: Any, x: Any, words: Any, tail: Any) -> Any:
    """DEPTH fp32 at address x as pairs of int16, a pair every 4 * `TILE.rows` bytes, and a tail."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, x, words, tail = args
        e, b = emitter(context, builder), builder
        t = b.fdiv(_largest(e, x), e.const(F32, float(ACTIVATION_MOST)))
        zero = b.fcmp_ordered("==", t, e.const(F32, 0.0))
        inverse = b.fdiv(e.const(F32, 1.0), b.select(zero, e.const(F32, 1.0), t))
        for k in range(0, DEPTH, _LANES):
            a = round_within(e, b.fmul(e.load(_WIDE, x, 4 * k), e.splat(inverse, _LANES)), ACTIVATION_MOST)
            pairs = b.bitcast(a, vec(I32, _LANES // 2))
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


@intrinsic(prefer_literal=True)
def unpack_words(
    typingctx: Any, variant: Any, block: Any, words: Any, factors: Any, d: Any, mins: Any
) -> Any:
    """A super-block at an address: its DEPTH q as int16; of each group sc, twice in an int32; d, and the groups'
    minimums, if any, as fp32."""
    fmt = FORMATS[variant.literal_value.split("/")[0]]

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, block, words, factors, d, mins = args
        e = emitter(context, builder)
        content = emit_blocks(e, fmt, block, 1)
        super_scale = e.load_halves(1, block, fmt.layout["d"][0])
        e.store(super_scale, d)
        for j in range(DEPTH // 32):
            e.store(e.widen(content.ints(e, j, 1), I16, True), words, 64 * j)
        for k, line in enumerate(content.scales):
            whole = _whole(e, line, e.lane(super_scale, 0))
            e.store(e.interleave(whole, whole), factors, 32 * k)
        for k, line in enumerate(content.mins or ()):
            e.store(line, mins, 32 * k)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 5), codegen


def _whole(e: Emitter, scales: ir.Value, d: ir.Value) -> ir.Value:
    """sc as int16 lanes, of d * sc in fp32: that product was exact, so the quotient is. 0 where d is 0."""
    none = e.b.fcmp_ordered("==", d, e.const(F32, 0.0))
    divisor = e.splat(e.b.select(none, e.const(F32, 1.0), d), scales.type.count)
    whole = e.b.fptosi(e.b.fdiv(scales, divisor), vec(I32, scales.type.count))
    return e.b.trunc(whole, vec(I16, scales.type.count))


@intrinsic(prefer_literal=True)
def fill_words(typingctx: Any, variant: Any, rows: Any, factors: Any, out: Any) -> Any:
    """`TILE.lanes` rows of DEPTH int16, side by side as a panel has them, times their groups' factors.

    factors: [groups, lanes], as `unpack_words` gives them; lines of out are `TILE.columns` int32 apart.
    """
    fmt = FORMATS[variant.literal_value.split("/")[0]]

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, rows, factors, out = args
        e, lanes = emitter(context, builder), TILE.lanes
        words = vec(I16, 2 * lanes)

        def square(k: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            source = e.at(rows, builder.mul(k, e.i64(4)))
            lines = [e.load(vec(I32, lanes), source, 2 * DEPTH * i) for i in range(lanes)]
            target = e.at(out, builder.mul(k, e.i64(4 * TILE.columns)))
            group = e.at(factors, builder.mul(builder.udiv(k, e.i64(fmt.group // 2)), e.i64(4 * lanes)))
            for i, line in enumerate(transposed(e, lines)):
                factor = e.load(words, group, 4 * lanes * (2 * i // fmt.group))
                e.store(builder.mul(builder.bitcast(line, words), factor), target, 4 * TILE.columns * i)
            return []

        e.loop(e.i64(0), e.i64(DEPTH // 2), lanes, [], square)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def multiply_words(
    typingctx: Any, variant: Any, panel: Any, d: Any, mins: Any, x: Any, sums: Any, totals: Any
) -> Any:
    """totals[i, j] += a panel's columns of row j times those of row i of x: a whole tile, fp32 [TILE.rows, columns].

    x: a block of packed activations; sums: room for another tile.
    """
    fmt = FORMATS[variant.literal_value.split("/")[0]]

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, panel, d, mins, x, sums, totals = args
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

        def flush(first: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            zeros = [e.const(ints, 0)] * cells
            for n, product in enumerate(e.loop(first, e.at(first, FLUSH[fmt.name]), 2, zeros, pair)):
                e.store(builder.fadd(e.load(floats, sums, size * n), e.to_float(product)), sums, size * n)
            return []

        for n in range(cells):
            e.store(e.const(floats, 0.0), sums, size * n)
        e.loop(e.i64(0), e.i64(DEPTH), FLUSH[fmt.name], [], flush)
        for j in range(tile.vectors):
            places = [size * (i * tile.vectors + j) for i in range(tile.rows)]
            scale = e.load(floats, d, size * j)
            added = [e.load(floats, totals, place) for place in places]
            for i, place in enumerate(places):
                t = e.splat(e.load(F32, tails, TAIL * i + SCALE), tile.lanes)
                added[i] = e.fma(builder.fmul(e.load(floats, sums, place), scale), t, added[i])
            for g in range(DEPTH // fmt.group if fmt.has_min else 0):
                line = e.load(floats, mins, size * (j * GROUPS + g))
                by = (BY_32 if fmt.group == 32 else BY_16) + 4 * g
                for i in range(tile.rows):
                    added[i] = e.fma(line, e.splat(e.load(F32, tails, TAIL * i + by), tile.lanes), added[i])
            for value, place in zip(added, places, strict=True):
                e.store(value, totals, place)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 6), codegen
