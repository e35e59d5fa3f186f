"""The kernel of the search for entries of codebooks: kernels/quantize/books.py, operation for operation.

For 16 vectors at a time the sums of all combinations of half an entry lie in the L1 cache. The nearest entry is the one
whose halves have the least total, which takes an addition and a minimum for each entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce
from itertools import product

import torch
from llvmlite import ir
from numba import njit

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.ir.codebook_ir import table_address
from quengine.kernels.cpu.ir.tile_ir import stack_floats
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import I8, I16, I32, I64, Emitter
from quengine.kernels.cpu.quantize.block_input_kernels import block_reader
from quengine.kernels.cpu.quantize.book_search import BookSearchArguments
from quengine.kernels.cpu.quantize.lanes import (
    FLOATS,
    INTS,
    LANE_BYTES,
    LANES,
    Lanes,
    largest,
    least,
    load,
    load_ints,
    number,
    total,
)
from quengine.kernels.cpu.quantize.memory import Memory, Places, TaskBlocks
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.quantize.books import EVEN, PEAKS, SPREADS, UNIT_STEPS
from quengine.kernels.quantize.entries import FARTHEST, EntryBook

_UNROLLED = 8
"""Entries of a turn of the innermost loop."""


@dataclass(frozen=True)
class _Plan:
    """A format's constants, and its memory.

    A fit is the entries of a group's vectors, as combinations of levels, then error, dot and square, then for types
    with an even number of signs the target.
    """

    fmt: BlockFormat
    book: EntryBook
    vectors: int
    trials: int
    fit: int
    places: Places

    @property
    def groups(self) -> int:
        return self.fmt.block // self.fmt.group

    @property
    def even(self) -> bool:
        return self.fmt.name in EVEN

    @property
    def each_part(self) -> bool:
        """Whether all vectors of a group have entries of the same part."""
        return self.fmt.name == "IQ1_S"


@cache
def _plan(name: str) -> _Plan:
    """The plan of a format.

    Its memory has x and weights of a block; x, weights and target of a group, sums of halves of entries, and entries
    nearest to the group's vectors; a trial's scales, its fit and the best gain; two fits of each group, its scale and
    multiples of d; d and another.
    """
    fmt = FORMATS[name]
    book, vectors = EntryBook(fmt, torch.device("cpu")), fmt.group // fmt.width
    trials = len(SPREADS) + (0 if book.parts > 1 else len(PEAKS))
    fit = vectors + 3 + (fmt.group if name in EVEN else 0)
    groups = fmt.block // fmt.group
    sizes = dict.fromkeys(("block_x", "block_weights"), fmt.block)
    sizes |= dict.fromkeys(("x", "weights", "target"), fmt.group) | dict.fromkeys(
        ("first", "second"), book.half
    )
    sizes |= {"keys": book.parts * vectors, "trial_scale": trials, "trial": fit, "gain": 1}
    sizes |= dict.fromkeys(("fits", "others"), groups * fit)
    sizes |= dict.fromkeys(("scale", "sub", "other_sub"), groups) | {"d": 1, "moved": 1}
    return _Plan(fmt, book, vectors, trials, fit, Places(sizes))


def book_search_kernel(format_name: str) -> bytes:
    """Task i searches for blocks 16 * i to 16 * i + 15."""
    plan = _plan(format_name)
    places, groups, trials, fit_bytes = plan.places, plan.groups, plan.trials, plan.fit * LANE_BYTES
    floats, scale, trial_scale, trial = (
        places.floats,
        places["scale"],
        places["trial_scale"],
        places["trial"],
    )
    fits, others = places["fits"], places["others"]
    read = block_reader(format_name, places["block_x"], places["block_weights"])

    @njit  # type: ignore[untyped-decorator]
    def nearest(memory: int, scale_at: int, fit_at: int) -> None:
        _nearest_entries(format_name, memory, scale_at)
        _fit_entries(format_name, memory, scale_at, fit_at)

    def search(args: BookSearchArguments, task: int) -> None:
        memory = stack_floats(floats)
        read(args, memory, task)
        for group in range(groups):
            fit_at = memory + fits + group * fit_bytes
            _take_group(format_name, memory, group)
            _start_group(format_name, memory)
            for i in range(trials):
                nearest(memory, memory + trial_scale + i * 64, memory + trial)
                _keep_better(format_name, memory, fit_at)
        _first_unit(format_name, memory)
        for group in range(groups):
            _take_group(format_name, memory, group)
            _load_target(format_name, memory, memory + fits + group * fit_bytes)
            nearest(memory, memory + scale + group * 64, memory + others + group * fit_bytes)
        _moved_unit(format_name, memory)
        for group in range(groups):
            _take_group(format_name, memory, group)
            _load_target(format_name, memory, memory + others + group * fit_bytes)
            nearest(memory, memory + scale + group * 64, memory + fits + group * fit_bytes)
        _choose_unit(format_name, args, memory, task)
        for group in range(groups):
            _take_group(format_name, memory, group)
            _store_group(format_name, args, memory, task, group)

    return compile_kernel(search, BookSearchArguments)


class _Held(Memory):
    def __init__(self, e: Emitter, name: str, address: ir.Value) -> None:
        self.plan = _plan(name)
        super().__init__(e, self.plan.places, address)

    def fit(self, name: str, group: int | ir.Value = 0) -> _FitAt:
        size = self.plan.fit
        start = group * size if isinstance(group, int) else self.e.b.mul(group, self.e.i64(size))
        return _FitAt(self.e, self.plan, self.at(name, start))

    def magnitude(self, i: int) -> Lanes:
        x = self.load("x", i)
        return x if self.plan.fmt.book == "IQ1" else x.abs()


class _FitAt:
    """A fit at an address."""

    def __init__(self, e: Emitter, plan: _Plan, address: ir.Value) -> None:
        self.e, self.plan, self.address = e, plan, address

    def at(self, place: int) -> ir.Value:
        return self.e.at(self.address, place * LANE_BYTES)

    def sums(self) -> tuple[Lanes, Lanes, Lanes]:
        """Error, dot and square."""
        error, dot, square = (load(self.e, self.at(self.plan.vectors + i)) for i in range(3))
        return error, dot, square


@vector_code
def _take_group(e: Emitter, name: str, memory: ir.Value, group: ir.Value) -> None:
    """x and the weights of a group from those of the block."""
    held = _Held(e, name, memory)
    size = held.plan.fmt.group
    start = e.b.mul(group, e.i64(size))
    for kind in ("x", "weights"):
        for i, each in enumerate(held.loads(f"block_{kind}", size, start)):
            each.store(held.at(kind, i))


@vector_code
def _load_target(e: Emitter, name: str, memory: ir.Value, fit: ir.Value) -> None:
    """The target of a fit to the memory's."""
    held = _Held(e, name, memory)
    plan = held.plan
    for i in range(plan.fmt.group):
        if plan.even:
            load(e, fit, (plan.vectors + 3 + i) * LANE_BYTES).store(held.at("target", i))
        else:
            held.magnitude(i).store(held.at("target", i))


def _targets(held: _Held, q: list[Lanes] | None) -> list[Lanes]:
    """As `books._Groups.target`."""
    magnitudes = [held.magnitude(i) for i in range(held.plan.fmt.group)]
    if not held.plan.even:
        return magnitudes
    costs = [held.load("weights", i) * each for i, each in enumerate(magnitudes)]
    if q is not None:
        costs = [cost * value for cost, value in zip(costs, q, strict=True)]
    turned = [mask for first in range(0, len(costs), 8) for mask in _turned(held, costs, first)]
    return [(-each).where(mask, each) for each, mask in zip(magnitudes, turned, strict=True)]


def _turned(held: _Held, costs: list[Lanes], first: int) -> list[Lanes]:
    """Whether the sign of each of eight weights is turned, bools."""
    orders = [(cost.bits() & -8) | i for i, cost in enumerate(costs[first : first + 8])]
    negative = [held.load("x", first + i) < 0.0 for i in range(8)]
    odd = reduce(lambda one, other: one ^ other, negative)
    lowest = least(orders)
    return [order.equals(lowest) & odd for order in orders]


@vector_code
def _start_group(e: Emitter, name: str, memory: ir.Value) -> None:
    """The target before any fit, the scales of the trials, and the gain that any exceeds."""
    held = _Held(e, name, memory)
    plan = held.plan
    target = _targets(held, None)
    for i, each in enumerate(target):
        each.store(held.at("target", i))
    weights = [held.load("weights", i) for i in range(plan.fmt.group)]
    squares = total([w * t * t for w, t in zip(weights, target, strict=True)])
    spread = squares.over(total(weights)).root()
    signed = plan.fmt.book == "IQ1"
    peak = largest([each.abs() for each in target] if signed else target)
    scales = [(spread * share).by_number(plan.book.spread) for share in SPREADS]
    if plan.book.parts == 1:
        scales += [(peak * share).by_number(plan.book.top) for share in PEAKS]
    for i, each in enumerate(scales):
        each.store(held.at("trial_scale", i))
    number(e, -1.0).store(held.at("gain"))


@vector_code
def _keep_better(e: Emitter, name: str, memory: ir.Value, best: ir.Value) -> None:
    """Keeps the trial's fit in the lanes where it gains more."""
    held = _Held(e, name, memory)
    plan = held.plan
    _, dot, square = held.fit("trial").sums()
    gain, before = dot.over(square) * dot, held.load("gain")
    better = gain > before
    gain.where(better, before).store(held.at("gain"))
    for i in range(plan.fit):
        held.load("trial", i).where(better, load(e, best, i * LANE_BYTES)).store(best, i * LANE_BYTES)


@vector_code
def _nearest_entries(e: Emitter, name: str, memory: ir.Value, scale: ir.Value) -> None:
    """Combinations of the nearest entries under a scale, to the memory's keys."""
    plan = _plan(name)
    held, book = _Held(e, name, memory), plan.book
    inverse = load(e, scale).inverse()

    def vector(v: ir.Value) -> None:
        start = e.b.mul(v, e.i64(book.width))
        ratios, weights = [], []
        for i in range(book.width):
            place = e.b.add(start, e.i64(i))
            ratio = held.load("target", place) * inverse
            ratios.append(ratio.clamp(-FARTHEST * book.top, FARTHEST * book.top))
            weights.append(held.load("weights", place))
        keys = [_least_key(held, part, table) for part, table in enumerate(_tables(book, ratios, weights))]
        if not plan.each_part:
            keys = [least(keys)]
        for part, key in enumerate(keys):
            key.modulo(book.digits).store(held.at("keys", e.b.add(v, e.i64(part * plan.vectors))))

    e.each(e.i64(0), e.i64(plan.vectors), 1, vector)


def _tables(book: EntryBook, ratios: list[Lanes], weights: list[Lanes]) -> list[list[list[Lanes]]]:
    """As `EntryBook.tables`, integers: of each part, of each weight, of each level."""
    costs = [
        [
            [(level - ratio) * (level - ratio) * w for level in part.levels.flatten().tolist()]
            for ratio, w in zip(ratios, weights, strict=True)
        ]
        for part in book.books
    ]
    low = [least([cost for part in costs for cost in part[i]]) for i in range(book.width)]
    costs = [[[cost - low[i] for cost in part[i]] for i in range(book.width)] for part in costs]
    high = [largest([cost for part in costs for cost in part[i]]) for i in range(book.width)]
    factor = number(ratios[0].e, book.largest).over(total(high))
    return [[[(cost * factor).rounded().to_int() for cost in weight] for weight in part] for part in costs]


def _least_key(held: _Held, place: int, table: list[list[Lanes]]) -> Lanes:
    """The least sum of an entry of a part times all combinations, plus its own."""
    e, book = held.e, held.plan.book
    middle = book.width // 2
    whole = [[cost * book.digits for cost in weight] for weight in table]
    for name, weights, unit in (("first", whole[:middle], book.half), ("second", whole[middle:], 1)):
        for i, each in enumerate(_sums(weights)):
            (each + i * unit).store(held.at(name, i))
    words = _entry_words(held.plan.fmt.name, place)
    table_at = table_address(e, f"entries.{held.plan.fmt.name}.{place}", I32, words)
    first, second = held.at("first"), held.at("second")

    def turn(i: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
        for step in range(_UNROLLED):
            word = e.load(I32, e.b.add(table_at, e.b.mul(i, e.i64(4))), 4 * step)
            one = e.b.zext(e.b.and_(word, e.const(I32, 0xFFFF)), I64)
            other = e.b.zext(e.b.lshr(word, e.const(I32, 16)), I64)
            here = load_ints(e, e.b.add(first, one)) + load_ints(e, e.b.add(second, other))
            found[step % 2] = here.minimum(Lanes(e, found[step % 2])).value
        return found

    most = e.const(INTS, (1 << 31) - 1)
    found = e.loop(e.i64(0), e.i64(len(words)), _UNROLLED, [most, most], turn)
    first_combination: int = place * book.combinations
    return least([Lanes(e, each) for each in found]) + first_combination


def _sums(weights: list[list[Lanes]]) -> list[Lanes]:
    """Sums of one level of each weight, for all combinations."""
    sums = weights[0]
    for levels in weights[1:]:
        sums = [one + other for one, other in product(sums, levels)]
    return sums


@cache
def _entry_words(name: str, place: int) -> tuple[int, ...]:
    """For each entry of a part the places of its halves' sums, in bytes, as two 16-bit fields."""
    part = _plan(name).book.books[place]
    pairs = zip(part.first.tolist(), part.second.tolist(), strict=True)
    return tuple(one * LANE_BYTES | other * LANE_BYTES << 16 for one, other in pairs)


@vector_code
def _fit_entries(e: Emitter, name: str, memory: ir.Value, scale: ir.Value, fit: ir.Value) -> None:
    """The fit of the entries of the memory's keys under a scale."""
    plan = _plan(name)
    held, d = _Held(e, name, memory), load(e, scale)
    best: list[Lanes] = []
    for part in range(plan.book.parts if plan.each_part else 1):
        keys = [held.load_ints("keys", part * plan.vectors + v) for v in range(plan.vectors)]
        q = [value for key in keys for value in _values(plan.book, key)]
        here = [Lanes(e, e.b.bitcast(key.value, FLOATS)) for key in keys] + _fitted(held, d, q)
        if best:
            better = here[plan.vectors] < best[plan.vectors]
            here = [one.where(better, other) for one, other in zip(here, best, strict=True)]
        best = here
    for i, each in enumerate(best):
        each.store(fit, i * LANE_BYTES)


def _fitted(held: _Held, scale: Lanes, q: list[Lanes]) -> list[Lanes]:
    """Error, dot, square and the target where a fit has one, as `books._Groups._fit`."""
    target = _targets(held, q)
    errors, dots, squares = [], [], []
    for i, (value, wanted) in enumerate(zip(q, target, strict=True)):
        w = held.load("weights", i)
        difference = value * scale - wanted
        errors.append(difference * difference * w)
        dots.append(w * value * wanted)
        squares.append(w * value * value)
    return [total(errors), total(dots), total(squares), *(target if held.plan.even else [])]


def _values(book: EntryBook, key: Lanes) -> list[Lanes]:
    """The values of an entry's weights, of its combination of levels."""
    each = [part.levels.flatten().tolist() for part in book.books]
    count = len(each[0])
    second = key >= book.combinations if len(each) > 1 else None
    if second is not None:
        key = (key - book.combinations).where(second, key)
    values = []
    for _ in range(book.width):
        rest = _quotient(key, count, book.combinations)
        digit = (key - rest * count).to_float()
        key = rest
        value = _level(digit, each[0])
        values.append(value if second is None else _level(digit, each[1]).where(second, value))
    return values[::-1]


def _quotient(key: Lanes, divisor: int, below: int) -> Lanes:
    """key / divisor, of integers less than `below`."""
    factor = (1 << 16) // divisor + 1
    assert all(i * factor >> 16 == i // divisor for i in range(below))
    return key * factor >> 16


def _level(digit: Lanes, levels: list[float]) -> Lanes:
    """levels[digit], of which most differ by the same."""
    step = levels[1] - levels[0]
    value = digit * step + levels[0]
    for i, level in enumerate(levels):
        if level != levels[0] + i * step:
            value = number(digit.e, level).where(digit.equals(float(i)), value)
    return value


@vector_code
def _first_unit(e: Emitter, name: str, memory: ir.Value) -> None:
    """d, the multiples of it near the scales of the groups' fits, and these as scales."""
    plan = _plan(name)
    held, fmt = _Held(e, name, memory), plan.fmt
    sums = [held.fit("fits", g).sums()[1:] for g in range(plan.groups)]
    scales = [dot.over(square) for dot, square in sums]
    peak = largest(scales)
    top = _top(fmt)

    def turn(i: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
        best, d = (Lanes(e, each) for each in found)
        steps = Lanes(e, e.splat(e.b.sitofp(i, FLOATS.element), LANES))
        divisor = (steps * 0.5 + (2 * top + 1)) * fmt.unit
        quotient = Lanes(e, e.b.fdiv(peak.value, divisor.value))
        unit = (quotient.to_half().from_half() * fmt.unit).inverse()
        sub = [_odd_multiple(scale, unit, top) for scale in scales]
        here = _solved_unit(sums, sub, fmt.unit)
        there = here.from_half()
        errors = []
        for scale, s, (_, square) in zip(scales, sub, sums, strict=True):
            difference = there * fmt.unit * s - scale
            errors.append(difference * difference * square)
        error = total(errors)
        better = error < best
        return [error.minimum(best).value, here.where(better, d).value]

    start = [e.const(FLOATS, float("inf")), e.const(INTS, 0)]
    d = Lanes(e, e.loop(e.i64(UNIT_STEPS.start), e.i64(UNIT_STEPS.stop), 1, start, turn)[1])
    d.store(held.at("d"))
    unit = d.from_half() * fmt.unit
    for g, scale in enumerate(scales):
        sub = _odd_multiple(scale, unit.inverse(), top)
        sub.store(held.at("sub", g))
        (unit * sub).store(held.at("scale", g))


def _top(fmt: BlockFormat) -> int:
    return (1 << fmt.sub_scale_bits) - 1


def _odd_multiple(scale: Lanes, inverse: Lanes, top: int) -> Lanes:
    return ((scale * inverse - 1.0) * 0.5).rounded().clamp(0.0, float(top)) * 2.0 + 1.0


def _solved_unit(sums: list[tuple[Lanes, Lanes]], sub: list[Lanes], unit: float) -> Lanes:
    """fp16's bits."""
    dots = total([dot * s for (dot, _), s in zip(sums, sub, strict=True)])
    squares = total([square * s * s for (_, square), s in zip(sums, sub, strict=True)])
    return dots.over(squares).by_number(unit).to_half()


@vector_code
def _moved_unit(e: Emitter, name: str, memory: ir.Value) -> None:
    """The multiples that are near the scales of the second fits, d of least squares for them, and their scales."""
    plan = _plan(name)
    held, fmt = _Held(e, name, memory), plan.fmt
    sums = [held.fit("others", g).sums()[1:] for g in range(plan.groups)]
    inverse = (held.load_ints("d").from_half() * fmt.unit).inverse()
    sub = [_odd_multiple(dot.over(square), inverse, _top(fmt)) for dot, square in sums]
    moved = _solved_unit(sums, sub, fmt.unit)
    moved.store(held.at("moved"))
    for g, each in enumerate(sub):
        each.store(held.at("other_sub", g))
        (moved.from_half() * fmt.unit * each).store(held.at("scale", g))


@vector_code
def _choose_unit(e: Emitter, name: str, args: ir.Value, memory: ir.Value, task: ir.Value) -> None:
    """Stores d and the multiples of the better fits, and has those as the others."""
    held = _Held(e, name, memory)
    plan = held.plan
    before = total([held.fit("others", g).sums()[0] for g in range(plan.groups)])
    after = total([held.fit("fits", g).sums()[0] for g in range(plan.groups)])
    falls = after < before
    blocks = TaskBlocks(e, BookSearchArguments, args, task, plan.groups)
    blocks.store_unit("d", held.load_ints("moved").where(falls, held.load_ints("d")))
    for g in range(plan.groups):
        sub = held.load("other_sub", g).where(falls, held.load("sub", g))
        blocks.store("sub", I8, ((sub - 1.0) * 0.5).to_int(), e.i64(g))

    def choose(i: ir.Value) -> None:
        held.load("fits", i).where(falls, held.load("others", i)).store(held.at("others", i))

    e.each(e.i64(0), e.i64(plan.groups * plan.fit), 1, choose)


@vector_code
def _store_group(
    e: Emitter, name: str, args: ir.Value, memory: ir.Value, task: ir.Value, group: ir.Value
) -> None:
    """The numbers of a group's entries, and its signs."""
    held = _Held(e, name, memory)
    plan = held.plan
    fit = held.fit("others", group)
    blocks = TaskBlocks(e, BookSearchArguments, args, task, plan.groups)
    for v in range(plan.vectors):
        blocks.store("index", I16, _numbers(plan, load_ints(e, fit.at(v))), group, v)
    if plan.fmt.book == "IQ1":
        return
    for byte in range(plan.fmt.group // 8):
        bits = Lanes(e, e.const(INTS, 0))
        for i in range(8):
            place = 8 * byte + i
            negative = held.load("x", place) < 0.0
            if plan.even:
                negative = negative ^ (load_ints(e, fit.at(plan.vectors + 3 + place)) < 0)
            bits = bits | Lanes(e, e.const(INTS, 1 << i)).where(negative, 0)
        blocks.store("signs", I8, bits, group, byte)


def _numbers(plan: _Plan, keys: Lanes) -> Lanes:
    """Numbers of entries with combinations."""
    e, numbers = keys.e, torch.cat([part.number for part in plan.book.books]).tolist()
    table = table_address(e, f"numbers.{plan.fmt.name}", I32, numbers)
    found = ir.Constant(INTS, ir.Undefined)
    for lane in range(LANES):
        place = e.b.zext(e.lane(keys.value, lane), I64)
        entry = e.load(I32, e.b.add(table, e.b.mul(place, e.i64(4))))
        found = e.b.insert_element(found, entry, ir.Constant(I32, lane))
    return Lanes(e, found)
