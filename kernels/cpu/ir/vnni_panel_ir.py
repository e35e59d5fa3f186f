"""Vector code that unpacks super-blocks of many weight rows into an int16 panel.

Rows are transposed as stored, four bytes of each in an int32 lane. All rows are then processed at once: bits become
codes, still four to a lane, then int16, then int16 times the rows' sub-scales. So one transposition serves four to
sixteen weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from llvmlite import ir

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.gemm.vnni import PANEL_ROWS, int16_tile
from quengine.kernels.cpu.ir.block_ir import TABLE_OFFSET, lookup
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import I8, I16, I32, Emitter, vec

_LANES = PANEL_ROWS
_INTS, _WORDS, _BYTES = vec(I32, _LANES), vec(I16, 2 * _LANES), vec(I8, 4 * _LANES)
_Codes = Iterator[tuple[int, ir.Value]]
"""A column, a multiple of 4, and the codes of it and the next three."""
_Words = Iterator[tuple[int, tuple[ir.Value, ...]]]
"""A column c, a multiple of 4, then q of columns c and c + 2, and of columns c + 1 and c + 3."""


@dataclass(frozen=True)
class _Rows:
    """A super-block of `_LANES` rows, given by their start addresses, in the code being emitted.

    Lanes are int32: lane i has four bytes of row i in each vector.
    """

    e: Emitter
    starts: list[ir.Value]

    def sixteen(self, at: int) -> list[ir.Value]:
        """16 bytes of each row, four vectors."""
        e, loaded = self.e, [self.e.load(vec(I32, 4), start, at) for start in self.starts]
        pairs = [[e.join(*loaded[i + k : i + k + 8 : 4]) for k in (0, 8)] for i in range(4)]
        return _transposed_fours(e, [e.join(*pair) for pair in pairs])

    def thirty_two(self, at: int) -> list[ir.Value]:
        """32 bytes of each row, eight vectors."""
        e, loaded = self.e, [self.e.load(vec(I32, 8), start, at) for start in self.starts]
        low, high = (
            _transposed_fours(e, [e.join(loaded[i], loaded[i + 4]) for i in range(first, first + 4)])
            for first in (0, 8)
        )
        picks = [[8 * k + half + i for k in range(4) for i in range(4)] for half in (0, 4)]
        return [e.pick(a, pick, b) for pick in picks for a, b in zip(low, high, strict=True)]


_CodesOf = Callable[[_Rows, BlockFormat], _Codes]


def _transposed_fours(e: Emitter, lines: list[ir.Value]) -> list[ir.Value]:
    """Transposes each four lanes of four vectors, by unpack instructions."""

    def mask(lanes: tuple[int, ...]) -> list[int]:
        return [k + i for k in range(0, _LANES, 4) for i in lanes]

    n, (a, b, c, d) = _LANES, lines
    result = []
    for lanes in ((0, n, 1, n + 1), (2, n + 2, 3, n + 3)):
        first, second = e.pick(a, mask(lanes), b), e.pick(c, mask(lanes), d)
        result += [e.pick(first, mask(pick), second) for pick in ((0, 1, n, n + 1), (2, 3, n + 2, n + 3))]
    return result


def _bits(e: Emitter, v: ir.Value, by: int, mask: int) -> ir.Value:
    """Bytes shifted left by `by` bits (right if negative) and masked with `mask`."""
    return e.and_(e.shift_left(v, by), mask * 0x01010101)


def _bytes(e: Emitter, v: ir.Value) -> list[ir.Value]:
    """The four signed bytes of each lane, in order."""
    shift = e.const(_INTS, 24)
    return [e.b.ashr(e.shift_left(v, 24 - 8 * i), shift) for i in range(4)]


def _halves(e: Emitter, v: ir.Value) -> list[ir.Value]:
    """The two fp16 of each lane, as fp32."""
    words = vec(I16, _LANES)
    return [e.half_to_float(e.b.trunc(part, words)) for part in (v, e.shift_left(v, -16))]


@dataclass(frozen=True)
class Scales:
    """The scales of a super-block of each row: d and, if any, dmin, fp32; sc and mn of each group, int32."""

    d: ir.Value
    sc: list[ir.Value]
    dmin: ir.Value | None = None
    mn: tuple[ir.Value, ...] = ()


def _six_bit_scales(rows: _Rows, fmt: BlockFormat) -> Scales:
    """The scales of Q4_K and Q5_K; see `_six_bit_pairs` of block_ir.py."""
    e = rows.e
    supers, a, b, c = rows.sixteen(fmt.layout["d"][0])
    d, dmin = _halves(e, supers)
    sc, mn = (
        [_bits(e, v, 0, 63), e.b.or_(_bits(e, c, by, 15), _bits(e, v, -2, 0x30))]
        for v, by in ((a, 0), (b, -4))
    )
    return Scales(d, [s for v in sc for s in _bytes(e, v)], dmin, tuple(m for v in mn for m in _bytes(e, v)))


def _q2_k_scales(rows: _Rows, fmt: BlockFormat) -> Scales:
    e, packed = rows.e, rows.sixteen(fmt.layout["scales"][0])
    d, dmin = _halves(e, rows.sixteen(fmt.nbytes - 16)[3])
    sc, mn = ([part for v in packed for part in _bytes(e, _bits(e, v, by, 15))] for by in (0, -4))
    return Scales(d, sc, dmin, tuple(mn))


def _q3_k_scales(rows: _Rows, fmt: BlockFormat) -> Scales:
    """The scales of Q3_K, as in block_ir.py: nibbles of 8 bytes, upper two bits in planes of 4 bytes."""
    e = rows.e
    *nibbles, top = rows.sixteen(fmt.layout["scales"][1] - 16)[1:]
    low = [_bits(e, v, by, 15) for by in (0, -4) for v in nibbles]
    sub = [e.b.or_(v, _bits(e, top, 4 - 2 * k, 0x30)) for k, v in enumerate(low)]
    sc = [e.b.sub(part, e.const(_INTS, 32)) for v in sub for part in _bytes(e, v)]
    return Scales(_halves(e, rows.sixteen(fmt.nbytes - 16)[3])[1], sc)


def _q6_k_scales(rows: _Rows, fmt: BlockFormat) -> Scales:
    e = rows.e
    sc = [part for v in rows.sixteen(fmt.layout["scales"][0]) for part in _bytes(e, v)]
    return Scales(_halves(e, rows.sixteen(fmt.nbytes - 16)[3])[1], sc)


def _iq4_xs_scales(rows: _Rows, fmt: BlockFormat) -> Scales:
    """The scales of IQ4_XS: nibble i of 4 bytes, and bits 2i and 2i + 1 of the 16 bits after d."""
    e = rows.e
    both, low = rows.sixteen(fmt.layout["d"][0])[:2]
    sc = []
    for i in range(8):
        top = e.and_(e.shift_left(both, 4 - 16 - 2 * i), 0x30)
        sub = e.b.or_(e.and_(e.shift_left(low, -4 * i), 15), top)
        sc.append(e.b.sub(sub, e.const(_INTS, 32)))
    return Scales(_halves(e, both)[0], sc)


def _q4_k_codes(rows: _Rows, fmt: BlockFormat) -> _Codes:
    for i in range(0, 8, 2):
        for j, v in enumerate(rows.thirty_two(fmt.layout["codes"][0] + 16 * i)):
            yield 32 * i + 4 * j, _bits(rows.e, v, 0, 15)
            yield 32 * i + 4 * j + 32, _bits(rows.e, v, -4, 15)


def _q6_k_codes(rows: _Rows, fmt: BlockFormat) -> _Codes:
    e = rows.e
    for half in range(2):
        low = [rows.thirty_two(64 * half + at) for at in (0, 32)]
        high = rows.thirty_two(fmt.layout["high"][0] + 32 * half)
        for j, top in enumerate(high):
            for i in range(4):
                nibbles = _bits(e, low[i % 2][j], -4 * (i // 2), 15)
                yield 128 * half + 32 * i + 4 * j, e.b.or_(nibbles, _bits(e, top, 4 - 2 * i, 0x30))


def _q2_k_codes(rows: _Rows, fmt: BlockFormat) -> _Codes:
    for half in range(2):
        for j, v in enumerate(rows.thirty_two(fmt.layout["codes"][0] + 32 * half)):
            for i in range(4):
                yield 128 * half + 32 * i + 4 * j, _bits(rows.e, v, -2 * i, 3)


def _with_high_bit(lower: _CodesOf, bit: int) -> _CodesOf:
    """Codes whose bit number `bit` is stored apart: bit i of 32 bytes belongs to the columns of group i."""

    def codes(rows: _Rows, fmt: BlockFormat) -> _Codes:
        high = rows.thirty_two(fmt.layout["high"][0])
        for first, low in lower(rows, fmt):
            i, j = divmod(first, 32)
            yield first, rows.e.b.or_(low, _bits(rows.e, high[j // 4], bit - i, 1 << bit))

    return codes


def _iq4_xs_codes(rows: _Rows, fmt: BlockFormat) -> _Codes:
    assert fmt.table is not None
    e = rows.e
    for i in range(0, 8, 2):
        for j, v in enumerate(rows.thirty_two(fmt.layout["codes"][0] + 16 * i)):
            first = 32 * (i + j // 4) + 4 * (j % 4)
            for half, by in enumerate((0, -4)):
                yield first + 16 * half, lookup(e, fmt.table, e.b.bitcast(_bits(e, v, by, 15), _BYTES))


_SCALES: Mapping[str, Callable[[_Rows, BlockFormat], Scales]] = {
    "Q2_K": _q2_k_scales,
    "Q3_K": _q3_k_scales,
    "Q4_K": _six_bit_scales,
    "Q5_K": _six_bit_scales,
    "Q6_K": _q6_k_scales,
    "IQ4_XS": _iq4_xs_scales,
}
_CODES: Mapping[str, _CodesOf] = {
    "Q2_K": _q2_k_codes,
    "Q3_K": _with_high_bit(_q2_k_codes, 2),
    "Q4_K": _q4_k_codes,
    "Q5_K": _with_high_bit(_q4_k_codes, 4),
    "Q6_K": _q6_k_codes,
    "IQ4_XS": _iq4_xs_codes,
}


@vector_code
def fill_int16_panel(
    e: Emitter,
    format_name: str,
    w: ir.Value,
    row_bytes: ir.Value,
    first: ir.Value,
    last: ir.Value,
    out: ir.Value,
    d: ir.Value,
    mins: ir.Value,
) -> None:
    """Unpacks one super-block of rows first .. first + PANEL_ROWS - 1 into PANEL_ROWS columns of a panel.

    w: the address of the super-block in row 0. Rows after `last` repeat it. d: fp32 [lanes]; mins, if the format has
    any: fp32 [groups, lanes].
    """
    fmt, b, columns = FORMATS[format_name], e.b, int16_tile().columns
    scales, codes = super_block(e, fmt, row_addresses(e, w, row_bytes, first, last))
    e.store(scales.d, d)
    for g, mn in enumerate(scales.mn):
        e.store(b.fmul(e.to_float(mn), scales.dmin), mins, 4 * _LANES * g)
    doubled = [i // 2 * 2 for i in range(2 * _LANES)]
    factors = [e.pick(b.bitcast(sc, _WORDS), doubled) for sc in scales.sc]
    for column, words in codes:
        for odd, ints in enumerate(words):
            e.store(b.mul(ints, factors[column // fmt.group]), out, 4 * columns * (column // 2 + odd))


def row_addresses(
    e: Emitter, w: ir.Value, row_bytes: ir.Value, first: ir.Value, last: ir.Value
) -> list[ir.Value]:
    """The addresses in rows first .. first + PANEL_ROWS - 1 of what is at address w in row 0; rows after `last`
    repeat it."""
    b, numbers = e.b, [e.at(first, i) for i in range(_LANES)]
    numbers = [b.select(b.icmp_signed("<", number, last), number, last) for number in numbers]
    return [e.at(w, b.mul(number, row_bytes)) for number in numbers]


def super_block_bytes(
    e: Emitter, fmt: BlockFormat, starts: list[ir.Value]
) -> tuple[Scales, Iterator[tuple[int, ir.Value]]]:
    """The scales of a super-block of PANEL_ROWS rows, and for each four columns q of them, int8, four to a row."""
    offset = fmt.offset if fmt.table is None else TABLE_OFFSET
    rows = _Rows(e, starts)

    def lines() -> Iterator[tuple[int, ir.Value]]:
        for column, codes in _CODES[fmt.name](rows, fmt):
            line = e.b.bitcast(codes, _BYTES)
            yield column, e.b.sub(line, e.const(_BYTES, offset)) if offset else line

    return _SCALES[fmt.name](rows, fmt), lines()


def super_block(e: Emitter, fmt: BlockFormat, starts: list[ir.Value]) -> tuple[Scales, _Words]:
    """The scales of a super-block of PANEL_ROWS rows, and for each four columns q of the even ones and of the odd
    ones, int16 pairs in the lanes of their rows."""
    offset = fmt.offset if fmt.table is None else TABLE_OFFSET
    rows = _Rows(e, starts)

    def words() -> _Words:
        for column, codes in _CODES[fmt.name](rows, fmt):
            lines = e.b.bitcast(codes, _WORDS)
            parts = (e.and_(lines, 0xFF), e.shift_left(lines, -8))
            if offset:
                parts = tuple(e.b.sub(part, e.const(_WORDS, offset)) for part in parts)
            yield column, parts

    return _SCALES[fmt.name](rows, fmt), words()
