"""Vector code of a matmul on matrix tiles (matrix_tiles.py), as numba intrinsics.

Operands lie as tiles of 1024 bytes, 16 rows of 64:

    activations   16 rows of x, STEP columns as bf16. Of a block of 32 rows: [DEPTH / STEP, 2 halves, 2 terms] tiles
    weights       STEP / 2 pairs of columns, of each 16 rows of the weight, two bf16 side by side. Of a panel of 32
                  weight rows: [2 halves, DEPTH / STEP, 2 terms] tiles

Does not know: how tiles are shared among threads.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.cpu.matrix_tiles import BLOCK, HALF_BYTES, STEP, TILE_BYTES
from quengine.kernels.cpu.row_ir import emitter
from quengine.kernels.cpu.vector_ir import F32, I8, I16, I32, Emitter, vec

_UPPER = 0xFFFF0000


@intrinsic(prefer_literal=True)
def split_row(typingctx: Any, variant: Any, x: Any, count: Any, tile_row: Any) -> Any:
    """`count` <= STEP fp32 at address x as a row of a tile, and of the tile of second terms behind it; zeros follow."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, x, count, tile_row = args
        e = emitter(context, builder)

        def terms(i: ir.Value, lanes: int) -> None:
            high, low = _split(e, e.load(vec(F32, lanes), e.at(x, builder.mul(i, e.i64(4)))))
            for k, term in enumerate((high, low)):
                upper = builder.trunc(e.shift_left(term, -16), vec(I16, lanes))
                e.store(upper, e.at(tile_row, builder.mul(i, e.i64(2))), TILE_BYTES * k)

        def zeros(i: ir.Value, lanes: int) -> None:
            for k in range(2):
                zero = e.const(vec(I16, lanes), 0)
                e.store(zero, e.at(tile_row, builder.mul(i, e.i64(2))), TILE_BYTES * k)

        e.spans(e.i64(0), count, terms)
        e.spans(count, e.i64(STEP), zeros)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def split_panel(typingctx: Any, variant: Any, panel: Any, depth: Any, tiles: Any) -> Any:
    """An fp32 panel [depth, 32] of weights as tiles. depth: a multiple of STEP."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, panel, depth, tiles = args
        e = emitter(context, builder)

        def step(k: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            lines = e.at(panel, builder.mul(k, e.i64(4 * BLOCK)))
            target = e.at(tiles, builder.mul(k, e.i64(2 * TILE_BYTES // STEP)))
            for half in range(2):
                values = (e.load(vec(F32, 16), lines, 4 * (BLOCK * i + 16 * half)) for i in range(STEP))
                store_pairs(e, values, e.at(target, HALF_BYTES * half))
            return []

        e.loop(e.i64(0), depth, STEP, [], step)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 3), codegen


def store_pairs(e: Emitter, values: Iterable[ir.Value], target: ir.Value) -> None:
    """STEP columns of 16 weight rows, fp32, as a tile of their first terms and, behind it, one of their second."""
    columns = iter(values)
    for pair in range(STEP // 2):
        first, second = _split(e, next(columns)), _split(e, next(columns))
        for term in range(2):
            both = e.b.or_(e.shift_left(first[term], -16), e.and_(second[term], _UPPER))
            e.store(both, target, TILE_BYTES * term + 64 * pair)


def _split(e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """fp32 lanes as bits: themselves, and what their upper halves leave. The upper halves of both are the terms."""
    bits = e.b.bitcast(x, vec(I32, x.type.count))
    rest = e.b.fsub(x, e.b.bitcast(e.and_(bits, _UPPER), x.type))
    return bits, e.b.bitcast(rest, bits.type)


@intrinsic
def configure_tiles(typingctx: Any, memory: Any) -> Any:
    """Let this thread have eight tiles of 16 rows of 64 bytes. memory: the address of 64 bytes to use."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        e = emitter(context, builder)
        # Byte 0: palette 1; from 16 on bytes per row, int16; from 48 on rows, int8.
        e.store(e.const(vec(I8, 16), [1] + [0] * 15), args[0])
        e.store(e.const(vec(I16, 16), [64] * 8 + [0] * 8), args[0], 16)
        e.store(e.const(vec(I8, 16), [16] * 8 + [0] * 8), args[0], 48)
        _call(e, "ldtilecfg", _pointer(e, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release_tiles(typingctx: Any) -> Any:
    """Give this thread's tiles back: they are then not saved when it is taken off its CPU."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, _args: Any) -> ir.Value:
        _call(emitter(context, builder), "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def multiply_matrix_tile(
    typingctx: Any, variant: Any, tiles: Any, depth: Any, x: Any, following: Any, sums: Any
) -> Any:
    """sums[i, j] += the two-term product over `depth` columns (a multiple of STEP), 32 columns j.

    All at addresses; sums fp32 [rows, BLOCK]. following: where the next activations lie, asked for ahead. `variant`:
    "1/..." for 16 rows i, "2/..." for 32.
    """
    halves = int(variant.literal_value.split("/")[0])

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, tiles, depth, x, following, sums = args
        e = emitter(context, builder)

        def each_sum(name: str) -> None:
            for a in range(halves):
                for b in range(2):
                    place = _pointer(e, e.at(sums, 4 * (16 * a * BLOCK + 16 * b)))
                    _call(e, name, _tile(2 * a + b), place, e.i64(4 * BLOCK))

        def step(k: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            offset = builder.mul(k, e.i64(4 * TILE_BYTES // STEP))
            first, ahead = e.at(x, offset), e.at(following, offset)
            second = e.at(tiles, builder.mul(k, e.i64(2 * TILE_BYTES // STEP)))
            # Tiles 4 and 5 are activations, 6 and 7 weights.
            for turn, (term_x, term_w) in enumerate(((0, 0), (1, 0), (0, 1))):
                if turn != 1:
                    for b in range(2):
                        _load(e, 6 + b, e.at(second, HALF_BYTES * b + TILE_BYTES * term_w))
                for a in range(halves):
                    _load(e, 4 + a, e.at(first, TILE_BYTES * (2 * a + term_x)))
                    for b in range(2):
                        _call(e, "tdpbf16ps", _tile(2 * a + b), _tile(4 + a), _tile(6 + b))
                    if turn < 2:
                        for line in range(0, TILE_BYTES, 64):
                            e.prefetch(e.at(ahead, TILE_BYTES * (2 * a + term_x) + line))
            return []

        each_sum("tileloadd64")
        e.loop(e.i64(0), depth, STEP, [], step)
        each_sum("tilestored64")
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 5), codegen


def _tile(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def _load(e: Emitter, tile: int, address: ir.Value) -> None:
    _call(e, "tileloadd64", _tile(tile), _pointer(e, address), e.i64(64))


def _pointer(e: Emitter, address: ir.Value) -> ir.Value:
    return e.b.inttoptr(address, I8.as_pointer())


def _call(e: Emitter, name: str, *args: ir.Value) -> None:
    """An instruction on tiles, LLVM's llvm.x86.*, where a program names its tiles itself."""
    declared = e.b.module.globals.get(f"llvm.x86.{name}")
    if declared is None:
        signature = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
        declared = ir.Function(e.b.module, signature, f"llvm.x86.{name}")
    e.b.call(declared, list(args))
