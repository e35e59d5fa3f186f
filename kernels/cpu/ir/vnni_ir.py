"""Vector code of prefill matmul on int16 (vnni.py).

A panel is DEPTH columns of `int16_tile().columns` weight rows: int32 lanes [DEPTH / 2, columns], each the two int16 of
a pair of columns; d [columns] and the minimums [columns / PANEL_ROWS, GROUPS, PANEL_ROWS] are separate fp32 arrays.
"""

from __future__ import annotations

from llvmlite import ir

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.gemm.vnni import (
    ACTIVATION_MOST,
    BY_16,
    BY_32,
    FLUSH,
    HALF_NORM,
    ORDER,
    PANEL_ROWS,
    SCALE,
    TAIL,
    int16_tile,
)
from quengine.kernels.cpu.ir.panel_ir import GROUPS
from quengine.kernels.cpu.ir.row_ir import greater, round_within
from quengine.kernels.cpu.ir.tile_ir import transposed
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I32, Emitter, vec

TRANSPOSED = 8
"""Rows that are transposed at once, those of a tile or more."""
_LANES = 32
_LEAST = 2.0**-100  # smaller activations lose bits, so that 1 / t stays finite and t is not denormal
_WIDE = vec(F32, _LANES)


@vector_code
def find_largest(e: Emitter, x: ir.Value, largest: ir.Value) -> None:
    """Stores the largest |x| of DEPTH fp32 at address x to address largest."""
    found = None
    # The bits of |x|, compared as integers, order like |x|, and NaN is the largest.
    for k in range(0, DEPTH, _LANES):
        bits = e.and_(e.b.bitcast(e.load(_WIDE, x, 4 * k), vec(I32, _LANES)), 0x7FFFFFFF)
        found = bits if found is None else greater(e, found, bits)
    assert found is not None
    while found.type.count > 1:
        found = greater(e, *e.halves(found))
    e.store(found, largest)


@vector_code
def find_scale(e: Emitter, x: ir.Value, place: ir.Value, tail: ir.Value) -> None:
    """Stores the scale t of DEPTH fp32 at address x to their tail; replaces the largest |x| at `place` by 1 / t."""
    b = e.b
    largest, least = e.load(F32, place), e.const(F32, _LEAST)
    largest = b.select(b.fcmp_ordered("<", largest, least), least, largest)
    inverse = b.fdiv(e.const(F32, 1.0), largest)
    unit = e.const(F32, 1 / ACTIVATION_MOST)
    for first in range(0, DEPTH, DEPTH // 2):
        squares = e.const(_WIDE, 0.0)
        for k in range(first, first + DEPTH // 2, _LANES):
            value = b.fmul(e.load(_WIDE, x, 4 * k), e.splat(inverse, _LANES))  # its square is finite
            squares = e.fma(value, value, squares)
        norm = b.fmul(e.sqrt(e.total(squares)), e.const(F32, 1 / HALF_NORM))
        unit = b.select(b.fcmp_ordered(">", norm, unit), norm, unit)
    e.store(b.fmul(largest, unit), tail, SCALE)
    e.store(b.fdiv(inverse, unit), place)


@vector_code
def quantize_int16(e: Emitter, x: ir.Value, inverse: ir.Value, words: ir.Value, tail: ir.Value) -> None:
    """Rounds DEPTH fp32 at address x, after `find_scale`, to int16 in `ORDER`, and stores the rest of their tail."""
    b, pairs = e.b, []
    times, t = e.splat(e.load(F32, inverse), _LANES), e.load(F32, tail, SCALE)
    for k in range(0, DEPTH, _LANES):
        a = round_within(e, b.fmul(e.load(_WIDE, x, 4 * k), times), ACTIVATION_MOST)
        e.store(e.pick(a, [4 * i + j for i in range(_LANES // 4) for j in ORDER]), words, 2 * k)
        pairs.append(e.pair_products(a, e.const(a.type, 1)))
    by_16 = sums_of_eights(e, pairs)
    for by, sums in ((BY_16, by_16), (BY_32, b.add(*e.evens_odds(by_16)))):
        e.store(b.fmul(e.splat(b.fneg(t), sums.type.count), e.to_float(sums)), tail, by)


def sums_of_eights(e: Emitter, parts: list[ir.Value]) -> ir.Value:
    """For eight vectors of 16 int32 lanes: the sums of each run of eight lanes, in one vector."""
    lanes = 8
    while len(parts) > 1:
        half, groups = lanes // 2, range(0, 2 * parts[0].type.count, lanes)
        low, high = ([g + i for g in groups for i in range(s, s + half)] for s in (0, half))
        parts = [
            e.b.add(e.pick(x, low, y), e.pick(x, high, y))
            for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
        lanes = half
    return parts[0]


@vector_code
def interleave_pairs(e: Emitter, rows: ir.Value, out: ir.Value) -> None:
    """Transposes pairs of int16 [TRANSPOSED, DEPTH / 2] at address rows to [DEPTH / 2, rows of a tile] at address out;
    what else they have is left out."""
    side, kept = TRANSPOSED, int16_tile().rows

    def square(k: ir.Value) -> None:
        source, target = e.at(rows, e.b.mul(k, e.i64(4))), e.at(out, e.b.mul(k, e.i64(4 * kept)))
        lines = [e.load(vec(I32, side), source, 2 * DEPTH * i) for i in range(side)]
        for i, line in enumerate(transposed(e, lines)):
            e.store(e.pick(line, range(kept)), target, 4 * kept * i)

    e.each(e.i64(0), e.i64(DEPTH // 2), side, square)


@vector_code
def multiply_int16(
    e: Emitter,
    format_name: str,
    rows: ir.Value,
    panel: ir.Value,
    d: ir.Value,
    mins: ir.Value,
    x: ir.Value,
    totals: ir.Value,
    ahead: ir.Value,
    asked: ir.Value,
) -> None:
    """totals[i, j] += the product of the panel's row j and row i of x over DEPTH columns, of the first `rows` rows:
    fp32 [rows of a tile, columns].

    x: a block of packed activations. Meanwhile the cache lines from address `ahead` on are prefetched, `asked` bytes
    per column.
    """

    def multiply(count: int) -> None:
        _multiply_rows(e, FORMATS[format_name], count, (panel, d, mins), x, totals, (ahead, asked))

    e.by_count(rows, int16_tile().rows, multiply)


def _multiply_rows(
    e: Emitter,
    fmt: BlockFormat,
    rows: int,
    weights: tuple[ir.Value, ir.Value, ir.Value],
    x: ir.Value,
    totals: ir.Value,
    prefetched: tuple[ir.Value, ir.Value],
) -> None:
    """`multiply_int16` of a constant number of rows."""
    (panel, d, mins), (ahead, asked), tile = weights, prefetched, int16_tile()
    ints, floats, size = vec(I32, tile.lanes), vec(F32, tile.lanes), 4 * tile.lanes
    cells = rows * tile.vectors
    tails = e.at(x, 2 * DEPTH * tile.rows)
    pair_bytes = (
        2 * tile.columns * fmt.nbytes // DEPTH
    )  # weight bytes per pair of columns: with one block of rows these prefetch the whole next panel

    # One pair per iteration: with several, LLVM splits the instruction into multiply and add to break dependency
    # chains that do not limit this loop.
    def pair(k: ir.Value, products: list[ir.Value]) -> list[ir.Value]:
        line = e.at(panel, e.b.mul(k, e.i64(2 * tile.columns)))
        place = e.at(x, e.b.mul(k, e.i64(2 * tile.rows)))
        for more in range(0, pair_bytes, 64):
            e.prefetch(e.at(e.at(ahead, e.b.mul(k, asked)), more))
        lanes = [e.load(ints, line, size * j) for j in range(tile.vectors)]
        result = []
        for i in range(rows):
            value = e.splat(e.load(I32, place, 4 * i), tile.lanes)
            for j, weight in enumerate(lanes):
                result.append(e.add_pair_products(products[i * tile.vectors + j], value, weight))
        return result

    sums = [e.const(floats, 0.0)] * cells
    for first in range(0, DEPTH, FLUSH[fmt.name]):
        zeros = [e.const(ints, 0)] * cells
        products = e.loop(e.i64(first), e.i64(first + FLUSH[fmt.name]), 2, zeros, pair)
        parts = [e.to_float(product) for product in products]
        sums = [e.b.fadd(*both) for both in zip(sums, parts, strict=True)] if first else parts
    for j in range(tile.vectors):
        places = [size * (i * tile.vectors + j) for i in range(rows)]
        scale = e.load(floats, d, size * j)
        added = [e.load(floats, totals, place) for place in places]
        for i in range(rows):
            t = e.splat(e.load(F32, tails, TAIL * i + SCALE), tile.lanes)
            added[i] = e.fma(e.b.fmul(sums[i * tile.vectors + j], scale), t, added[i])
        for g in range(DEPTH // fmt.group if fmt.has_min else 0):
            part, at = divmod(j * tile.lanes, PANEL_ROWS)
            line = e.load(floats, mins, 4 * (PANEL_ROWS * (part * GROUPS + g) + at))
            by = (BY_32 if fmt.group == 32 else BY_16) + 4 * g
            for i in range(rows):
                added[i] = e.fma(line, e.splat(e.load(F32, tails, TAIL * i + by), tile.lanes), added[i])
        for value, place in zip(added, places, strict=True):
            e.store(value, totals, place)
