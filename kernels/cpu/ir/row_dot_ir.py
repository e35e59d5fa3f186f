"""Dot products of quantized weight rows with quantized activations (row_ir.py).

With one activation row all sums stay in registers. With several, runs of blocks of two weight rows are unpacked once
and multiplied with every activation row in turn, whose sums lie in memory between runs. The arithmetic, and so the
bits, of a pair of rows is the same for any number of rows.

Order of the sums: within a slice of 32 weights each four neighbours make one exact integer; these 8, times the scale,
are added into 8 lanes of two accumulators in turn; the two are added, then the lanes pairwise; the sum of the
minimums is subtracted last. The order depends on K and the format alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.ir.block_ir import Slices, emit_blocks
from quengine.kernels.cpu.ir.row_ir import FOUR_SUM_OFFSET, PREFETCH
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, Emitter, vec

# Memory of `dot_rows_with_many`: a run of unpacked weights of both rows, then for each activation row its sums with
# both: accumulators at 0, those of the minimums at 64 and 96, the second weight row's in the second half.
INTS_BYTES, SUMS_BYTES = 1024, 256

Operands = tuple[ir.Value, ...]
OperandsOf = Callable[[int], Operands]


def rows_at_once(fmt: BlockFormat) -> int:
    """Weight rows that `dot_rows` takes at once: 2 for formats of short blocks, as short rows share loop overhead."""
    return 2 if fmt.block == 32 else 1


@vector_code
def dot_rows(
    e: Emitter,
    format_name: str,
    w: ir.Value,
    apart: ir.Value,
    blocks: ir.Value,
    record: ir.Value,
    y: ir.Value,
) -> None:
    """`rows_at_once` weight rows times one row of quantized activations, all at addresses: `rows_at_once` fp32 to y.

    apart: bytes from the first weight row to the second; 0 if there is one only.
    """
    fmt = FORMATS[format_name]
    dots = [_RowDot(e, fmt, row, blocks) for row in (w, e.b.add(w, apart))[: rows_at_once(fmt)]]
    behind = e.b.select(e.b.icmp_signed("==", apart, e.i64(0)), e.i64(0), e.i64(4))
    for total, at in zip(_dot_with_one(dots, record), (y, e.at(y, behind)), strict=False):
        e.store(total, at)


@vector_code
def dot_rows_with_many(
    e: Emitter,
    format_name: str,
    w: ir.Value,
    apart: ir.Value,
    blocks: ir.Value,
    records: ir.Value,
    stride: ir.Value,
    count: ir.Value,
    memory: ir.Value,
    y: ir.Value,
    y_stride: ir.Value,
) -> None:
    """Two weight rows times `count` rows of quantized activations: fp32 y[b, 0] and y[b, 1], b < count.

    w, records, y: addresses; stride, y_stride: bytes between activation rows. apart: bytes from the first weight row
    to the second; 0 if there is one only, and one result per row. memory: scratch of INTS_BYTES, and SUMS_BYTES for
    each activation row.
    """
    fmt = FORMATS[format_name]
    dots = [_RowDot(e, fmt, row, blocks) for row in (w, e.b.add(w, apart))]
    behind = e.b.select(e.b.icmp_signed("==", apart, e.i64(0)), e.i64(0), e.i64(4))

    def put(i: ir.Value, totals: list[ir.Value]) -> None:
        place = e.b.add(y, e.b.mul(i, y_stride))
        for total, at in zip(totals, (place, e.b.add(place, behind)), strict=True):
            e.store(total, at)

    _dot_with_many(dots, records, stride, count, memory, put)


class _RowDot:
    """Emits the code of one weight row's dot products.

    One iteration takes 8 slices of 32 weights: a block of 256, or 8 blocks of 32; the remaining blocks are taken by
    two, a last one alone, of 32 weights with half of the accumulators. An activation row has three sums: both
    accumulators as one of 16 lanes, the minimums of full iterations (8 lanes), and those of the remainder (one lane).
    """

    def __init__(self, e: Emitter, fmt: BlockFormat, w: ir.Value, blocks: ir.Value) -> None:
        self.e, self.fmt, self.w, self.blocks = e, fmt, w, blocks
        self.cols = e.b.mul(blocks, e.i64(fmt.block))
        # Zeros that LLVM cannot prove to be zero: it would rematerialize proven ones for every sum, by an instruction
        # that depends on the register's old value.
        sign = e.b.trunc(e.b.lshr(blocks, e.i64(63)), I32)
        self.zero_ints = e.splat(sign, 16)

    def loops(self, state: list[ir.Value], turn: Any, single: Any) -> list[ir.Value]:
        """Emits turn(i, blocks, state) over all blocks and single(i, state) for a last one; returns the final state."""
        e, run = self.e, 256 // self.fmt.block
        whole = e.b.and_(self.blocks, e.i64(-run))
        state = e.loop(e.i64(0), whole, run, state, lambda i, s: turn(i, run, s))
        if run > 1:
            even = e.b.and_(self.blocks, e.i64(-2))
            if run > 2:
                state = e.loop(whole, even, 2, state, lambda i, s: turn(i, 2, s))
            last = single if self.fmt.block == 32 else lambda i, s: turn(i, 1, s)
            state = e.loop(even, self.blocks, 1, state, last)
        return state

    def zeros(self) -> list[ir.Value]:
        return [self.e.const(vec(F32, lanes), 0.0) for lanes in (16, 8, 1)]

    def totals(self, sums: list[list[ir.Value]]) -> list[ir.Value]:
        """The dot products of some rows from the three sums of each."""
        e = self.e
        totals = e.totals([both for both, _, _ in sums])
        if not self.fmt.has_min:
            return totals
        mins = e.totals([mins for _, mins, _ in sums])
        rest = [e.total(rest) for _, _, rest in sums]
        both = zip(totals, mins, rest, strict=True)
        return [e.b.fsub(total, e.b.fadd(part, more)) for total, part, more in both]

    def read(self, i: ir.Value, blocks: int) -> tuple[Slices, ir.Value, int]:
        """Blocks i .. i + blocks - 1, the index of their first slice, and the number of their slices."""
        e = self.e
        address = e.at(self.w, e.b.mul(i, e.i64(self.fmt.nbytes)))
        for ahead in range(0, blocks * self.fmt.nbytes, 64):
            e.prefetch(e.at(address, PREFETCH + ahead))
        first_slice = e.b.mul(i, e.i64(self.fmt.block // 32))
        return emit_blocks(e, self.fmt, address, blocks), first_slice, blocks * self.fmt.block // 32

    def add(
        self,
        content: Slices,
        operands: OperandsOf,
        slices: int,
        record: ir.Value,
        first_slice: ir.Value,
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """An activation row's sums plus these slices, two at a time; operands(j) are those of slices j and j + 1."""
        e, (total, *mins) = self.e, sums
        lanes = content.scales[0].type.count
        t = self._per_group(self._field(record, 0, first_slice, lanes), content)
        factors = [e.b.fmul(s, u) for s, u in zip(content.scales, t, strict=True)]
        if content.mins is not None:
            slot = 0 if lanes == 8 or len(content.mins) == 2 else 1
            mins[slot] = self._add_mins(content.mins, record, first_slice, mins[slot])
        step = min(2, slices)
        for j in range(0, slices, step):
            dots = self._dots(operands(j), record, e.at(first_slice, j), step, content.offset)
            factor = self._side_by_side([self._factor(factors, j + k) for k in range(step)])
            total = e.fma(e.to_float(dots), factor, total)
        return [total, *mins]

    def operands_of(self, content: Slices, slices: int) -> OperandsOf:
        """The operands of `_dots`: slices j and j + 1 as they are multiplied with activations, or a lone slice j."""
        e, n = self.e, min(2, slices)
        if e.byte_dot_lanes:
            return lambda j: (content.codes(j, n),)

        def pairs(j: int) -> Operands:
            ints = content.ints(e, j, n)
            wide = e.b.bitcast(ints, vec(I16, ints.type.count // 2))
            eight = e.const(wide.type, 8)
            if content.offset:
                return e.b.ashr(e.b.shl(wide, eight), eight), e.b.ashr(wide, eight)
            return e.and_(wide, 0xFF), e.b.lshr(wide, eight)

        return pairs

    def _dots(self, operands: Operands, record: ir.Value, slice_: ir.Value, n: int, offset: int) -> ir.Value:
        """n slices times an activation row: int32 lanes, the exact sums over weights 4i .. 4i + 3.

        Activations are 256 * high + low, weights codes - offset, which gives four sums of byte products.
        """
        e, b = self.e, self.e.b
        if not e.byte_dot_lanes:
            at = e.at(record, b.mul(slice_, e.i64(64)))
            products = (
                e.pair_products(ints, e.load(ints.type, at, 32 * n * i)) for i, ints in enumerate(operands)
            )
            return b.add(*products)
        at = e.at(record, b.mul(slice_, e.i64(32)))
        high = e.load(vec(I8, 32 * n), at)
        low = e.load(vec(I8, 32 * n), e.at(at, self.cols))
        zeros = self.zero_ints if n == 2 else e.pick(self.zero_ints, range(8))
        total = e.shift_left(e.add_byte_dots(zeros, operands[0], high), 8)
        if not offset:
            return e.add_byte_dots(total, operands[0], low)
        sums = e.load(zeros.type, e.at(at, b.mul(self.cols, e.i64(2))))
        if offset < FOUR_SUM_OFFSET:
            sums = b.ashr(sums, e.const(sums.type, (FOUR_SUM_OFFSET // offset).bit_length() - 1))
        sums = e.shift_left(
            sums, (offset // FOUR_SUM_OFFSET).bit_length() - 1 if offset > FOUR_SUM_OFFSET else 0
        )
        return b.add(total, e.add_byte_dots(sums, operands[0], low))

    def _side_by_side(self, vectors: list[ir.Value]) -> ir.Value:
        return vectors[0] if len(vectors) == 1 else self.e.join(*vectors)

    def _per_group(self, t: ir.Value, content: Slices) -> tuple[ir.Value, ...]:
        """t of each slice, in vectors that match the scales."""
        if len(content.scales) == 1:
            return (t,)
        twice = [[slice_ for slice_ in slices for _ in range(2)] for slices in (range(4), range(4, 8))]
        return tuple(self.e.pick(t, lanes) for lanes in twice)

    def _factor(self, factors: list[ir.Value], j: int) -> ir.Value:
        """The scale of each of the 8 integer sums of slice j."""
        if len(factors) == 1:
            return self.e.splat_lane(factors[0], j, 8)
        first = 2 * (j % 4)  # the first 4 sums are of the slice's first group
        return self.e.pick(factors[j // 4], [first] * 4 + [first + 1] * 4)

    def _field(
        self, record: ir.Value, eighths: int, first_slice: ir.Value, lanes: int, per_slice: int = 1
    ) -> ir.Value:
        """fp32 lanes from a slice on, of the record's field that starts at byte 3K + K * eighths / 8."""
        e = self.e
        start = e.b.lshr(e.b.mul(self.cols, e.i64(24 + eighths)), e.i64(3))
        address = e.b.add(e.b.add(record, start), e.b.mul(first_slice, e.i64(4 * per_slice)))
        return e.load(vec(F32, lanes * per_slice), address)

    def _add_mins(
        self, mins: tuple[ir.Value, ...], record: ir.Value, first_slice: ir.Value, total: ir.Value
    ) -> ir.Value:
        """total plus the minimums times t * sum(a): lane by lane, or all in sequence if total has one lane."""
        e, lanes = self.e, mins[0].type.count
        if len(mins) == 1:
            sums = self._field(record, 1, first_slice, lanes)
            if total.type.count == lanes:
                return e.fma(mins[0], sums, total)
            for lane in range(lanes):
                total = e.fma(e.splat_lane(mins[0], lane, 1), e.splat_lane(sums, lane, 1), total)
            return total
        for part, sums in zip(
            mins, e.halves(self._field(record, 2, first_slice, lanes, per_slice=2)), strict=True
        ):
            total = e.fma(part, sums, total)
        return total


def _dot_with_one(dots: list[_RowDot], record: ir.Value) -> list[ir.Value]:
    """The fp32 dot products of weight rows of one format with one row of quantized activations."""
    e, first = dots[0].e, dots[0]
    size = len(first.zeros())

    def turn(i: ir.Value, blocks: int, state: list[ir.Value]) -> list[ir.Value]:
        result = []
        for row, dot in enumerate(dots):
            content, first_slice, slices = dot.read(i, blocks)
            operands, sums = dot.operands_of(content, slices), state[size * row : size * (row + 1)]
            result += dot.add(content, operands, slices, record, first_slice, sums)
        return result

    def single(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        halves = {size * row: e.halves(state[size * row]) for row in range(len(dots))}
        after = turn(i, 1, [halves[k][0] if k in halves else value for k, value in enumerate(state)])
        return [e.join(value, halves[k][1]) if k in halves else value for k, value in enumerate(after)]

    state = first.loops(first.zeros() * len(dots), turn, single)
    return first.totals([state[size * row : size * (row + 1)] for row in range(len(dots))])


def _dot_with_many(
    dots: list[_RowDot],
    records: ir.Value,
    stride: ir.Value,
    count: ir.Value,
    memory: ir.Value,
    put: Callable[[ir.Value, list[ir.Value]], None],
) -> None:
    """Calls put(i, the dot products with activation row i) for i < count; the weight rows are of one format."""
    e, first, fmt = dots[0].e, dots[0], dots[0].fmt
    sums, run, size = e.at(memory, INTS_BYTES), INTS_BYTES // len(dots), SUMS_BYTES // len(dots)
    places = (0, 64, 96) if fmt.has_min else (0,)

    def each(body: Callable[[ir.Value, ir.Value], None]) -> None:
        def turn(i: ir.Value) -> None:
            body(i, e.at(sums, e.b.mul(i, e.i64(SUMS_BYTES))))

        e.each(e.i64(0), count, 1, turn)

    def load(at: ir.Value, row: int, lanes: int) -> list[ir.Value]:
        """A weight row's sums with an activation row, the accumulators as `lanes` lanes."""
        held = zip((lanes, 8, 1), places, strict=False)
        stored = [e.load(vec(F32, n), at, size * row + place) for n, place in held]
        return stored + first.zeros()[len(places) :]

    def clear(_: ir.Value, at: ir.Value) -> None:
        for row in range(len(dots)):
            for zero, place in zip(first.zeros(), places, strict=False):
                e.store(zero, at, size * row + place)

    def turn(i: ir.Value, blocks: int, _state: list[ir.Value]) -> list[ir.Value]:
        contents = [dot.read(i, blocks) for dot in dots]
        first_slice, slices = contents[0][1:]
        step = min(2, slices)
        kept = [
            _kept(e, dot.operands_of(contents[row][0], slices), slices, memory, run * row)
            for row, dot in enumerate(dots)
        ]

        def add(b: ir.Value, at: ir.Value) -> None:
            record = e.at(records, e.b.mul(b, stride))
            before = [load(at, row, 8 * step) for row in range(len(dots))]
            after = [
                dot.add(contents[row][0], kept[row], slices, record, first_slice, before[row])
                for row, dot in enumerate(dots)
            ]
            for row in range(len(dots)):
                for old, new, place in zip(before[row], after[row], places, strict=False):
                    if new is not old:
                        e.store(new, at, size * row + place)

        each(add)
        return []

    each(clear)
    first.loops([], turn, lambda i, state: turn(i, 1, state))
    each(lambda i, at: put(i, first.totals([load(at, row, 16) for row in range(len(dots))])))


def _kept(e: Emitter, operands: OperandsOf, slices: int, memory: ir.Value, start: int) -> OperandsOf:
    """The operands of a run of slices, computed once.

    Bytes stay in registers. int16 goes through memory: LLVM would widen values held in registers once for all
    activation rows, and narrow them again to multiply.
    """
    step = min(2, slices)
    held = {j: operands(j) for j in range(0, slices, step)}
    if e.byte_dot_lanes:
        return held.__getitem__
    for j, parts in held.items():
        for h, part in enumerate(parts):
            e.store(part, memory, start + 64 * j + 32 * step * h)

    def loaded(j: int) -> Operands:
        return tuple(
            e.load(part.type, memory, start + 64 * j + 32 * step * h) for h, part in enumerate(held[j])
        )

    return loaded
