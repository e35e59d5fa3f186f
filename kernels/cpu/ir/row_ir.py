"""Loops over one row, as numba intrinsics: dequantization, dots of float weights, rounding of activations.

Rounded activations lie in memory as records.py says; the byte planes are for processors that multiply bytes
(`Emitter.quads`).

Does not know: how rows are shared among threads.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.activations import ACTIVATION_MAX
from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.ir.block_ir import emit_blocks
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, I64, Emitter, vec
from quengine.kernels.cpu.runtime.target import host_tile

# Bytes that weights are asked for ahead of their use; processors' own prefetching stops at the end of a page. Measured
# on a Cascade Lake Xeon: without it rows take 1.5 to 1.8 times as long; 1 to 8 KiB do equally well.
PREFETCH = 2048
QUAD_OFFSET = (
    32  # what the sums of four activations in a record are times: the offset of Q6_K, the negative of it
)


def emitter(context: Any, builder: ir.IRBuilder) -> Emitter:
    triple, _, features = context.codegen().magic_tuple()
    has_half = "+f16c" in features or triple.startswith(("aarch64", "arm64"))
    return Emitter(builder, has_half, host_tile().quads)


@intrinsic(prefer_literal=True)
def dot_float_row(typingctx: Any, variant: Any, w: Any, cols: Any, x: Any) -> Any:
    """fp32 dot of a row of F32, F16 or BF16 at address w with fp32 at address x.

    `variant`: "F16/stream/..." when the next row follows this one in memory, "F16/row/..." when not.
    """
    name, access = variant.literal_value.split("/")[:2]

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, w, cols, x = args
        e = emitter(context, builder)
        whole = builder.and_(cols, e.i64(-32))
        zeros = [e.const(vec(F32, 8), 0.0)] * 4

        def turn(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            if access == "stream":
                ahead = e.at(w, builder.mul(i, e.i64(FORMATS[name].nbytes)))
                for line in range(0, 32 * FORMATS[name].nbytes, 64):
                    e.prefetch(e.at(ahead, PREFETCH + line))
            values = [_float_weights(e, name, w, e.at(i, 8 * k), 8) for k in range(4)]
            address = builder.add(x, builder.mul(i, e.i64(4)))
            inputs = [e.load(vec(F32, 8), address, 32 * k) for k in range(4)]
            return [e.fma(v, u, s) for v, u, s in zip(values, inputs, state, strict=True)]

        s = e.loop(e.i64(0), whole, 32, zeros, turn)
        total = e.total(builder.fadd(builder.fadd(s[0], s[1]), builder.fadd(s[2], s[3])))

        def single(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            value = e.lane(_float_weights(e, name, w, i, 1), 0)
            return [e.fma(value, e.load(F32, builder.add(x, builder.mul(i, e.i64(4)))), state[0])]

        return e.loop(whole, cols, 1, [total], single)[0]

    return types.float32(variant, types.int64, types.int64, types.int64), codegen


def _float_weights(e: Emitter, name: str, w: ir.Value, index: ir.Value, count: int) -> ir.Value:
    """`count` weights from `index` on, as fp32 lanes."""
    address = e.b.add(w, e.b.mul(index, e.i64(FORMATS[name].nbytes)))
    if name == "F32":
        return e.load(vec(F32, count), address)
    if name == "F16":
        return e.load_halves(count, address)
    wide = e.widen(e.load(vec(I16, count), address), I32, False)
    return e.b.bitcast(e.shift_left(wide, 16), vec(F32, count))


@intrinsic(prefer_literal=True)
def dequantize_row(typingctx: Any, variant: Any, w: Any, blocks: Any, out: Any) -> Any:
    """A row of `blocks` blocks at address w to fp32 at address out, the values of `block_formats.dequantize`."""
    fmt = FORMATS[variant.literal_value.split("/")[0]]

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, w, blocks, out = args
        e = emitter(context, builder)

        def widen(i: ir.Value, lanes: int) -> None:
            e.store(_float_weights(e, fmt.name, w, i, lanes), e.at(out, builder.mul(i, e.i64(4))))

        def turn(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            block = e.at(w, builder.mul(i, e.i64(fmt.nbytes)))
            _emit_dequantized(e, fmt, block, e.at(out, builder.mul(i, e.i64(4 * fmt.block))))
            return []

        if fmt.is_quantized:
            e.loop(e.i64(0), blocks, 1, [], turn)
        else:
            e.spans(e.i64(0), blocks, widen)
        return context.get_dummy_value()

    return types.void(variant, types.int64, types.int64, types.int64), codegen


def _emit_dequantized(e: Emitter, fmt: BlockFormat, block: ir.Value, target: ir.Value) -> None:
    content = emit_blocks(e, fmt, block, 1)
    for j in range(fmt.block // 32):
        for half, ints in enumerate(e.halves(content.ints(e, j, 1))):
            # Lanes 2j and 2j+1 over two vectors for groups of 16, lane j of one for groups of 32.
            vector, lane = divmod(2 * j + half, 8) if len(content.scales) == 2 else (0, j)
            value = e.to_float(e.widen(ints, I32, True))
            value = e.b.fmul(value, e.splat_lane(content.scales[vector], lane, 16))
            if content.mins is not None:
                value = e.b.fsub(value, e.splat_lane(content.mins[vector], lane, 16))
            e.store(value, target, 128 * j + 64 * half)


@intrinsic(prefer_literal=True)
def scale_row(typingctx: Any, variant: Any, x: Any, factor: Any, count: Any, out: Any) -> Any:
    """`count` fp32 at address x times the fp32 at address factor, to address out."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, x, factor, count, out = args
        e = emitter(context, builder)
        emit_scaled(e, x, e.load(F32, factor), count, out)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 4), codegen


def emit_scaled(e: Emitter, x: ir.Value, factor: ir.Value, count: ir.Value, out: ir.Value) -> None:
    """`count` fp32 at address x times a factor, to address out."""

    def multiply(i: ir.Value, lanes: int) -> None:
        at = e.b.mul(i, e.i64(4))
        e.store(e.b.fmul(e.load(vec(F32, lanes), e.at(x, at)), e.splat(factor, lanes)), e.at(out, at))

    e.spans(e.i64(0), count, multiply)


@intrinsic(prefer_literal=True)
def round_row(typingctx: Any, variant: Any, x: Any, cols: Any, first: Any, last: Any, record: Any) -> Any:
    """Round `cols` fp32 at address x into the activation record at address `record` (see activations.py).

    Only columns first .. last - 1, multiples of 32.
    """

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, x, cols, first, last, record = args
        e = emitter(context, builder)
        quads, scales = (builder.add(record, builder.mul(cols, e.i64(k))) for k in (2, 3))
        by_32 = builder.add(scales, builder.lshr(cols, e.i64(3)))
        by_16 = builder.add(scales, builder.lshr(cols, e.i64(2)))

        def turn(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            values = e.load(vec(F32, 32), e.at(x, builder.mul(i, e.i64(4))))
            a, t = _emit_rounding(e, values)
            sums = _quad_sums(e, a)
            if e.quads:
                _store_bytes(e, a, record, cols, i)
                e.store(builder.mul(sums, e.const(sums.type, -QUAD_OFFSET)), e.at(quads, i))
            else:
                _store_pairs(e, a, record, cols, i)
            parts = [e.to_float(total_int(e, part)) for part in e.halves(sums)]
            offset = builder.lshr(i, e.i64(3))  # 4 bytes per group of 32
            e.store(t, e.at(scales, offset))
            e.store(builder.fmul(t, builder.fadd(*parts)), e.at(by_32, offset))
            for k, part in enumerate(parts):
                e.store(builder.fmul(t, part), e.at(by_16, builder.lshr(i, e.i64(2))), 4 * k)
            return []

        e.loop(first, last, 32, [], turn)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 5), codegen


def _emit_rounding(e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """One group of 32 fp32: its integers, int16 lanes, and its scale t."""
    b, lanes = e.b, vec(F32, 32)
    # As integers the bits of |x| order like |x|, and a NaN is above all: it is then t.
    largest = e.and_(b.bitcast(x, vec(I32, 32)), 0x7FFFFFFF)
    while largest.type.count > 1:
        largest = greater(e, *e.halves(largest))
    t = b.fdiv(b.bitcast(e.lane(largest, 0), F32), e.const(F32, float(ACTIVATION_MAX)))
    quotient, zero = b.fdiv(x, e.splat(t, 32)), e.const(lanes, 0.0)
    # 0/0 of a zero group and all of a non-finite one become 0.
    quotient = b.select(b.fcmp_ordered("==", e.splat(t, 32), zero), zero, quotient)
    return round_within(e, quotient, ACTIVATION_MAX), t


def round_within(e: Emitter, x: ir.Value, limit: int) -> ir.Value:
    """fp32 lanes to int16 ones of -limit .. limit, to the nearest, ties to even; NaN becomes 0."""
    b, lanes = e.b, x.type
    most, zero = e.const(lanes, float(limit)), e.const(lanes, 0.0)
    # Comparisons with NaN are false.
    x = b.select(b.fcmp_ordered("ord", x, zero), x, zero)
    x = b.select(b.fcmp_ordered("<", x, most), x, most)
    x = b.select(b.fcmp_ordered(">", x, b.fneg(most)), x, b.fneg(most))
    # Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    shifted = b.bitcast(b.fadd(x, e.const(lanes, 12582912.0)), vec(I32, lanes.count))
    return b.trunc(shifted, vec(I16, lanes.count))


def _store_bytes(e: Emitter, a: ir.Value, record: ir.Value, cols: ir.Value, i: ir.Value) -> None:
    """Columns i .. i + 31 as two signed bytes each: the low one is a modulo 256, the high one makes up for its sign."""
    low = e.b.trunc(a, vec(I8, 32))
    rest = e.b.sub(a, e.widen(low, I16, True))
    high = e.b.trunc(e.b.ashr(rest, e.const(rest.type, 8)), vec(I8, 32))
    at = e.at(record, i)
    e.store(high, at)
    e.store(low, e.at(at, cols))


def _store_pairs(e: Emitter, a: ir.Value, record: ir.Value, cols: ir.Value, i: ir.Value) -> None:
    """Columns i .. i + 31: halves of 32 bytes, 64 bytes apart if the group has a partner, else side by side."""
    b = e.b
    first = b.and_(i, e.i64(-64))
    lone = b.icmp_signed(">", b.add(first, e.i64(64)), cols)
    at = e.at(record, b.mul(b.add(first, b.lshr(b.sub(i, first), e.i64(1))), e.i64(2)))
    evens, odds = e.evens_odds(a)
    e.store(evens, at)
    e.store(odds, e.at(at, b.select(lone, e.i64(32), e.i64(64))))


def _quad_sums(e: Emitter, a: ir.Value) -> ir.Value:
    """Sums of four neighbours of int16 lanes, int32."""
    pairs = e.b.add(*e.evens_odds(e.widen(a, I32, True)))
    return e.b.add(*e.evens_odds(pairs))


def greater(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    """The greater of each two unsigned lanes."""
    return e.b.select(e.b.icmp_unsigned(">", x, y), x, y)


def total_int(e: Emitter, total: ir.Value) -> ir.Value:
    while total.type.count > 1:
        low, high = e.halves(total)
        total = e.b.add(low, high)
    return e.lane(total, 0)


@intrinsic
def get(typingctx: Any, context_address: Any, slot: Any) -> Any:
    """Slot `slot` of the int64 parameters at an address."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        e = Emitter(builder, has_half=False)
        return e.load(I64, e.at(args[0], builder.mul(args[1], e.i64(8))))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def put(typingctx: Any, context_address: Any, slot: Any, value: Any) -> Any:
    """Write slot `slot` of the int64 parameters at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        e = Emitter(builder, has_half=False)
        e.store(args[2], e.at(args[0], builder.mul(args[1], e.i64(8))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def store_f32(typingctx: Any, value: Any, address: Any) -> Any:
    """Write an fp32 to an address."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        Emitter(builder, has_half=False).store(args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), codegen
