"""Loops over one row: dequantization, dot products of float weights, quantization of activations.

The layout of quantized activations is in gemv/quantized_rows.py; the byte planes are for processors with VNNI
(`Emitter.byte_dot_lanes`).
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from quengine.kernels.activations import ACTIVATION_MAX
from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.gemv.quantized_rows import INTS, SCALES, SUM_FACTOR, SUMS
from quengine.kernels.cpu.ir.block_ir import emit_blocks
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, I64, Emitter, vec

# Bytes of prefetch distance on weights; hardware prefetching stops at the end of a page. Measured on a Cascade Lake
# Xeon: without it rows take 1.5 to 1.8 times as long; 1 to 8 KiB do equally well. On an AMX Xeon, whose memory answers
# later, 4 KiB reads 88 GB/s on 8 threads where 2 KiB reads 71; more gains nothing.
PREFETCH = 4096
# Farther lines are asked for in the L2 cache: a core has few places for lines that its L1 waits for. Eight layers of a
# 7B on an AMX Xeon: 18.7 tokens a second on two threads and 77 on 16 without it, 21.7 and 86 with it.
FARTHER = 8192


@vector_code(result=types.float32)
def dot_float_row(e: Emitter, name: str, access: str, w: ir.Value, cols: ir.Value, x: ir.Value) -> ir.Value:
    """fp32 dot product of an F32, F16 or BF16 row at address w with fp32 at address x.

    name: the format. access: "stream" if the next row follows this one in memory, else "row".
    """
    return emit_float_dots(e, name, access, w, cols, [x])[0]


def emit_float_dots(
    e: Emitter, name: str, access: str, w: ir.Value, cols: ir.Value, inputs: list[ir.Value]
) -> list[ir.Value]:
    """`dot_float_row` of one row with each of some inputs."""
    whole, zero = e.b.and_(cols, e.i64(-32)), e.const(vec(F32, 8), 0.0)

    def turn(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        if access == "stream":
            ahead = e.at(w, e.b.mul(i, e.i64(FORMATS[name].nbytes)))
            for line in range(0, 32 * FORMATS[name].nbytes, 64):
                e.prefetch(e.at(ahead, PREFETCH + line))
        values = [_float_weights(e, name, w, e.at(i, 8 * k), 8) for k in range(4)]
        result = []
        for number, x in enumerate(inputs):
            address = e.b.add(x, e.b.mul(i, e.i64(4)))
            for k, value in enumerate(values):
                result.append(e.fma(value, e.load(vec(F32, 8), address, 32 * k), state[4 * number + k]))
        return result

    sums = e.loop(e.i64(0), whole, 32, [zero] * 4 * len(inputs), turn)
    totals = [
        e.total(e.b.fadd(e.b.fadd(*sums[k : k + 2]), e.b.fadd(*sums[k + 2 : k + 4])))
        for k in range(0, len(sums), 4)
    ]

    def single(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        value, at = e.lane(_float_weights(e, name, w, i, 1), 0), e.b.mul(i, e.i64(4))
        return [
            e.fma(value, e.load(F32, e.b.add(x, at)), total) for x, total in zip(inputs, state, strict=True)
        ]

    return e.loop(whole, cols, 1, totals, single)


def _float_weights(e: Emitter, name: str, w: ir.Value, index: ir.Value, count: int) -> ir.Value:
    """`count` weights from `index` on, as fp32 lanes."""
    address = e.b.add(w, e.b.mul(index, e.i64(FORMATS[name].nbytes)))
    if name == "F32":
        return e.load(vec(F32, count), address)
    if name == "F16":
        return e.load_halves(count, address)
    wide = e.widen(e.load(vec(I16, count), address), I32, False)
    return e.b.bitcast(e.shift_left(wide, 16), vec(F32, count))


@vector_code
def dequantize_row(e: Emitter, format_name: str, w: ir.Value, blocks: ir.Value, out: ir.Value) -> None:
    """Dequantizes a row of `blocks` blocks at address w to fp32 at address out, as `block_formats.dequantize`."""
    fmt = FORMATS[format_name]

    def widen(i: ir.Value, lanes: int) -> None:
        e.store(_float_weights(e, fmt.name, w, i, lanes), e.at(out, e.b.mul(i, e.i64(4))))

    def dequantize(i: ir.Value) -> None:
        block = e.at(w, e.b.mul(i, e.i64(fmt.nbytes)))
        _emit_dequantized(e, fmt, block, e.at(out, e.b.mul(i, e.i64(4 * fmt.block))))

    if fmt.is_quantized:
        e.each(e.i64(0), blocks, 1, dequantize)
    else:
        e.spans(e.i64(0), blocks, widen)


def _emit_dequantized(e: Emitter, fmt: BlockFormat, block: ir.Value, target: ir.Value) -> None:
    content = emit_blocks(e, fmt, block, 1)
    for j in range(fmt.block // 32):
        for half, ints in enumerate(e.halves(content.ints(e, j, 1))):
            # Groups of 16 have lanes 2j and 2j+1 over two vectors, groups of 32 have lane j of one.
            vector, lane = divmod(2 * j + half, 8) if len(content.scales) == 2 else (0, j)
            value = e.to_float(e.widen(ints, I32, True))
            value = e.b.fmul(value, e.splat_lane(content.scales[vector], lane, 16))
            if content.mins is not None:
                value = e.b.fsub(value, e.splat_lane(content.mins[vector], lane, 16))
            e.store(value, target, 128 * j + 64 * half)


@vector_code(factor=types.float32)
def scale_row(e: Emitter, x: ir.Value, factor: ir.Value, count: ir.Value, out: ir.Value) -> None:
    """`count` fp32 at address x times a factor, to address out."""
    emit_scaled(e, x, factor, count, out)


def emit_scaled(e: Emitter, x: ir.Value, factor: ir.Value, count: ir.Value, out: ir.Value) -> None:
    """`count` fp32 at address x times a factor, to address out."""

    def multiply(i: ir.Value, lanes: int) -> None:
        at = e.b.mul(i, e.i64(4))
        e.store(e.b.fmul(e.load(vec(F32, lanes), e.at(x, at)), e.splat(factor, lanes)), e.at(out, at))

    e.spans(e.i64(0), count, multiply)


@vector_code
def quantize_row(
    e: Emitter, x: ir.Value, cols: ir.Value, first: ir.Value, last: ir.Value, record: ir.Value
) -> None:
    """Rounds `cols` fp32 at address x to quantized activations at address `record` (see gemv/quantized_rows.py).

    Only columns first .. last - 1, multiples of 32.
    """
    fields = (INTS[16], INTS[32], SCALES, SUMS[32], SUMS[16])
    ints_16, ints_32, scales, by_32, by_16 = (record_field(e, record, cols, eighths) for eighths in fields)

    def turn(i: ir.Value) -> None:
        values = e.load(vec(F32, 32), e.at(x, e.b.mul(i, e.i64(4))))
        a, t = _emit_rounding(e, values)
        ints = [total_int(e, part) for part in e.halves(_four_sums(e, a))]
        offset = e.b.lshr(i, e.i64(3))  # 4 bytes per group of 32
        if e.byte_dot_lanes:
            _store_bytes(e, a, record, cols, i)
        else:
            _store_pairs(e, a, record, cols, i)
        scaled = [e.b.mul(part, e.const(I32, SUM_FACTOR)) for part in ints]
        for k, part in enumerate(scaled):
            e.store(part, e.at(ints_16, e.b.lshr(i, e.i64(2))), 4 * k)
        e.store(e.b.add(*scaled), e.at(ints_32, offset))
        parts = [e.to_float(part) for part in ints]
        e.store(t, e.at(scales, offset))
        e.store(e.b.fmul(t, e.b.fadd(*parts)), e.at(by_32, offset))
        for k, part in enumerate(parts):
            e.store(e.b.fmul(t, part), e.at(by_16, e.b.lshr(i, e.i64(2))), 4 * k)

    e.each(first, last, 32, turn)


def record_field(e: Emitter, record: ir.Value, cols: ir.Value, eighths: int) -> ir.Value:
    """The address of a record's field that starts at so many eighths of its columns, in bytes."""
    return e.b.add(record, e.b.lshr(e.b.mul(cols, e.i64(eighths)), e.i64(3)))


def _emit_rounding(e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Rounds a group of 32 fp32: its integers, int16 lanes, and its scale t."""
    b, lanes = e.b, vec(F32, 32)
    # The bits of |x|, compared as integers, order like |x|, and NaN is the largest: it becomes t.
    largest = e.and_(b.bitcast(x, vec(I32, 32)), 0x7FFFFFFF)
    while largest.type.count > 1:
        largest = greater(e, *e.halves(largest))
    t = b.fdiv(b.bitcast(e.lane(largest, 0), F32), e.const(F32, float(ACTIVATION_MAX)))
    quotient, zero = b.fdiv(x, e.splat(t, 32)), e.const(lanes, 0.0)
    # 0/0 of a zero group, and every quotient of a non-finite group, become 0.
    quotient = b.select(b.fcmp_ordered("==", e.splat(t, 32), zero), zero, quotient)
    return round_within(e, quotient, ACTIVATION_MAX), t


def round_within(e: Emitter, x: ir.Value, limit: int) -> ir.Value:
    """Rounds fp32 lanes to int16 within -limit .. limit, to nearest, ties to even; NaN becomes 0."""
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
    """Stores columns i .. i + 31 as two signed bytes each: low is a modulo 256, high absorbs its sign."""
    low = e.b.trunc(a, vec(I8, 32))
    rest = e.b.sub(a, e.widen(low, I16, True))
    high = e.b.trunc(e.b.ashr(rest, e.const(rest.type, 8)), vec(I8, 32))
    at = e.at(record, i)
    e.store(high, at)
    e.store(low, e.at(at, cols))


def _store_pairs(e: Emitter, a: ir.Value, record: ir.Value, cols: ir.Value, i: ir.Value) -> None:
    """Stores columns i .. i + 31 as evens, then odds: 64 bytes apart in a full pair of groups, else adjacent."""
    b = e.b
    first = b.and_(i, e.i64(-64))
    lone = b.icmp_signed(">", b.add(first, e.i64(64)), cols)
    at = e.at(record, b.mul(b.add(first, b.lshr(b.sub(i, first), e.i64(1))), e.i64(2)))
    evens, odds = e.evens_odds(a)
    e.store(evens, at)
    e.store(odds, e.at(at, b.select(lone, e.i64(32), e.i64(64))))


def _four_sums(e: Emitter, a: ir.Value) -> ir.Value:
    """Sums of four neighbours of int16 lanes, int32."""
    pairs = e.b.add(*e.evens_odds(e.widen(a, I32, True)))
    return e.b.add(*e.evens_odds(pairs))


def greater(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    """The lane-wise maximum of unsigned integers."""
    return e.b.select(e.b.icmp_unsigned(">", x, y), x, y)


def total_int(e: Emitter, total: ir.Value) -> ir.Value:
    while total.type.count > 1:
        low, high = e.halves(total)
        total = e.b.add(low, high)
    return e.lane(total, 0)


@vector_code(result=types.int64)
def int64_at(e: Emitter, array: ir.Value, index: ir.Value) -> ir.Value:
    """Element `index` of an int64 array at an address."""
    return e.load(I64, e.at(array, e.b.mul(index, e.i64(8))))


@vector_code(result=types.float32)
def float_at(e: Emitter, array: ir.Value, index: ir.Value) -> ir.Value:
    """Element `index` of an fp32 array at an address."""
    return e.load(F32, e.at(array, e.b.mul(index, e.i64(4))))


@vector_code(value=types.float32)
def store_f32(e: Emitter, value: ir.Value, address: ir.Value) -> None:
    """Stores an fp32 at an address."""
    e.store(value, address)


@vector_code
def multiply_span(
    e: Emitter, x: ir.Value, y: ir.Value, out: ir.Value, first: ir.Value, last: ir.Value
) -> None:
    """out = x * y, fp32 at addresses, elements first .. last - 1."""

    def multiply(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        e.store(e.b.fmul(e.load(lane, e.at(x, at)), e.load(lane, e.at(y, at))), e.at(out, at))

    e.spans(first, last, multiply)
