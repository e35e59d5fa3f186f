"""The kernel of the search for scales and minimums: kernels/quantize/minimums.py, operation for operation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from llvmlite import ir
from numba import njit

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.ir.codebook_ir import table_address
from quengine.kernels.cpu.ir.tile_ir import stack_floats
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I32, Emitter
from quengine.kernels.cpu.quantize.block_input_kernels import block_reader
from quengine.kernels.cpu.quantize.lanes import FLOATS, LANES, Lanes, largest, least, number, total
from quengine.kernels.cpu.quantize.memory import BlockMemory, Places, TaskBlocks
from quengine.kernels.cpu.quantize.range_search import RangeSearchArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.quantize.minimums import LARGEST_BITS, NEIGHBOURS, ROUNDS, unit_tops, widenings


@cache
def _places(name: str) -> Places:
    """Memory for a block: x and weights; for each group the sums of weights and of weighted x, the scale, minimum,
    their integers and error kept so far, the same being tried, and sums of their codes; d and dmin."""
    fmt = FORMATS[name]
    kept = ("scale", "low", "sub", "sub_min", "error")
    of_groups = ("sum_w", "sum_x", *kept, *(f"{kind}_tried" for kind in kept), "sum_q", "sum_qq", "sum_qx")
    units = dict.fromkeys(("d", "dmin", "d_tried", "dmin_tried"), 1)
    groups = dict.fromkeys(of_groups, fmt.block // fmt.group)
    return Places({"x": fmt.block, "weights": fmt.block} | groups | units)


def range_search_kernel(format_name: str) -> bytes:
    """Task i searches for blocks 16 * i to 16 * i + 15."""
    places, has_integers, rounds = _places(format_name), FORMATS[format_name].sub_scale_bits > 0, ROUNDS
    floats, neighbours = places.floats, len(NEIGHBOURS)
    read = block_reader(format_name, places["x"], places["weights"])

    @njit  # type: ignore[untyped-decorator]
    def measure(memory: int) -> None:
        _measure(format_name, memory)

    def search(args: RangeSearchArguments, task: int) -> None:
        memory = stack_floats(floats)
        read(args, memory, task)
        _fit_groups(format_name, memory)
        _first_units(format_name, memory)
        measure(memory)
        _start(format_name, memory)
        for _ in range(rounds):
            if has_integers:
                _better_integers(format_name, memory)
            _try_units(format_name, memory)
            measure(memory)
            _keep_units(format_name, memory)
        if not has_integers:
            for i in range(neighbours):
                _try_neighbours(format_name, memory, i)
                measure(memory)
                _keep_units(format_name, memory)
        _store(format_name, args, memory, task)

    return compile_kernel(search, RangeSearchArguments)


@dataclass
class _Group:
    """x and weights of a group, and the arithmetic of `minimums.RangeFit`."""

    x: list[Lanes]
    weights: list[Lanes]
    top: int

    def values(self, scale: Lanes, low: Lanes) -> list[Lanes]:
        inverse = scale.inverse()
        return [((each + low) * inverse).rounded().clamp(0.0, self.top) for each in self.x]

    def error(self, scale: Lanes, low: Lanes) -> Lanes:
        differences = [
            q * scale - low - each for q, each in zip(self.values(scale, low), self.x, strict=True)
        ]
        return total([each * each * w for each, w in zip(differences, self.weights, strict=True)])

    def sum_of(self, q: list[Lanes]) -> Lanes:
        return total([value * w for value, w in zip(q, self.weights, strict=True)])

    def moments(self, q: list[Lanes]) -> tuple[Lanes, Lanes, Lanes]:
        """Weighted sums of q, q*q and q*x."""
        products = list(zip(self.weights, q, self.x, strict=True))
        squares = total([w * value * value for w, value, _ in products])
        return self.sum_of(q), squares, total([w * each * value for w, value, each in products])


class _Held(BlockMemory):
    def __init__(self, e: Emitter, name: str, address: ir.Value) -> None:
        super().__init__(e, _places(name), address, FORMATS[name])
        self.top = (1 << self.fmt.bits) - 1
        self.limit = (1 << self.fmt.sub_scale_bits) - 1

    def group_at(self, group: ir.Value) -> _Group:
        return _Group(*self.group(group), self.top)

    def keep(self, kinds: tuple[str, ...], better: Lanes, group: int | ir.Value) -> None:
        """Keeps what was tried, where it is better."""
        for kind in kinds:
            tried = self.load(f"{kind}_tried", group)
            tried.where(better, self.load(kind, group)).store(self.at(kind, group))


@vector_code
def _fit_groups(e: Emitter, name: str, memory: ir.Value) -> None:
    """As `minimums._group_fits`."""
    held = _Held(e, name, memory)
    tops = np.array([held.top + each for each in widenings(held.fmt)], np.float32)
    table = table_address(e, f"tops.{name}", I32, tops.view(np.int32).tolist())

    def fit(group: ir.Value) -> None:
        each = held.group_at(group)
        sum_w = total(each.weights)
        sum_x = total([w * x for w, x in zip(each.weights, each.x, strict=True)])
        low = least(each.x).minimum(0.0) + 0.0
        span = largest(each.x) - low + 0.0
        inverse, is_wide = span.inverse(), span > 0.0

        def turn(i: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
            best, scale, minimum = (Lanes(e, value) for value in found)
            top = Lanes(e, e.splat(e.load(F32, e.b.add(table, e.b.mul(i, e.i64(4)))), LANES))
            factor = inverse * top
            q = [((x - low) * factor).rounded().clamp(0.0, held.top) for x in each.x]
            sums = each.moments(q)
            here, there = _solved(sums, sum_w, sum_x)
            gain = here * sums[2] - there * sum_x
            better = (gain > best) & is_wide
            pairs = ((gain, best), (here, scale), (there, minimum))
            return [one.where(better, other).value for one, other in pairs]

        start = [e.const(FLOATS, float("-inf")), span.by_number(held.top).value, (-low).value]
        found = e.loop(e.i64(0), e.i64(len(tops)), 1, start, turn)
        for kind, value in zip(("scale", "low"), found[1:], strict=True):
            Lanes(e, value).store(held.at(kind, group))
        sum_w.store(held.at("sum_w", group))
        sum_x.store(held.at("sum_x", group))

    held.each_group(fit)


def _solved(sums: tuple[Lanes, Lanes, Lanes], sum_w: Lanes, sum_x: Lanes) -> tuple[Lanes, Lanes]:
    """As `minimums._solved`."""
    sum_q, sum_qq, sum_qx = sums
    determinant = sum_w * sum_qq - sum_q * sum_q
    low = (sum_q * sum_qx - sum_qq * sum_x).over(determinant)
    scale = (sum_w * sum_qx - sum_q * sum_x).over(determinant)
    alone = (low < 0.0) | (determinant <= 0.0)
    return sum_qx.over(sum_qq).where(alone, scale), number(low.e, 0.0).where(alone, low)


@vector_code
def _first_units(e: Emitter, name: str, memory: ir.Value) -> None:
    """d and dmin, the integers near the groups' scales and minimums, and what these give."""
    held = _Held(e, name, memory)
    for kind, unit_name, sub_name in (("scale", "d", "sub"), ("low", "dmin", "sub_min")):
        values = held.of_groups(kind)
        if not held.limit:
            half = values[0].to_half()
            half.store(held.at(unit_name))
            half.from_half().store(held.at(f"{kind}_tried"))
            continue
        unit = _common_unit(values, held.of_groups("sum_w"), held.limit)
        unit.store(held.at(unit_name))
        for group, sub in enumerate(_integers(values, unit.from_half(), held.limit)):
            sub.store(held.at(sub_name, group))
            (unit.from_half() * sub).store(held.at(f"{kind}_tried", group))


def _common_unit(values: list[Lanes], weights: list[Lanes], limit: int) -> Lanes:
    """As `minimums.common_unit`: fp16's bits."""
    peak = largest(values)
    unit, best = peak.by_number(limit).to_half(), number(peak.e, float("inf"))
    for top in unit_tops(limit):
        steps = _integers(values, peak.by_number(top).to_half().from_half(), limit)
        terms = list(zip(steps, values, weights, strict=True))
        here = total([s * value * w for s, value, w in terms]).over(total([s * s * w for s, _, w in terms]))
        half = here.to_half()
        differences = [(half.from_half() * s - value, w) for s, value, w in terms]
        error = total([difference * difference * w for difference, w in differences])
        unit, best = half.where(error < best, unit), error.minimum(best)
    return unit


def _integers(values: list[Lanes], unit: Lanes, limit: int) -> list[Lanes]:
    inverse = unit.inverse()
    return [(value * inverse).rounded().clamp(0.0, limit) for value in values]


@vector_code
def _measure(e: Emitter, name: str, memory: ir.Value) -> None:
    """The errors of the scales and minimums that are tried."""
    held = _Held(e, name, memory)

    def one(group: ir.Value) -> None:
        scale, low = held.load("scale_tried", group), held.load("low_tried", group)
        held.group_at(group).error(scale, low).store(held.at("error_tried", group))

    held.each_group(one)


@vector_code
def _start(e: Emitter, name: str, memory: ir.Value) -> None:
    """What was tried is what is kept."""
    held = _Held(e, name, memory)
    for group in range(held.groups):
        for kind in ("scale", "low", "error"):
            held.load(f"{kind}_tried", group).store(held.at(kind, group))


@vector_code
def _better_integers(e: Emitter, name: str, memory: ir.Value) -> None:
    """As `minimums._better_integers`, and the scales and minimums that they give."""
    held = _Held(e, name, memory)
    d, dmin = (held.load_ints(unit).from_half() for unit in ("d", "dmin"))

    def improve(group: ir.Value) -> None:
        each = held.group_at(group)
        first, first_min = held.load("sub", group), held.load("sub_min", group)
        sum_w, sum_x = held.load("sum_w", group), held.load("sum_x", group)

        def turn(i: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
            step = Lanes(e, e.splat(_step(e, i), LANES))
            sub, sub_min, error = (Lanes(e, value) for value in found)
            other = (first + step).clamp(0.0, held.limit)
            scale = d * other
            sum_q = each.sum_of(each.values(scale, dmin * first_min))
            (other_min,) = _integers([(scale * sum_q - sum_x).over(sum_w)], dmin, held.limit)
            there = each.error(scale, dmin * other_min)
            better = there < error
            pairs = ((other, sub), (other_min, sub_min))
            return [one.where(better, old).value for one, old in pairs] + [there.minimum(error).value]

        start = [first.value, first_min.value, held.load("error", group).value]
        found = [Lanes(e, value) for value in e.loop(e.i64(0), e.i64(3), 1, start, turn)]
        for kind, value in zip(("sub", "sub_min", "error"), found, strict=True):
            value.store(held.at(kind, group))
        (d * found[0]).store(held.at("scale", group))
        (dmin * found[1]).store(held.at("low", group))

    held.each_group(improve)


def _step(e: Emitter, turn: ir.Value) -> ir.Value:
    """0, -1 and 1 in turns 0, 1 and 2."""
    odd = e.b.add(e.b.mul(turn, e.i64(2)), e.i64(1))
    return e.b.sitofp(e.b.sub(e.b.srem(odd, e.i64(3)), e.i64(1)), F32)


@vector_code
def _try_units(e: Emitter, name: str, memory: ir.Value) -> None:
    """As `minimums._solved_block`; of blocks of one group as `_solved`."""
    held = _Held(e, name, memory)

    def sums(group: ir.Value) -> None:
        each = held.group_at(group)
        q = each.values(held.load("scale", group), held.load("low", group))
        for kind, value in zip(("sum_q", "sum_qq", "sum_qx"), each.moments(q), strict=True):
            value.store(held.at(kind, group))

    held.each_group(sums)
    d, dmin = (each.to_half() for each in (_solved_block(held) if held.limit else _solved_group(held)))
    d.store(held.at("d_tried"))
    dmin.store(held.at("dmin_tried"))
    for group in range(held.groups):
        scale, low = d.from_half(), dmin.from_half()
        if held.limit:
            scale, low = scale * held.load("sub", group), low * held.load("sub_min", group)
        scale.store(held.at("scale_tried", group))
        low.store(held.at("low_tried", group))


@vector_code
def _try_neighbours(e: Emitter, name: str, memory: ir.Value, number: ir.Value) -> None:
    """The units of a block of one group, moved as `minimums.NEIGHBOURS` says under this number."""
    held = _Held(e, name, memory)
    table = table_address(e, "neighbours", I32, [step for steps in NEIGHBOURS for step in steps])
    for i, (unit, kind) in enumerate((("d", "scale"), ("dmin", "low"))):
        step = e.load(I32, e.b.add(table, e.b.mul(number, e.i64(8))), 4 * i)
        bits = held.load_ints(unit) + Lanes(e, e.splat(step, LANES))
        moved = bits.maximum(0).minimum(LARGEST_BITS)
        moved.store(held.at(f"{unit}_tried"))
        moved.from_half().store(held.at(f"{kind}_tried"))


def _solved_group(held: _Held) -> tuple[Lanes, Lanes]:
    sums = held.load("sum_q"), held.load("sum_qq"), held.load("sum_qx")
    return _solved(sums, held.load("sum_w"), held.load("sum_x"))


def _solved_block(held: _Held) -> tuple[Lanes, Lanes]:
    kinds = ("sub", "sub_min", "sum_q", "sum_qq", "sum_qx", "sum_w", "sum_x")
    groups = list(zip(*(held.of_groups(kind) for kind in kinds), strict=True))
    qq = total([sc * sc * sum_qq for sc, _, _, sum_qq, _, _, _ in groups])
    qm = total([sc * mn * sum_q for sc, mn, sum_q, _, _, _, _ in groups])
    mm = total([mn * mn * sum_w for _, mn, _, _, _, sum_w, _ in groups])
    qx = total([sc * sum_qx for sc, _, _, _, sum_qx, _, _ in groups])
    mx = total([mn * sum_x for _, mn, _, _, _, _, sum_x in groups])
    determinant = qq * mm - qm * qm
    both = determinant > 0.0
    other = (mm * qx - qm * mx).over(determinant).where(both, qx.over(qq))
    other_min = (qm * qx - qq * mx).over(determinant).where(both, 0.0)
    good = (other > 0.0) & (other_min >= 0.0)
    d, dmin = (held.load_ints(unit).from_half() for unit in ("d", "dmin"))
    return other.where(good, d), other_min.where(good, dmin)


@vector_code
def _keep_units(e: Emitter, name: str, memory: ir.Value) -> None:
    """What was tried, where the error of the block is less."""
    held = _Held(e, name, memory)
    better = total(held.of_groups("error_tried")) < total(held.of_groups("error"))
    for unit in ("d", "dmin"):
        tried = held.load_ints(f"{unit}_tried")
        tried.where(better, held.load_ints(unit)).store(held.at(unit))
    for group in range(held.groups):
        held.keep(("scale", "low", "error"), better, group)


@vector_code
def _store(e: Emitter, name: str, args: ir.Value, memory: ir.Value, task: ir.Value) -> None:
    """Codes, units and integers to the arguments' tensors."""
    held = _Held(e, name, memory)
    blocks = TaskBlocks(e, RangeSearchArguments, args, task, held.groups)
    for unit in ("d", "dmin"):
        blocks.store_unit(unit, held.load_ints(unit))

    def store(group: ir.Value) -> None:
        each = held.group_at(group)
        codes = each.values(held.load("scale", group), held.load("low", group))
        for i, code in enumerate(codes):
            blocks.store("codes", I8, code.to_int(), group, i)
        if held.limit:
            for kind in ("sub", "sub_min"):
                blocks.store(kind, I8, held.load(kind, group).to_int(), group)

    held.each_group(store)
