"""The dot products of quantized weight rows with activation records (row_ir.py), as numba intrinsics.

With one record all sums stay in registers. With several, runs of blocks of two rows are unpacked once and multiplied
with every record in turn; a record's sums lie in memory meanwhile. The arithmetic of a record and a row is the same,
and so are its bits.

Order of the sums: slices of 32 weights add into 8 lanes of two accumulators in turn; the two are added, then the lanes
pairwise; the sum of the minimums is subtracted last. It depends on nothing but K and the format.

Does not know: how rows are shared among threads.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.block_ir import Slices, emit_blocks
from quengine.kernels.cpu.row_ir import PREFETCH, emitter
from quengine.kernels.cpu.vector_ir import F32, I16, Emitter, vec

# What `dot_rows_with_many` keeps in memory: of both rows a run of unpacked weights, int16, as they are in a record, and
# then of each record its sums with both: the accumulators at 0, the minimums' at 64 and 96, those of the second row
# behind.
INTS_BYTES, SUMS_BYTES = 1024, 256

Ints = Callable[[int], tuple[ir.Value, ir.Value]]


@intrinsic(prefer_literal=True)
def dot_row(typingctx: Any, variant: Any, w: Any, blocks: Any, record: Any, y: Any) -> Any:
    """One weight row times one activation record, all at addresses: fp32 to y. `variant`: "Q4_K/..."."""
    fmt = FORMATS[variant.literal_value.split("/")[0]]

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, w, blocks, record, y = args
        e = emitter(context, builder)
        e.store(_RowDot(e, fmt, w, blocks).with_one(record), y)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def dot_rows_with_many(
    typingctx: Any,
    variant: Any,
    w: Any,
    apart: Any,
    blocks: Any,
    records: Any,
    stride: Any,
    count: Any,
    memory: Any,
    y: Any,
    y_stride: Any,
) -> Any:
    """Two weight rows times `count` activation records: y[b] and the fp32 behind it, b < count. `variant`: "Q4_K/...".

    w, records, y: addresses; stride, y_stride: bytes from record to record. apart: bytes from the one row to the other;
    0: there is one only, and one y. memory: the address of INTS_BYTES and SUMS_BYTES for each record, written before
    they are read.
    """
    fmt = FORMATS[variant.literal_value.split("/")[0]]

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, w, apart, blocks, records, stride, count, memory, y, y_stride = args
        e = emitter(context, builder)
        dots = [_RowDot(e, fmt, row, blocks) for row in (w, builder.add(w, apart))]
        behind = builder.select(builder.icmp_signed("==", apart, e.i64(0)), e.i64(0), e.i64(4))

        def put(i: ir.Value, totals: list[ir.Value]) -> None:
            place = builder.add(y, builder.mul(i, y_stride))
            for total, at in zip(totals, (place, builder.add(place, behind)), strict=True):
                e.store(total, at)

        _dot_with_many(dots, records, stride, count, memory, put)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 9), codegen


class _RowDot:
    """Writes the code of one row's dot products.

    A turn of the loop takes 8 slices of 32 weights: a block of 256, or 8 blocks of 32; what is left of the latter is
    taken by two, a last one alone. The sums of a record are three: both accumulators as one of 16 lanes, the
    minimums of whole turns (8 lanes), and those of the rest (one lane).
    """

    def __init__(self, e: Emitter, fmt: BlockFormat, w: ir.Value, blocks: ir.Value) -> None:
        self.e, self.fmt, self.w, self.blocks = e, fmt, w, blocks
        self.cols = e.b.mul(blocks, e.i64(fmt.block))

    def with_one(self, record: ir.Value) -> ir.Value:
        """The fp32 dot product with one record."""

        def turn(i: ir.Value, blocks: int, sums: list[ir.Value]) -> list[ir.Value]:
            content, first_slice, slices = self.read(i, blocks)
            return self.add(content, self.ints_of(content, slices), slices, record, first_slice, sums)

        def single(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            first, second = self.e.halves(sums[0])
            narrow = turn(i, 1, [first, *sums[1:]])
            return [self.e.join(narrow[0], second), *narrow[1:]]

        return self.totals([self.loops(self.zeros(), turn, single)])[0]

    def loops(self, state: list[ir.Value], turn: Any, single: Any) -> list[ir.Value]:
        """turn(i, blocks, state) over all blocks, single(i, state) for a last one; what they make of the state."""
        e, run = self.e, 256 // self.fmt.block
        whole = e.b.and_(self.blocks, e.i64(-run))
        state = e.loop(e.i64(0), whole, run, state, lambda i, s: turn(i, run, s))
        if run > 1:
            even = e.b.and_(self.blocks, e.i64(-2))
            state = e.loop(whole, even, 2, state, lambda i, s: turn(i, 2, s))
            state = e.loop(even, self.blocks, 1, state, single)
        return state

    def zeros(self) -> list[ir.Value]:
        return [self.e.const(vec(F32, lanes), 0.0) for lanes in (16, 8, 1)]

    def totals(self, sums: list[list[ir.Value]]) -> list[ir.Value]:
        """The dot products that the three sums of each of some rows make."""
        e = self.e
        totals = e.totals([both for both, _, _ in sums])
        if not self.fmt.has_min:
            return totals
        mins = e.totals([mins for _, mins, _ in sums])
        rest = [e.total(rest) for _, _, rest in sums]
        both = zip(totals, mins, rest, strict=True)
        return [e.b.fsub(total, e.b.fadd(part, more)) for total, part, more in both]

    def read(self, i: ir.Value, blocks: int) -> tuple[Slices, ir.Value, int]:
        """Blocks i .. i + blocks - 1, the number of their first slice, and how many slices they have."""
        e = self.e
        address = e.at(self.w, e.b.mul(i, e.i64(self.fmt.nbytes)))
        for ahead in range(0, blocks * self.fmt.nbytes, 64):
            e.prefetch(e.at(address, PREFETCH + ahead))
        first_slice = e.b.mul(i, e.i64(self.fmt.block // 32))
        return emit_blocks(e, self.fmt, address, blocks), first_slice, blocks * self.fmt.block // 32

    def add(
        self,
        content: Slices,
        ints: Ints,
        slices: int,
        record: ir.Value,
        first_slice: ir.Value,
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """A record's sums with these slices added, two at a time; ints(j) are those of slice j and the next."""
        e, (total, *mins) = self.e, sums
        lanes = content.scales[0].type.count
        t = self._per_group(self._field(record, 32, first_slice, lanes), content)
        factors = [e.b.fmul(s, u) for s, u in zip(content.scales, t, strict=True)]
        if content.mins is not None:
            slot = 0 if lanes == 8 or len(content.mins) == 2 else 1
            mins[slot] = self._add_mins(content.mins, record, first_slice, mins[slot])
        step = min(2, slices)
        a = e.at(record, e.b.mul(first_slice, e.i64(64)))
        if content.paired:
            a = e.at(a, e.b.mul(self.cols, e.i64(2)))
        for j in range(0, slices, step):
            low, high = ints(j)
            x_low, x_high = (e.load(vec(I16, 16 * step), a, 64 * j + 32 * step * h) for h in (0, 1))
            dots = e.b.add(e.pair_products(low, x_low), e.pair_products(high, x_high))
            factor = self._side_by_side([self._factor(factors, j + k) for k in range(step)])
            total = e.fma(e.to_float(dots), factor, total)
        return [total, *mins]

    def ints_of(self, content: Slices, slices: int) -> Ints:
        """Of slices j and j + 1 (of a lone one j), side by side, as `Slices.ints` gives one."""

        def ints(j: int) -> tuple[ir.Value, ir.Value]:
            if slices == 1:
                return content.ints(j)
            if content.joint is not None:
                return content.joint(j)
            parts = [content.ints(j + k) for k in range(2)]
            low, high = ([part[half] for part in parts] for half in range(2))
            return self._side_by_side(low), self._side_by_side(high)

        return ints

    def _side_by_side(self, vectors: list[ir.Value]) -> ir.Value:
        return vectors[0] if len(vectors) == 1 else self.e.join(*vectors)

    def _per_group(self, t: ir.Value, content: Slices) -> tuple[ir.Value, ...]:
        """t of the slices as vectors that match the scales."""
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
        """fp32 lanes of the field of the record that starts at byte K * eighths / 8, from a slice on."""
        e = self.e
        start = e.b.lshr(e.b.mul(self.cols, e.i64(eighths)), e.i64(3))
        address = e.b.add(e.b.add(record, start), e.b.mul(first_slice, e.i64(4 * per_slice)))
        return e.load(vec(F32, lanes * per_slice), address)

    def _add_mins(
        self, mins: tuple[ir.Value, ...], record: ir.Value, first_slice: ir.Value, total: ir.Value
    ) -> ir.Value:
        """total plus the minimums times t * sum(a), in the lanes of total or one after the other in its only one."""
        e, lanes = self.e, mins[0].type.count
        if len(mins) == 1:
            sums = self._field(record, 33, first_slice, lanes)
            if total.type.count == lanes:
                return e.fma(mins[0], sums, total)
            for lane in range(lanes):
                total = e.fma(e.splat_lane(mins[0], lane, 1), e.splat_lane(sums, lane, 1), total)
            return total
        for part, sums in zip(
            mins, e.halves(self._field(record, 34, first_slice, lanes, per_slice=2)), strict=True
        ):
            total = e.fma(part, sums, total)
        return total


def _dot_with_many(
    dots: list[_RowDot],
    records: ir.Value,
    stride: ir.Value,
    count: ir.Value,
    memory: ir.Value,
    put: Callable[[ir.Value, list[ir.Value]], None],
) -> None:
    """put(i, the dot products with record i), i < count, of rows of one format.

    The unpacked weights go through memory: held in registers LLVM would widen them for all records together, and
    narrow them again to multiply.
    """
    e, first, fmt = dots[0].e, dots[0], dots[0].fmt
    sums, run, size = e.at(memory, INTS_BYTES), INTS_BYTES // len(dots), SUMS_BYTES // len(dots)
    places = (0, 64, 96) if fmt.has_min else (0,)

    def each(body: Callable[[ir.Value, ir.Value], None]) -> None:
        def turn(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            body(i, e.at(sums, e.b.mul(i, e.i64(SUMS_BYTES))))
            return []

        e.loop(e.i64(0), count, 1, [], turn)

    def load(at: ir.Value, row: int, lanes: int) -> list[ir.Value]:
        """A row's sums with a record, the accumulators as so many lanes."""
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
        for row, dot in enumerate(dots):
            unpacked = dot.ints_of(contents[row][0], slices)
            for j in range(0, slices, step):
                for h, part in enumerate(unpacked(j)):
                    e.store(part, memory, run * row + 64 * j + 32 * step * h)

        def ints_of(row: int) -> Ints:
            def ints(j: int) -> tuple[ir.Value, ir.Value]:
                at = run * row + 64 * j
                low, high = (e.load(vec(I16, 16 * step), memory, at + 32 * step * h) for h in (0, 1))
                return low, high

            return ints

        def add(b: ir.Value, at: ir.Value) -> None:
            record = e.at(records, e.b.mul(b, stride))
            before = [load(at, row, 8 * step) for row in range(len(dots))]
            after = [
                dot.add(contents[row][0], ints_of(row), slices, record, first_slice, before[row])
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
