"""How the search kernels read blocks: 16 at a time, with the same element of each block in one vector.

They also read the weights of squared errors, as kernels/quantize/importance.py defines them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import Emitter
from quengine.kernels.cpu.quantize.lanes import FLOATS, LANE_BYTES, LANES, Lanes, load, total
from quengine.kernels.cpu.quantize.launch import BlockArguments
from quengine.kernels.cpu.quantize.memory import field
from quengine.kernels.quantize.importance import BY_IMPORTANCE_ALONE, by_row_mean, mean_factor


def block_reader(format_name: str, x: int, weights: int) -> Callable[[Any, int, int], None]:
    """For a kernel: a function of its arguments, a memory and a task, which leaves the blocks of the task and their
    weights at these offsets of the memory."""

    @njit  # type: ignore[untyped-decorator]
    def read(args: Any, memory: int, task: int) -> None:
        _load_blocks(format_name, args, memory + x, task)
        if args.importance:
            _weigh_by_importance(format_name, args, memory + x, memory + weights, task)
        else:
            _weigh_alone(format_name, memory + x, memory + weights)

    return read  # type: ignore[no-any-return]


@vector_code
def _load_blocks(e: Emitter, name: str, args: ir.Value, x: ir.Value, task: ir.Value) -> None:
    """The weights of a task's blocks to vectors at an address; after the last block that one again."""
    fmt, first = FORMATS[name], e.b.mul(task, e.i64(LANES))
    last = e.b.sub(field(e, BlockArguments, args, "count"), e.i64(1))
    starts = []
    for lane in range(LANES):
        block = e.b.add(first, e.i64(lane))
        block = e.b.select(e.b.icmp_signed("<", block, last), block, last)
        row = e.b.mul(block, e.i64(4 * fmt.block))
        starts.append(e.b.add(field(e, BlockArguments, args, "rows"), row))

    def square(i: ir.Value) -> None:
        at = e.b.mul(i, e.i64(LANE_BYTES))
        vectors = _transposed(e, [e.load(FLOATS, e.b.add(start, at)) for start in starts])
        out = e.b.add(x, e.b.mul(at, e.i64(LANES)))
        for place, vector in enumerate(vectors):
            e.store(vector, out, place * LANE_BYTES)

    e.each(e.i64(0), e.i64(fmt.block // LANES), 1, square)


def _transposed(e: Emitter, vectors: list[ir.Value]) -> list[ir.Value]:
    """16 vectors of 16 lanes: lane i of vector k becomes lane k of vector i."""
    for apart in (1, 2, 4, 8):
        low = [lane if not lane & apart else LANES + lane - apart for lane in range(LANES)]
        high = [lane + apart if not lane & apart else LANES + lane for lane in range(LANES)]
        made = list(vectors)
        for i in range(LANES):
            if not i & apart:
                one, other = vectors[i], vectors[i + apart]
                made[i], made[i + apart] = e.pick(one, low, other), e.pick(one, high, other)
        vectors = made
    return vectors


@vector_code
def _weigh_by_importance(
    e: Emitter, name: str, args: ir.Value, x: ir.Value, weights: ir.Value, task: ir.Value
) -> None:
    """Weights of the squared errors of vectors x, to vectors at an address."""
    fmt = FORMATS[name]
    period = field(e, BlockArguments, args, "period")
    first = e.b.urem(e.b.mul(task, e.i64(LANES)), period)
    start = e.b.add(field(e, BlockArguments, args, "importance"), e.b.mul(first, e.i64(4)))
    row = e.b.mul(e.b.add(period, e.i64(LANES - 1)), e.i64(4))
    mean = None if name in BY_IMPORTANCE_ALONE else _mean_square(e, name, args, x, weights, task)

    def weigh(i: ir.Value) -> None:
        at, q = e.b.mul(i, e.i64(LANE_BYTES)), load(e, e.b.add(start, e.b.mul(i, row)))
        if mean is not None:
            each = load(e, e.b.add(x, at))
            q = q * (each * each + mean).root()
        q.store(e.b.add(weights, at))

    e.each(e.i64(0), e.i64(fmt.block), 1, weigh)


def _mean_square(
    e: Emitter, name: str, args: ir.Value, x: ir.Value, memory: ir.Value, task: ir.Value
) -> Lanes:
    """What is added to the square of each weight."""
    fmt = FORMATS[name]
    if by_row_mean(fmt):
        at = e.b.mul(task, e.i64(LANE_BYTES))
        return load(e, e.b.add(field(e, BlockArguments, args, "mean_square"), at))

    def add(group: ir.Value, values: list[Lanes]) -> None:
        at = e.b.mul(group, e.i64(LANE_BYTES))
        total([each * each for each in values]).store(e.b.add(memory, at))

    _each_group(e, name, x, add)
    count = fmt.block // fmt.group
    return total([load(e, memory, i * LANE_BYTES) for i in range(count)]) * mean_factor(fmt)


@vector_code
def _weigh_alone(e: Emitter, name: str, x: ir.Value, weights: ir.Value) -> None:
    """The same without importances."""
    fmt = FORMATS[name]

    def weigh(group: ir.Value, values: list[Lanes]) -> None:
        squares = [each * each for each in values]
        mean = total(squares) * (1 / fmt.group)
        if not fmt.has_min:
            found = [each + mean for each in squares]
        elif name == "Q2_K":
            found = [each.abs() for each in values]
        else:
            found = [each.abs() + mean.root() for each in values]
        out = e.b.add(weights, e.b.mul(group, e.i64(fmt.group * LANE_BYTES)))
        for i, each in enumerate(found):
            each.store(out, i * LANE_BYTES)

    _each_group(e, name, x, weigh)


def _each_group(e: Emitter, name: str, x: ir.Value, body: Callable[[ir.Value, list[Lanes]], None]) -> None:
    """Emits body(group, its vectors)."""
    fmt = FORMATS[name]

    def one(group: ir.Value) -> None:
        start = e.b.add(x, e.b.mul(group, e.i64(fmt.group * LANE_BYTES)))
        body(group, [load(e, start, i * LANE_BYTES) for i in range(fmt.group)])

    e.each(e.i64(0), e.i64(fmt.block // fmt.group), 1, one)
