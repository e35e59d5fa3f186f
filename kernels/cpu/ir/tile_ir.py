"""Vector code of a tile's matmul, as numba intrinsics: panels of weights, packed activations, the product.

Does not know: how tiles are shared among threads.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.cpu.ir.row_ir import emitter
from quengine.kernels.cpu.ir.vector_ir import F32, I64, Emitter, vec
from quengine.kernels.cpu.runtime.target import host_tile


@intrinsic(prefer_literal=True)
def stack_floats(typingctx: Any, count: Any) -> Any:
    """The address of `count` (a literal) fp32 on the stack, the same each time."""
    number = count.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        with builder.goto_entry_block():  # numba's own helper would fill it with zeros, number by number
            place = builder.alloca(ir.ArrayType(F32, number))
        place.align = 64
        return builder.ptrtoint(place, I64)

    return types.int64(count), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address, which need not be mapped."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        emitter(context, builder).prefetch(args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic(prefer_literal=True)
def transpose_rows(typingctx: Any, variant: Any, rows: Any, stride: Any, depth: Any, out: Any) -> Any:
    """`Tile.lanes` rows of fp32, `stride` bytes apart, side by side: out[k, lane], lines `Tile.columns` apart.

    depth is rounded up to whole vectors, on both sides.
    """

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, rows, stride, depth, out = args
        e, tile = emitter(context, builder), host_tile()
        lanes = tile.lanes

        def square(k: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            source = e.at(rows, builder.mul(k, e.i64(4)))
            lines = [
                e.load(vec(F32, lanes), e.at(source, builder.mul(stride, e.i64(i)))) for i in range(lanes)
            ]
            target = e.at(out, builder.mul(k, e.i64(4 * tile.columns)))
            for i, line in enumerate(transposed(e, lines)):
                e.store(line, target, 4 * tile.columns * i)
            return []

        e.loop(e.i64(0), depth, lanes, [], square)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 4), codegen


def transposed(e: Emitter, lines: list[ir.Value]) -> list[ir.Value]:
    """A square of lanes, its rows given, by columns; the side is a power of two."""
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


@intrinsic(prefer_literal=True)
def copy_floats(typingctx: Any, variant: Any, source: Any, target: Any, count: Any) -> Any:
    """`count` fp32 from address to address."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, source, target, count = args
        e = emitter(context, builder)

        def copy(i: ir.Value, lanes: int) -> None:
            at = builder.mul(i, e.i64(4))
            e.store(e.load(vec(F32, lanes), e.at(source, at)), e.at(target, at))

        e.spans(e.i64(0), count, copy)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def clear_floats(typingctx: Any, variant: Any, target: Any, count: Any) -> Any:
    """`count` fp32 zeros to an address."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, target, count = args
        e = emitter(context, builder)

        def clear(i: ir.Value, lanes: int) -> None:
            e.store(e.const(vec(F32, lanes), 0.0), e.at(target, builder.mul(i, e.i64(4))))

        e.spans(e.i64(0), count, clear)
        return context.get_dummy_value()

    return types.void(variant, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def multiply_tile(
    typingctx: Any,
    variant: Any,
    panel: Any,
    depth: Any,
    x: Any,
    x_stride: Any,
    start: Any,
    start_stride: Any,
    y: Any,
    y_stride: Any,
) -> Any:
    """y[i, j] = start[i, j] + sum over k < depth, in order, of x[i, k] * panel[k, j], a whole tile.

    All fp32 at addresses; strides are the bytes from one i to the next.
    """

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, panel, depth, x, x_stride, start, start_stride, y, y_stride = args
        e, tile = emitter(context, builder), host_tile()
        lane = vec(F32, tile.lanes)
        inputs = [e.at(x, builder.mul(x_stride, e.i64(i))) for i in range(tile.rows)]

        def places(base: ir.Value, stride: ir.Value) -> list[ir.Value]:
            return [
                e.at(e.at(base, builder.mul(stride, e.i64(i))), 4 * tile.lanes * j)
                for i in range(tile.rows)
                for j in range(tile.vectors)
            ]

        def turn(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            line = e.at(panel, builder.mul(k, e.i64(4 * tile.columns)))
            weights = [e.load(lane, line, 4 * tile.lanes * j) for j in range(tile.vectors)]
            offset, result = builder.mul(k, e.i64(4)), []
            for i, row in enumerate(inputs):
                value = e.splat(e.load(F32, e.at(row, offset)), tile.lanes)
                result += [e.fma(value, weights[j], sums[i * tile.vectors + j]) for j in range(tile.vectors)]
            return result

        sums = [e.load(lane, place) for place in places(start, start_stride)]
        sums = e.loop(e.i64(0), depth, 1, sums, turn)
        for total, place in zip(sums, places(y, y_stride), strict=True):
            e.store(total, place)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 8), codegen
