"""Vector code of fp32 prefill matmul: transposed weight panels, copies, and the product of a tile."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I64, Emitter, vec
from quengine.kernels.cpu.runtime.target import host_tile


@vector_code(result=types.int64)
def stack_floats(e: Emitter, count: int) -> ir.Value:
    """The address of `count` (a literal) fp32 on the stack, the same in every loop iteration."""
    with e.b.goto_entry_block():  # numba's own helper would zero it element by element
        place = e.b.alloca(ir.ArrayType(F32, count))
    place.align = 64
    return e.b.ptrtoint(place, I64)


@vector_code
def prefetch(e: Emitter, address: ir.Value) -> None:
    """Prefetches the cache line at an address, which need not be mapped."""
    e.prefetch(address)


@vector_code
def prefetch_to_write(e: Emitter, address: ir.Value) -> None:
    """Prefetches the cache line at an address, and takes it from other cores."""
    e.prefetch(address, write=True)


@vector_code
def transpose_rows(e: Emitter, rows: ir.Value, stride: ir.Value, depth: ir.Value, out: ir.Value) -> None:
    """Transposes `Tile.lanes` rows of fp32, `stride` bytes apart: out[k, lane], lines `Tile.columns` apart.

    Reads and writes depth rounded up to whole vectors.
    """
    tile = host_tile()
    lanes = tile.lanes

    def square(k: ir.Value) -> None:
        source = e.at(rows, e.b.mul(k, e.i64(4)))
        lines = [e.load(vec(F32, lanes), e.at(source, e.b.mul(stride, e.i64(i)))) for i in range(lanes)]
        target = e.at(out, e.b.mul(k, e.i64(4 * tile.columns)))
        for i, line in enumerate(transposed(e, lines)):
            e.store(line, target, 4 * tile.columns * i)

    e.each(e.i64(0), depth, lanes, square)


def transposed(e: Emitter, lines: list[ir.Value]) -> list[ir.Value]:
    """Transposes a square of lanes, given by rows; the side is a power of two."""
    side = len(lines)
    distance = side // 2
    while distance:
        # Swap the off-diagonal blocks of `distance` within blocks of twice that.
        low = [i if i & distance == 0 else side + i - distance for i in range(side)]
        high = [i + distance if i & distance == 0 else side + i for i in range(side)]
        swapped = list(lines)
        for i in range(side):
            if i & distance == 0:
                swapped[i] = e.pick(lines[i], low, lines[i + distance])
                swapped[i + distance] = e.pick(lines[i], high, lines[i + distance])
        lines, distance = swapped, distance // 2
    return lines


@vector_code
def copy_floats(e: Emitter, source: ir.Value, target: ir.Value, count: ir.Value) -> None:
    """Copies `count` fp32 from address source to address target."""

    def copy(i: ir.Value, lanes: int) -> None:
        at = e.b.mul(i, e.i64(4))
        e.store(e.load(vec(F32, lanes), e.at(source, at)), e.at(target, at))

    e.spans(e.i64(0), count, copy)


@vector_code
def clear_floats(e: Emitter, target: ir.Value, count: ir.Value) -> None:
    """Writes `count` fp32 zeros at an address."""

    def clear(i: ir.Value, lanes: int) -> None:
        e.store(e.const(vec(F32, lanes), 0.0), e.at(target, e.b.mul(i, e.i64(4))))

    e.spans(e.i64(0), count, clear)


@vector_code
def multiply_tile(
    e: Emitter,
    panel: ir.Value,
    depth: ir.Value,
    x: ir.Value,
    x_stride: ir.Value,
    start: ir.Value,
    start_stride: ir.Value,
    y: ir.Value,
    y_stride: ir.Value,
) -> None:
    """y[i, j] = start[i, j] + sum over k < depth, in order, of x[i, k] * panel[k, j], over a whole tile.

    All are fp32 at addresses; strides are bytes between rows i.
    """
    _multiply_rows(e, host_tile().rows, panel, depth, (x, x_stride), (start, start_stride), (y, y_stride))


@vector_code
def multiply_few(
    e: Emitter,
    rows: ir.Value,
    panel: ir.Value,
    depth: ir.Value,
    x: ir.Value,
    x_stride: ir.Value,
    start: ir.Value,
    start_stride: ir.Value,
    y: ir.Value,
    y_stride: ir.Value,
) -> None:
    """`multiply_tile` of the first `rows` rows, 1 to `Tile.rows`."""

    def multiply(count: int) -> None:
        _multiply_rows(e, count, panel, depth, (x, x_stride), (start, start_stride), (y, y_stride))

    e.by_count(rows, host_tile().rows, multiply)


_Rows = tuple[ir.Value, ir.Value]
"""The address of a first row, and the bytes between rows."""


def _multiply_rows(
    e: Emitter, rows: int, panel: ir.Value, depth: ir.Value, x: _Rows, start: _Rows, y: _Rows
) -> None:
    tile = host_tile()
    lane = vec(F32, tile.lanes)
    inputs = [_row(e, x, i) for i in range(rows)]

    def places(operand: _Rows) -> list[ir.Value]:
        return [
            e.at(_row(e, operand, i), 4 * tile.lanes * j) for i in range(rows) for j in range(tile.vectors)
        ]

    def turn(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        line = e.at(panel, e.b.mul(k, e.i64(4 * tile.columns)))
        weights = [e.load(lane, line, 4 * tile.lanes * j) for j in range(tile.vectors)]
        offset, result = e.b.mul(k, e.i64(4)), []
        for i, row in enumerate(inputs):
            value = e.splat(e.load(F32, e.at(row, offset)), tile.lanes)
            result += [e.fma(value, weights[j], sums[i * tile.vectors + j]) for j in range(tile.vectors)]
        return result

    sums = [e.load(lane, place) for place in places(start)]
    sums = e.loop(e.i64(0), depth, 1, sums, turn)
    for total, place in zip(sums, places(y), strict=True):
        e.store(total, place)


def _row(e: Emitter, rows: _Rows, i: int) -> ir.Value:
    return e.at(rows[0], e.b.mul(rows[1], e.i64(i)))
