"""The kernel of the search for scales without minimums: kernels/quantize/scales.py, operation for operation."""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir
from numba import njit, types

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.ir.codebook_ir import table_address
from quengine.kernels.cpu.ir.tile_ir import stack_floats
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I32, Emitter
from quengine.kernels.cpu.quantize.block_input_kernels import block_reader
from quengine.kernels.cpu.quantize.lanes import (
    FLOATS,
    INTS,
    LANES,
    Lanes,
    largest,
    least,
    load,
    number,
    total,
)
from quengine.kernels.cpu.quantize.memory import BlockMemory, Places, TaskBlocks
from quengine.kernels.cpu.quantize.scale_search import ScaleSearchArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.quantize.grid import grid_ends
from quengine.kernels.quantize.scales import ROUNDS, scale_targets, unit_targets


@cache
def _places(name: str) -> Places:
    """Memory for a block: x and weights; for each group the least-squares scale and its energy, the integer, scale and
    error kept so far, and those being tried; d, and the d being tried."""
    fmt = FORMATS[name]
    of_groups = ("fitted", "energy", "sub", "scale", "error", "sub_tried", "scale_tried", "error_tried")
    groups = dict.fromkeys(of_groups, fmt.block // fmt.group)
    return Places({"x": fmt.block, "weights": fmt.block} | groups | {"d": 1, "d_tried": 1})


def scale_search_kernel(format_name: str) -> bytes:
    """Task i searches for blocks 16 * i to 16 * i + 15."""
    places, has_integers, rounds = _places(format_name), FORMATS[format_name].sub_scale_bits > 0, ROUNDS
    floats, tried, error_tried = places.floats, places["scale_tried"], places["error_tried"]
    read = block_reader(format_name, places["x"], places["weights"])

    @njit  # type: ignore[untyped-decorator]
    def measure(memory: int) -> None:
        _measure(format_name, memory, memory + tried, memory + error_tried)

    @njit  # type: ignore[untyped-decorator]
    def try_integers(memory: int, step: float) -> None:
        _try_integers(format_name, memory, step)
        measure(memory)
        _keep_integers(format_name, memory)

    def search(args: ScaleSearchArguments, task: int) -> None:
        memory = stack_floats(floats)
        read(args, memory, task)
        _fit_groups(format_name, memory)
        _first_unit(format_name, memory)
        measure(memory)
        _start(format_name, memory)
        for _ in range(rounds):
            if has_integers:
                try_integers(memory, -1.0)
                try_integers(memory, 1.0)
            _try_unit(format_name, memory)
            measure(memory)
            _keep_unit(format_name, memory)
        _store(format_name, args, memory, task)

    return compile_kernel(search, ScaleSearchArguments)


class _Held(BlockMemory):
    """A task's memory, and the arithmetic of `scales.ScaleFit`."""

    def __init__(self, e: Emitter, name: str, address: ir.Value) -> None:
        super().__init__(e, _places(name), address, FORMATS[name])
        self.limit = 1 << (self.fmt.sub_scale_bits - 1) if self.fmt.sub_scale_bits else 0

    def nearest(self, ratio: Lanes) -> Lanes:
        """As `Grid.nearest`."""
        if self.fmt.table is None:
            low, high = grid_ends(self.fmt)
            return ratio.rounded().clamp(low, high)
        value = number(self.e, self.fmt.table[0])
        for below, here in zip(self.fmt.table, self.fmt.table[1:], strict=False):
            value = number(self.e, here).where(ratio >= (below + here) / 2, value)
        return value

    def code(self, ratio: Lanes) -> Lanes:
        """As `Grid.codes`, int32."""
        if self.fmt.table is None:
            return self.nearest(ratio).to_int() + self.fmt.offset
        code = Lanes(self.e, self.e.const(INTS, 0))
        for i, (below, here) in enumerate(zip(self.fmt.table, self.fmt.table[1:], strict=False)):
            code = Lanes(self.e, self.e.const(INTS, i + 1)).where(ratio >= (below + here) / 2, code)
        return code

    def moments(self, x: list[Lanes], weights: list[Lanes], factor: Lanes) -> tuple[Lanes, Lanes]:
        """The weighted sums of x times the values that x * factor is rounded to, and of their squares."""
        q = [self.nearest(each * factor) for each in x]
        dot = total([w * each * value for w, each, value in zip(weights, x, q, strict=True)])
        return dot, total([value * value * w for w, value in zip(weights, q, strict=True)])


@vector_code
def _fit_groups(e: Emitter, name: str, memory: ir.Value) -> None:
    """As `scales._group_scales`, and what each scale counts in the choice of d."""
    held = _Held(e, name, memory)
    targets = np.array(scale_targets(held.fmt), np.float32)
    table = table_address(e, f"targets.{name}", I32, targets.view(np.int32).tolist())

    def fit(group: ir.Value) -> None:
        x, weights = held.group(group)
        high, low = largest(x), least(x)
        inverse = _farther(high, low).inverse()

        def turn(i: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
            best, scale = (Lanes(e, each) for each in found)
            target = Lanes(e, e.splat(e.load(F32, e.b.add(table, e.b.mul(i, e.i64(4)))), LANES))
            dot, square = held.moments(x, weights, inverse * target)
            here = dot.over(square)
            gain = here * dot
            better = gain > best
            return [gain.where(better, best).value, here.where(better, scale).value]

        start = [e.const(FLOATS, -1.0), e.const(FLOATS, 0.0)]
        found = e.loop(e.i64(0), e.i64(len(targets)), 1, start, turn)
        Lanes(e, found[1]).store(held.at("fitted", group))
        total([w * each * each for w, each in zip(weights, x, strict=True)]).store(held.at("energy", group))

    held.each_group(fit)


def _farther(high: Lanes, low: Lanes) -> Lanes:
    """The one of larger magnitude, low if they are equal."""
    return high.where(high > -low, low)


@vector_code
def _first_unit(e: Emitter, name: str, memory: ir.Value) -> None:
    """d, and for types with sub-scales the integers near the groups' scales, as `scales._common_unit`."""
    held = _Held(e, name, memory)
    scales = held.of_groups("fitted")
    if not held.limit:
        half = scales[0].to_half()
        half.store(held.at("d"))
        half.from_half().store(held.at("scale_tried"))
        return
    weights = [energy.over(s * s) for energy, s in zip(held.of_groups("energy"), scales, strict=True)]
    peak = _farther(largest(scales), least(scales))
    unit, best = peak.by_number(-held.limit).to_half(), number(e, float("inf"))
    for target in unit_targets(held.limit):
        steps = _integers(held, scales, peak.by_number(target).to_half())
        terms = list(zip(steps, scales, weights, strict=True))
        here = total([s * scale * w for s, scale, w in terms]).over(total([s * s * w for s, _, w in terms]))
        half = here.to_half()
        differences = [(half.from_half() * s - scale, w) for s, scale, w in terms]
        error = total([difference * difference * w for difference, w in differences])
        unit, best = half.where(error < best, unit), error.minimum(best)
    unit.store(held.at("d"))
    for group, sub in enumerate(_integers(held, scales, unit)):
        sub.store(held.at("sub", group))
        (unit.from_half() * sub).store(held.at("scale_tried", group))


def _integers(held: _Held, scales: list[Lanes], unit: Lanes) -> list[Lanes]:
    inverse = unit.from_half().inverse()
    return [(scale * inverse).rounded().clamp(-held.limit, held.limit - 1) for scale in scales]


@vector_code
def _measure(e: Emitter, name: str, memory: ir.Value, scales: ir.Value, errors: ir.Value) -> None:
    """The errors of all groups under scales at an address."""
    held = _Held(e, name, memory)

    def one(group: ir.Value) -> None:
        x, weights = held.group(group)
        at = e.b.mul(group, e.i64(4 * LANES))
        scale = load(e, e.b.add(scales, at))
        inverse = scale.inverse()
        differences = [held.nearest(each * inverse) * scale - each for each in x]
        squares = [each * each * w for each, w in zip(differences, weights, strict=True)]
        total(squares).store(e.b.add(errors, at))

    held.each_group(one)


@vector_code
def _start(e: Emitter, name: str, memory: ir.Value) -> None:
    """What was tried is what is kept."""
    held = _Held(e, name, memory)
    for group in range(held.groups):
        held.load("scale_tried", group).store(held.at("scale", group))
        held.load("error_tried", group).store(held.at("error", group))


@vector_code(step=types.float64)
def _try_integers(e: Emitter, name: str, memory: ir.Value, step: ir.Value) -> None:
    held = _Held(e, name, memory)
    d = held.load_ints("d").from_half()
    by = Lanes(e, e.splat(e.b.fptrunc(step, F32), LANES))
    for group, sub in enumerate(held.of_groups("sub")):
        other = (sub + by).clamp(-held.limit, held.limit - 1)
        other.store(held.at("sub_tried", group))
        (d * other).store(held.at("scale_tried", group))


@vector_code
def _keep_integers(e: Emitter, name: str, memory: ir.Value) -> None:
    """Keeps what was tried for each group whose error became less."""
    held = _Held(e, name, memory)

    def keep(group: ir.Value) -> None:
        better = held.load("error_tried", group) < held.load("error", group)
        for kind in ("sub", "scale", "error"):
            tried = held.load(f"{kind}_tried", group)
            tried.where(better, held.load(kind, group)).store(held.at(kind, group))

    held.each_group(keep)


@vector_code
def _try_unit(e: Emitter, name: str, memory: ir.Value) -> None:
    """As `scales._least_squares`."""
    held = _Held(e, name, memory)

    def sums(group: ir.Value) -> None:
        x, weights = held.group(group)
        dot, square = held.moments(x, weights, held.load("scale", group).inverse())
        dot.store(held.at("scale_tried", group))
        square.store(held.at("error_tried", group))

    held.each_group(sums)
    dots, squares = held.of_groups("scale_tried"), held.of_groups("error_tried")
    subs = held.of_groups("sub")
    if held.limit:
        dots = [total([dot * s for dot, s in zip(dots, subs, strict=True)])]
        squares = [total([square * s * s for square, s in zip(squares, subs, strict=True)])]
    d = dots[0].over(squares[0]).to_half()
    d.store(held.at("d_tried"))
    for group, sub in enumerate(subs):
        scale = d.from_half()
        (scale * sub if held.limit else scale).store(held.at("scale_tried", group))


@vector_code
def _keep_unit(e: Emitter, name: str, memory: ir.Value) -> None:
    """What was tried, where the error of the block is less."""
    held = _Held(e, name, memory)
    better = total(held.of_groups("error_tried")) < total(held.of_groups("error"))
    held.load_ints("d_tried").where(better, held.load_ints("d")).store(held.at("d"))
    for group in range(held.groups):
        for kind in ("scale", "error"):
            tried = held.load(f"{kind}_tried", group)
            tried.where(better, held.load(kind, group)).store(held.at(kind, group))


@vector_code
def _store(e: Emitter, name: str, args: ir.Value, memory: ir.Value, task: ir.Value) -> None:
    """Codes, d and the integers to the arguments' tensors."""
    held = _Held(e, name, memory)
    blocks = TaskBlocks(e, ScaleSearchArguments, args, task, held.groups)
    blocks.store_unit("d", held.load_ints("d"))

    def store(group: ir.Value) -> None:
        x, _ = held.group(group)
        inverse = held.load("scale", group).inverse()
        for i, each in enumerate(x):
            blocks.store("codes", I8, held.code(each * inverse), group, i)
        if held.limit:
            blocks.store("sub", I8, held.load("sub", group).to_int(), group)

    held.each_group(store)
