"""Dot products of quantized weight rows with quantized activations (row_ir.py).

Two weight rows are taken at once. With one activation row all sums stay in registers. With several, runs of blocks are
unpacked once and multiplied with every activation row in turn, whose sums lie in memory between runs. The arithmetic,
and so the bits, of a row is the same for any number of rows.

Order of the sums: the products of a group, 16 or 32 weights with one scale, add up to an exact integer. Of each
256 weights, each group has its own lane, one of 16 or 8: the integer times the scale is added to it, then the minimum
times the sum of the activations is subtracted. At the end the lanes are added by halves. Where a row's last weights are
fewer than 256, the groups of each 64 take the first lanes. The order depends on K and the format alone.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.gemv.quantized_rows import INTS, SCALES, SUM_FACTOR, SUMS
from quengine.kernels.cpu.ir.block_ir import Slices, emit_blocks
from quengine.kernels.cpu.ir.row_ir import FARTHER, PREFETCH, record_field
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, I64, Emitter, vec

# Memory of `dot_rows_with_many`: a run of unpacked weights of both rows, then for each activation row the lanes of its
# sums with both.
INTS_BYTES, SUMS_BYTES = 1024, 128

_MOST_AHEAD = (
    3 * PREFETCH
)  # bytes of a pair of rows, of which the following are prefetched while it is multiplied
Operands = tuple[ir.Value, ...]
OperandsOf = Callable[[int], Operands]


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
    """Two weight rows times one row of quantized activations, all at addresses: two fp32 to y.

    apart: bytes from the first weight row to the second; 0 if there is one only, and one result.
    """
    dots = _RowDots(e, FORMATS[format_name], (w, e.b.add(w, apart)), blocks)
    behind = e.b.select(e.b.icmp_signed("==", apart, e.i64(0)), e.i64(0), e.i64(4))
    for total, at in zip(_dot_with_one(dots, record), (y, e.at(y, behind)), strict=True):
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
    dots = _RowDots(e, FORMATS[format_name], (w, e.b.add(w, apart)), blocks)
    behind = e.b.select(e.b.icmp_signed("==", apart, e.i64(0)), e.i64(0), e.i64(4))

    def put(i: ir.Value, totals: list[ir.Value]) -> None:
        place = e.b.add(y, e.b.mul(i, y_stride))
        for total, at in zip(totals, (place, e.b.add(place, behind)), strict=True):
            e.store(total, at)

    _dot_with_many(dots, records, stride, count, memory, put)


class _RowDots:
    """Emits the code of the dot products of two weight rows of one format with activation rows.

    One iteration takes 8 slices of 32 weights: a block of 256, or shorter blocks of as many weights. The remaining
    blocks are taken by two, a last one alone. An activation row's state is the lanes of its sums with each weight row.
    """

    def __init__(
        self, e: Emitter, fmt: BlockFormat, rows: tuple[ir.Value, ir.Value], blocks: ir.Value
    ) -> None:
        self.e, self.fmt, self.rows, self.blocks = e, fmt, rows, blocks
        self.cols = e.b.mul(blocks, e.i64(fmt.block))
        self.groups = 32 // fmt.group  # of a slice: 1 or 2
        self.lanes = 8 * self.groups
        # With byte dots two slices are multiplied at once, and rows of 8 lanes share vectors of 16.
        self.step = 2 if e.byte_dot_lanes else 1
        self.joined = self.groups == 1 and bool(e.byte_dot_lanes)
        # Zeros that LLVM cannot prove to be zero: it would rematerialize proven ones for every sum, by an instruction
        # that depends on the register's old value.
        sign = e.b.trunc(e.b.lshr(blocks, e.i64(63)), I32)
        self.zero_ints = e.splat(sign, 16)

    def loops(
        self,
        state: list[ir.Value],
        turn: Callable[[ir.Value, int, list[ir.Value]], list[ir.Value]],
    ) -> list[ir.Value]:
        """Emits turn(i, blocks, state) over all blocks; returns the final state."""
        e, run = self.e, 256 // self.fmt.block
        whole = e.b.and_(self.blocks, e.i64(-run))
        state = e.loop(e.i64(0), whole, run, state, lambda i, s: turn(i, run, s))
        if run > 2:
            even = e.b.and_(self.blocks, e.i64(-2))
            state = e.loop(whole, even, 2, state, lambda i, s: turn(i, 2, s))
            whole = even
        if run > 1:
            state = e.loop(whole, self.blocks, 1, state, lambda i, s: turn(i, 1, s))
        return state

    def zeros(self) -> list[ir.Value]:
        """The state before the first block: a vector for each row, or for both rows one, the halves theirs."""
        return self.by_row([self.e.const(vec(F32, self.lanes), 0.0) for _ in self.rows])

    def by_row(self, values: list[ir.Value]) -> list[ir.Value]:
        """A vector of each row, as the state has them."""
        return [self.e.join(*values)] if self.joined else values

    def totals(self, state: list[ir.Value]) -> list[ir.Value]:
        """The dot product of each row."""
        return self.e.totals(list(self.e.halves(state[0])) if self.joined else state)

    def read(self, i: ir.Value, blocks: int, farther: bool = False) -> tuple[list[Slices], ir.Value, int]:
        """Blocks i .. i + blocks - 1 of each row, the index of their first slice, and the number of their slices.
        farther: lines that are FARTHER ahead are prefetched too, which pays where products do not take longer."""
        e, contents = self.e, list[Slices]()
        here, nbytes = e.b.mul(i, e.i64(self.fmt.nbytes)), blocks * self.fmt.nbytes
        for number, row in enumerate(self.rows):
            for level in range(1, 2 + farther):
                ahead = self._ahead(number, here, nbytes, FARTHER * (level - 1))
                for line in range(0, nbytes, 64):
                    e.prefetch(e.at(ahead, line), level=level)
            contents.append(emit_blocks(e, self.fmt, e.b.add(row, here), blocks))
        first_slice = e.b.mul(i, e.i64(self.fmt.block // 32))
        return contents, first_slice, blocks * self.fmt.block // 32

    def _ahead(self, number: int, here: ir.Value, nbytes: int, farther: int) -> ir.Value:
        """The address of `nbytes` to prefetch for a row: of the following rows, in the order of their bytes, or, where
        these are too many for the cache, of the row itself and then of the next but one. farther: bytes of both."""
        e, b, zero = self.e, self.e.b, self.e.i64(0)
        apart = b.sub(self.rows[1], self.rows[0])
        both = b.mul(apart, e.i64(2))
        in_order = b.icmp_signed("<", both, e.i64(_MOST_AHEAD))
        longest = b.select(b.icmp_signed("<", both, e.i64(PREFETCH)), e.i64(PREFETCH), both)
        distance = PREFETCH + farther // 2
        # All but `here` is the same for every run of blocks.
        following = e.at(b.add(self.rows[0], longest), number * nbytes + farther)
        first = b.select(in_order, following, e.at(self.rows[number], distance))
        ends = b.select(in_order, self.e.i64(1 << 62), b.sub(apart, e.i64(distance)))
        beyond = b.select(b.icmp_signed("<", here, ends), zero, apart)
        return b.add(first, b.add(b.shl(here, b.zext(in_order, I64)), beyond))

    def add(
        self,
        contents: list[Slices],
        operands: list[OperandsOf],
        slices: int,
        record: ir.Value,
        first_slice: ir.Value,
        sums: list[ir.Value],
        shared: bool = False,
    ) -> list[ir.Value]:
        """An activation row's lanes of each weight row, plus these slices; operands[row](j) are those of `_dots`.
        shared: both weight rows are multiplied with activations that were loaded once."""
        if self.e.byte_dot_lanes:
            return self._add(contents, operands, slices, record, first_slice, sums)
        rows = zip(contents, operands, sums, strict=True)
        added = list[ir.Value]()
        for content, of, before in rows:
            added += self._add([content], [of], slices, record, first_slice, [before])
            # int16 activations would fill the registers if both rows shared them.
            record = record if shared else self.e.unknown(record)
        return added

    def _add(
        self,
        contents: list[Slices],
        operands: list[OperandsOf],
        slices: int,
        record: ir.Value,
        first_slice: ir.Value,
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """`add` for some weight rows."""
        e, step, count = self.e, min(self.step, slices), slices * self.groups
        t = self._per_group(self._field(F32, record, SCALES, first_slice, slices))
        scales = [self._per_code(self._lanes(content.scales, count), content) for content in contents]
        dots = [
            [self._dots(of(j), record, first_slice, j, slices) for j in range(0, slices, step)]
            for of in operands
        ]
        heads = [self._head(before, count) for before in sums]
        factors = [e.b.fmul(scale, both) for scale, both in self._with(scales, t)]
        totals = self._group_sums(dots)
        if contents[0].offset:
            ints = self._field(I32, record, INTS[self.fmt.group], first_slice, count)
            shifted = times_offset(e, ints, contents[0].offset)
            totals = [e.b.add(*both) for both in self._with(totals, shifted, spread=False)]
        products = zip(totals, factors, heads, strict=True)
        heads = [e.fma(e.to_float(total), factor, head) for total, factor, head in products]
        if contents[0].mins is not None:
            added = self._field(F32, record, SUMS[self.fmt.group], first_slice, count)
            mins = self._with([self._lanes(content.mins or (), count) for content in contents], added)
            heads = [e.fma(e.b.fneg(m), both, head) for (m, both), head in zip(mins, heads, strict=True)]
        return [self._replaced(before, head) for before, head in zip(sums, heads, strict=True)]

    def _lanes(self, parts: tuple[ir.Value, ...], count: int) -> ir.Value:
        """Values of each group, in one vector of `count` lanes."""
        whole = parts[0] if len(parts) == 1 else self.e.join(*parts)
        return whole if whole.type.count == count else self.e.pick(whole, range(count))

    def _with(
        self, values: list[ir.Value], shared: ir.Value, spread: bool = True
    ) -> list[tuple[ir.Value, ir.Value]]:
        """Vectors as the state has them, each with values of an activation row for its rows. spread: given by row."""
        values = self.by_row(values) if spread else values
        shares = self.by_row([shared, shared]) if self.joined else [shared] * len(values)
        return list(zip(values, shares, strict=True))

    def _places(self, v: ir.Value, count: int) -> list[int]:
        """The lanes of each row's first `count` groups in a vector of the state."""
        return [first + i for first in range(0, v.type.count, self.lanes) for i in range(count)]

    def _head(self, v: ir.Value, count: int) -> ir.Value:
        """Each row's first `count` lanes of a vector of the state."""
        return v if count == self.lanes else self.e.pick(v, self._places(v, count))

    def _replaced(self, v: ir.Value, head: ir.Value) -> ir.Value:
        """A vector of the state with other first lanes of each row."""
        lanes = v.type.count
        if head.type.count == lanes:
            return head
        places = self._places(v, head.type.count * self.lanes // lanes)
        at = {place: i for i, place in enumerate(places)}
        wide = self.e.pick(head, [at.get(i, 0) for i in range(lanes)])
        return self.e.pick(wide, [i if i in at else lanes + i for i in range(lanes)], v)

    def operands_of(self, content: Slices, slices: int) -> OperandsOf:
        """The operands of `_dots`: `step` slices from j on as they are multiplied with activations."""
        e, n = self.e, min(self.step, slices)
        codes = content.unshifted or content.codes
        if e.byte_dot_lanes:
            return lambda j: (codes(j, n),)

        def pairs(j: int) -> Operands:
            wide = e.b.bitcast(codes(j, n), vec(I16, 16 * n))
            return e.and_(wide, 0xFF), e.shift_left(wide, -8)

        return pairs

    def _dots(
        self, operands: Operands, record: ir.Value, first_slice: ir.Value, j: int, slices: int
    ) -> ir.Value:
        """Slices from first_slice + j on, `step` of a run, times an activation row: int32 lanes, the exact sums over
        weights 4i .. 4i + 3.

        Of bytes activations are 256 * high + low.
        """
        e, b, n = self.e, self.e.b, min(self.step, slices)
        if not e.byte_dot_lanes:
            at = e.at(record, b.mul(first_slice, e.i64(64)))
            # Evens, then odds, of two slices, or of a lone one.
            evens, odds = 128 * (j // 2) + 32 * (j % 2), 32 * min(2, slices)
            products = (
                e.pair_products(ints, e.load(ints.type, at, evens + odds * i))
                for i, ints in enumerate(operands)
            )
            return b.add(*products)
        at = e.at(record, b.mul(e.at(first_slice, j), e.i64(32)))
        high = e.load(vec(I8, 32 * n), at)
        low = e.load(vec(I8, 32 * n), e.at(at, self.cols))
        zeros = self.zero_ints if n == 2 else e.pick(self.zero_ints, range(8))
        total = e.shift_left(e.add_byte_dots(zeros, operands[0], high), 8)
        return e.add_byte_dots(total, operands[0], low)

    def _group_sums(self, dots: list[list[ir.Value]]) -> list[ir.Value]:
        """The sums of each row's groups, in order and as the state has them, of int32 lanes over four neighbours."""
        e, run = self.e, self.fmt.group // 4
        if self.step * len(dots[0]) < 8:
            return self.by_row([_sums_of_runs(e, parts, run) for parts in dots])
        if self.step == 1:
            return [_sums_of_slices(e, parts, run) for parts in dots]
        fours = [_sums_of_fours(e, parts) for parts in dots]
        # Lane 4h + v of these: half h % 2 of slice 2v + h // 2.
        if run == 4:
            return [e.pick(four, [4 * (g % 4) + g // 4 for g in range(16)]) for four in fours]
        halves = [[4 * h + v for h in range(first, 4, 2) for v in range(4)] for first in range(2)]
        both = e.b.add(*(e.pick(fours[0], lanes + [16 + i for i in lanes], fours[1]) for lanes in halves))
        return [e.pick(both, [8 * row + 4 * (s % 2) + s // 2 for row in range(2) for s in range(8)])]

    def _per_group(self, t: ir.Value) -> ir.Value:
        """t of each group."""
        count = t.type.count
        return t if self.groups == 1 else self.e.pick(t, [i // 2 for i in range(2 * count)])

    def _per_code(self, scales: ir.Value, content: Slices) -> ir.Value:
        """Scales of slices that are multiplied as `unshifted` codes: powers of two less, so that no bit changes."""
        if not content.multiples:
            return scales
        lanes = [1.0 / multiple for multiple in content.multiples for _ in range(self.groups)]
        return self.e.b.fmul(scales, self.e.const(scales.type, lanes))

    def _field(
        self, lane: ir.Type, record: ir.Value, eighths: int, first_slice: ir.Value, count: int
    ) -> ir.Value:
        """`count` values of a record's field with one, or one for each group, of every slice, from a slice on."""
        e, each = self.e, 1 if eighths in (SCALES, INTS[32], SUMS[32]) else 2
        field = record_field(e, record, self.cols, eighths)
        return e.load(vec(lane, count), e.at(field, e.b.mul(first_slice, e.i64(4 * each))))


def times_offset(e: Emitter, sums: ir.Value, offset: int) -> ir.Value:
    """The negative of `offset`, a power of two, times sums of activations, of sums that are SUM_FACTOR times them."""
    power = offset.bit_length() - (-SUM_FACTOR).bit_length()
    return e.b.ashr(sums, e.const(sums.type, -power)) if power < 0 else e.shift_left(sums, power)


def _sums_of_slices(e: Emitter, parts: list[ir.Value], run: int) -> ir.Value:
    """The sums of each run of 4 or 8 lanes of eight vectors of 8 lanes, in order, in one vector."""
    fours = [_sums_of_fours(e, parts[i : i + 4]) for i in (0, 4)]
    if run == 4:
        return e.join(*(e.pick(four, [0, 4, 1, 5, 2, 6, 3, 7]) for four in fours))
    return e.b.add(*(e.pick(fours[0], [*lanes, *(8 + i for i in lanes)], fours[1]) for lanes in _HALVES))


_HALVES = range(4), range(4, 8)


def _sums_of_fours(e: Emitter, parts: list[ir.Value]) -> ir.Value:
    """The sums of each four lanes of four vectors: lane 4i + v is the sum of lanes 4i .. 4i + 3 of vector v.

    Lanes stay within their 16 bytes, which every processor shuffles in one instruction.
    """
    lanes = parts[0].type.count
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        even = [i + k + lanes * of for i in range(0, lanes, 4) for of in range(2) for k in (0, 2)]
        odd = [lane + 1 for lane in even]
        parts = [e.b.add(e.pick(x, even, y), e.pick(x, odd, y)) for x, y in pairs]
    return parts[0]


def _sums_of_runs(e: Emitter, parts: list[ir.Value], run: int) -> ir.Value:
    """The sums of each run of lanes of some vectors, in order, in one vector."""
    while run > 1:
        half = run // 2
        merged = list[ir.Value]()
        for i in range(0, len(parts), 2):
            pair = parts[i : i + 2]
            lanes = pair[0].type.count * len(pair)
            low, high = ([g + k for g in range(0, lanes, run) for k in range(s, s + half)] for s in (0, half))
            merged.append(e.b.add(e.pick(pair[0], low, *pair[1:]), e.pick(pair[0], high, *pair[1:])))
        parts, run = merged, half
    while len(parts) > 1:
        parts = [e.join(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _dot_with_one(dots: _RowDots, record: ir.Value) -> list[ir.Value]:
    """The fp32 dot products of weight rows with one row of quantized activations."""

    def turn(i: ir.Value, blocks: int, state: list[ir.Value]) -> list[ir.Value]:
        contents, first_slice, slices = dots.read(i, blocks, farther=True)
        operands = [dots.operands_of(content, slices) for content in contents]
        return dots.add(contents, operands, slices, record, first_slice, state)

    return dots.totals(dots.loops(dots.zeros(), turn))


def _dot_with_many(
    dots: _RowDots,
    records: ir.Value,
    stride: ir.Value,
    count: ir.Value,
    memory: ir.Value,
    put: Callable[[ir.Value, list[ir.Value]], None],
) -> None:
    """Calls put(i, the dot products with activation row i) for i < count."""
    e, zeros = dots.e, dots.zeros()
    sums, size = e.at(memory, INTS_BYTES), SUMS_BYTES // len(zeros)
    run = INTS_BYTES // 2

    def each(body: Callable[[ir.Value, ir.Value], None]) -> None:
        def turn(i: ir.Value) -> None:
            body(i, e.at(sums, e.b.mul(i, e.i64(SUMS_BYTES))))

        e.each(e.i64(0), count, 1, turn)

    def load(at: ir.Value) -> list[ir.Value]:
        return [e.load(zero.type, at, size * row) for row, zero in enumerate(zeros)]

    def keep(values: list[ir.Value], at: ir.Value) -> None:
        for row, value in enumerate(values):
            e.store(value, at, size * row)

    def turn(i: ir.Value, blocks: int, _state: list[ir.Value]) -> list[ir.Value]:
        contents, first_slice, slices = dots.read(i, blocks)
        kept = [
            _kept(e, dots.operands_of(content, slices), slices, memory, run * row)
            for row, content in enumerate(contents)
        ]

        def add(b: ir.Value, at: ir.Value) -> None:
            record = e.at(records, e.b.mul(b, stride))
            keep(dots.add(contents, kept, slices, record, first_slice, load(at), shared=True), at)

        each(add)
        return []

    each(lambda _, at: keep(zeros, at))
    dots.loops([], turn)
    each(lambda i, at: put(i, dots.totals(load(at))))


def _kept(e: Emitter, operands: OperandsOf, slices: int, memory: ir.Value, start: int) -> OperandsOf:
    """The operands of a run of slices, computed once.

    Bytes stay in registers. int16 goes through memory: LLVM would widen values held in registers once for all
    activation rows, and narrow them again to multiply.
    """
    step = 2 if e.byte_dot_lanes and slices > 1 else 1
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
