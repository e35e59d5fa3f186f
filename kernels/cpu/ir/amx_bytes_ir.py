"""Vector code of prefill matmul on AMX tiles of bytes (gemm/amx_bytes.py, where the layouts are).

Activation rows are the rows of tiles, so that few of them take little time. Weight rows are the columns, so that
vectors of sums lie as in the result. The panels' codes are transposed and scaled as those of int16 VNNI are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from llvmlite import ir

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm.amx_bytes import (
    COLUMNS,
    FACTORS,
    HALF_BYTES,
    LEAST,
    LOW,
    MINS,
    MOST,
    ROW_BYTES,
    ROWS,
    SCALE,
    STEP,
    SUMS,
    TILE_BYTES,
    D,
)
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.ir import amx_ir
from quengine.kernels.cpu.ir.row_ir import round_within
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, Emitter, vec
from quengine.kernels.cpu.ir.vnni_ir import sums_of_eights
from quengine.kernels.cpu.ir.vnni_panel_ir import row_addresses, super_block

_UPPER = 0xFFFF0000
_WIDE = 32  # lanes of int16
_LANES = vec(F32, ROWS)
_HIGH, _CROSS, _MINS = (2 * i for i in range(3))
"""The first tile of the sums of high bytes, of high by low bytes, of minimums. Each has one per half of a strip."""


@vector_code
def quantize_two_bytes(e: Emitter, x: ir.Value, largest: ir.Value, block: ir.Value, row: ir.Value) -> None:
    """Rounds DEPTH fp32 at address x to a row of a block of packed activations.

    largest: the address of the largest |x| (`find_largest`).
    """
    b, pairs = e.b, []
    most, least = e.load(F32, largest), e.const(F32, LEAST)
    most = b.select(b.fcmp_ordered("<", most, least), least, most)
    times = e.splat(b.fdiv(e.const(F32, float(MOST)), most), _WIDE)
    t = b.fmul(most, e.const(F32, 1 / MOST))
    place = e.at(block, b.mul(row, e.i64(STEP)))
    for k in range(0, DEPTH, _WIDE):
        a = round_within(e, b.fmul(e.load(vec(F32, _WIDE), x, 4 * k), times), MOST)
        at = k // STEP * TILE_BYTES + k % STEP
        high = b.ashr(b.add(a, e.const(a.type, 128)), e.const(a.type, 8))
        for part, offset in ((high, 0), (a, LOW)):
            e.store(b.trunc(part, vec(I8, _WIDE)), place, offset + at)
        pairs.append(e.pair_products(a, e.const(a.type, 1)))
    scaled = b.fmul(e.splat(t, DEPTH // 16), e.to_float(sums_of_eights(e, pairs)))
    e.store(e.join(*_two_terms(e, scaled)), place, SUMS)
    e.store(t, e.at(block, b.mul(row, e.i64(4))), SCALE)


def _two_terms(e: Emitter, x: ir.Value) -> list[ir.Value]:
    """The two bf16 terms of fp32 lanes, as int16 lanes."""
    bits = e.b.bitcast(x, vec(I32, x.type.count))
    rest = e.b.fsub(x, e.b.bitcast(e.and_(bits, _UPPER), x.type))
    return [
        e.b.trunc(e.shift_left(part, -16), vec(I16, x.type.count))
        for part in (bits, e.b.bitcast(rest, bits.type))
    ]


@vector_code
def fill_byte_panel(
    e: Emitter,
    format_name: str,
    w: ir.Value,
    row_bytes: ir.Value,
    first: ir.Value,
    last: ir.Value,
    half: ir.Value,
) -> None:
    """Unpacks one super-block of rows first .. first + 15 into half a panel.

    w: the address of the super-block in row 0. Rows after `last` repeat it.
    """
    fmt, factor, b = FORMATS[format_name], FACTORS[format_name], e.b
    scales, codes = super_block(e, fmt, row_addresses(e, w, row_bytes, first, last))
    e.store(b.fmul(scales.d, e.const(_LANES, 256 / factor)), half, D)
    if scales.dmin is not None:
        e.store(b.fneg(scales.dmin), half, D + 64)
        _store_mins(e, [b.bitcast(e.to_float(mn), vec(I32, ROWS)) for mn in scales.mn], half)
    words = vec(I16, 2 * ROWS)
    doubled = [i // 2 * 2 for i in range(2 * ROWS)]
    factors = [e.pick(b.bitcast(b.mul(sc, e.const(sc.type, factor)), words), doubled) for sc in scales.sc]
    for column, (evens, odds) in codes:
        parts = [b.mul(part, factors[column // fmt.group]) for part in (evens, odds)]
        place = column // STEP * 2 * TILE_BYTES + column % STEP // 4 * 64
        for term, line in enumerate(_bytes_of_words(e, parts, abs(factor) < 256)):
            e.store(line, half, place + TILE_BYTES * term)


def _bytes_of_words(e: Emitter, words: list[ir.Value], both: bool) -> list[ir.Value]:
    """The high bytes of words, even columns and odd ones, in order, and with `both` the low bytes: signed terms."""
    (even, odd), rounding = words, e.const(words[0].type, 128 if both else 0)
    up = [e.b.add(word, rounding) for word in words]
    high = e.b.or_(e.shift_left(up[0], -8), e.and_(up[1], 0xFF00))
    return [high, e.b.or_(e.and_(even, 0xFF), e.shift_left(odd, 8))] if both else [high]


def _store_mins(e: Emitter, mins: list[ir.Value], half: ir.Value) -> None:
    """The tile of minimums, for both terms of the sums; mins: the bits of fp32 integers that are exact in bf16."""
    each = DEPTH // 16 // len(mins)  # runs of 16 columns for which a minimum holds
    for i in range(DEPTH // 32):
        low, high = mins[2 * i // each], mins[(2 * i + 1) // each]
        pair = e.b.or_(e.shift_left(low, -16), e.and_(high, _UPPER))
        for term in range(2):
            e.store(pair, half, MINS + 64 * i + TILE_BYTES // 2 * term)


@vector_code
def configure_rows(e: Emitter, memory: ir.Value, rows: ir.Value) -> None:
    """Configures this thread's tiles: 0 to 5, of sums and activations, have 1 to 16 `rows`, 6 and 7, of weights, 16.

    memory: the address of 64 bytes of scratch.
    """
    lanes = vec(I8, 16)
    counts = e.splat(e.b.trunc(rows, I8), 16)
    counts = e.b.select(e.const(vec(ir.IntType(1), 16), [1] * 6 + [0] * 10), counts, e.const(lanes, 16))
    amx_ir.configure(e, memory, e.b.and_(counts, e.const(lanes, [-1] * 8 + [0] * 8)))


@vector_code
def multiply_byte_tiles(e: Emitter, format_name: str, x: ir.Value, panel: ir.Value, sums: ir.Value) -> None:
    """The products of a block of activations with a panel: two tiles of each kind of sums at address `sums`."""
    _multiply_block(e, format_name, x, panel, sums, [])


@vector_code
def multiply_and_add(
    e: Emitter,
    format_name: str,
    x: ir.Value,
    panel: ir.Value,
    sums: ir.Value,
    scales: ir.Value,
    totals: ir.Value,
) -> None:
    """`add_scaled` of the ROWS rows of sums of the block before, and `multiply_byte_tiles` of a block.

    A product of tiles takes 16 cycles of a unit of its own: a few vector instructions stand after each. They also
    prefetch the activations that follow in memory, which come from the L2 cache or from further away.
    """
    factors = _factors(e, format_name, panel)
    others: list[Callable[[], None]] = []
    for row in range(ROWS):
        places = (
            e.at(sums, 64 * row),
            e.load(F32, scales, 4 * row),
            e.at(totals, 4 * COLUMNS * row),
        )
        others += [partial(_add_scaled_half, e, format_name, half, *places, factors) for half in range(2)]
        lines = range(ROW_BYTES * row // 64, ROW_BYTES * (row + 1) // 64)
        others += [partial(e.prefetch, e.at(x, ROWS * ROW_BYTES + 64 * line)) for line in lines]
    _multiply_block(e, format_name, x, panel, sums, others)


def _multiply_block(
    e: Emitter,
    format_name: str,
    x: ir.Value,
    panel: ir.Value,
    sums: ir.Value,
    others: list[Callable[[], None]],
) -> None:
    """`multiply_byte_tiles`. `others` emit code that may read the sums of before; it is spread over the products."""
    fmt, both = FORMATS[format_name], abs(FACTORS[format_name]) < 256
    waiting, slots = iter(others), DEPTH // STEP * (6 if both else 4)

    def between() -> None:
        for other in islice(waiting, -(-len(others) // slots)):
            other()

    for tile in range(4):
        amx_ir.clear_tile(e, tile)
    for step in range(DEPTH // STEP):
        _multiply_step(e, e.at(x, TILE_BYTES * step), e.at(panel, 2 * TILE_BYTES * step), both, between)
    for half in range(2):
        amx_ir.store_tile(e, half, e.at(sums, TILE_BYTES * (_HIGH + half)))
    if fmt.has_min:
        amx_ir.load_tile(e, 4, e.at(x, SUMS))
        for half in range(2):
            amx_ir.clear_tile(e, half)
            amx_ir.load_tile(e, 6 + half, e.at(panel, HALF_BYTES * half + MINS))
            amx_ir.tile_instruction(e, "tdpbf16ps", half, 4, 6 + half)
    for half in range(2):
        amx_ir.store_tile(e, 2 + half, e.at(sums, TILE_BYTES * (_CROSS + half)))
    for half in range(2 if fmt.has_min else 0):
        amx_ir.store_tile(e, half, e.at(sums, TILE_BYTES * (_MINS + half)))


def _multiply_step(e: Emitter, x: ir.Value, panel: ir.Value, both: bool, between: Callable[[], None]) -> None:
    """STEP columns. Tiles 0 and 1: sums of high bytes; 2, 3: of high by low; 4, 5: activations; 6, 7: weights.

    Products with the same sums are three apart, nearly their latency. `between` emits what stands after each.
    """

    def multiply(sums: int, activations: int, weights: int) -> None:
        amx_ir.tile_instruction(e, "tdpbssd", sums, activations, weights)
        between()

    def weights(half: int, term: int) -> None:
        amx_ir.load_tile(e, 6 + half, e.at(panel, HALF_BYTES * half + TILE_BYTES * term))

    weights(0, 0)
    amx_ir.load_tile(e, 5, e.at(x, LOW))
    multiply(2, 5, 6)
    amx_ir.load_tile(e, 4, x)
    multiply(0, 4, 6)
    weights(1, 0)
    if both:
        weights(0, 1)
    multiply(3, 5, 7)
    if both:
        multiply(2, 4, 6)
    multiply(1, 4, 7)
    if both:
        weights(1, 1)
        multiply(3, 4, 7)


@vector_code
def add_scaled(
    e: Emitter,
    format_name: str,
    rows: ir.Value,
    sums: ir.Value,
    scales: ir.Value,
    panel: ir.Value,
    totals: ir.Value,
) -> None:
    """totals fp32 [rows, COLUMNS] += the sums of `multiply_byte_tiles`, scaled. scales: fp32 t of each row."""
    factors = _factors(e, format_name, panel)

    def row(i: ir.Value) -> None:
        t = e.load(F32, e.at(scales, e.b.mul(i, e.i64(4))))
        line, target = e.at(sums, e.b.mul(i, e.i64(64))), e.at(totals, e.b.mul(i, e.i64(4 * COLUMNS)))
        for half in range(2):
            _add_scaled_half(e, format_name, half, line, t, target, factors)

    e.each(e.i64(0), rows, 1, row)


_Factors = list[list[ir.Value]]
"""d of each half of a panel, and -dmin if there are minimums."""


def _factors(e: Emitter, format_name: str, panel: ir.Value) -> _Factors:
    kinds = range(1 + FORMATS[format_name].has_min)
    return [[e.load(_LANES, panel, HALF_BYTES * half + D + 64 * i) for half in range(2)] for i in kinds]


def _add_scaled_half(
    e: Emitter, format_name: str, half: int, line: ir.Value, t: ir.Value, target: ir.Value, factors: _Factors
) -> None:
    """Adds one row's sums at address `line` to the half of its totals at address `target`."""
    b = e.b
    high, cross = (e.load(vec(I32, ROWS), line, TILE_BYTES * (kind + half)) for kind in (_HIGH, _CROSS))
    ints = e.to_float(b.add(e.shift_left(high, 8), cross))
    total = e.fma(b.fmul(ints, e.splat(t, ROWS)), factors[0][half], e.load(_LANES, target, 64 * half))
    if FORMATS[format_name].has_min:
        mins = e.load(_LANES, line, TILE_BYTES * (_MINS + half))
        total = e.fma(mins, factors[1][half], total)
    e.store(total, target, 64 * half)


@vector_code
def add_floats(e: Emitter, x: ir.Value, y: ir.Value, out: ir.Value, count: ir.Value) -> None:
    """out = x + y of `count` fp32 at addresses."""

    def add(i: ir.Value, lanes: int) -> None:
        at = e.b.mul(i, e.i64(4))
        total = e.b.fadd(*(e.load(vec(F32, lanes), e.at(part, at)) for part in (x, y)))
        e.store(total, e.at(out, at))

    e.spans(e.i64(0), count, add)
