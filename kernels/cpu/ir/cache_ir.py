"""Vector code of cached rows: groups of codes (kernels/kv/kv_codes.py) and the transform of kernels/hadamard.py."""

from __future__ import annotations

from llvmlite import ir

from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, Emitter, vec

_MAGIC = (
    12582912.0  # 1.5 * 2^23: added, it rounds to an integer, halves to even, and leaves it in the low bits
)


def emit_codes(e: Emitter, cache_type: str, codes: ir.Value, d: ir.Value) -> list[ir.Value]:
    """The 32 codes of the group whose first element is number d of a row at address `codes`: fp32, 4 times 8 lanes."""
    if cache_type == "q8_0":
        parts = [e.load(vec(I8, 8), e.b.add(codes, d), 8 * k) for k in range(4)]
    else:
        packed = e.load(vec(I8, 16), e.b.add(codes, e.b.udiv(d, e.i64(2))))
        offset = e.const(vec(I8, 16), 8)
        halves = (e.b.sub(half, offset) for half in (e.and_(packed, 15), e.shift_left(packed, -4)))
        parts = [part for half in halves for part in e.halves(half)]
    return [e.to_float(e.widen(part, I32, True)) for part in parts]


def emit_some_codes(e: Emitter, cache_type: str, codes: ir.Value, d: ir.Value, lanes: int) -> ir.Value:
    """`lanes` codes from number d on, which lie in one half of a group: fp32."""
    if cache_type == "q8_0":
        return e.to_float(e.widen(e.load(vec(I8, lanes), e.b.add(codes, d)), I32, True))
    place = e.b.add(e.b.mul(e.b.udiv(d, e.i64(32)), e.i64(16)), e.b.and_(d, e.i64(15)))
    packed = e.widen(e.load(vec(I8, lanes), e.b.add(codes, place)), I32, False)
    shift = e.b.trunc(e.b.and_(e.b.lshr(d, e.i64(2)), e.i64(4)), I32)
    code = e.and_(e.b.lshr(packed, e.splat(shift, lanes)), 15)
    return e.to_float(e.b.sub(code, e.const(code.type, 8)))


@vector_code
def hadamard_row(e: Emitter, x: ir.Value, width: ir.Value, log: ir.Value) -> None:
    """Transforms `width` fp32 at address x in place, in blocks of 2^log elements, 32 or more."""
    lanes = vec(F32, 8)

    def place(i: ir.Value) -> ir.Value:
        return e.at(x, e.b.mul(i, e.i64(4)))

    def within(i: ir.Value) -> None:
        value = e.load(lanes, place(i))
        for apart in (1, 2, 4):
            signs = [-1.0 if lane & apart else 1.0 for lane in range(8)]
            other = e.pick(value, [lane ^ apart for lane in range(8)])
            value = e.b.fadd(other, e.b.fmul(value, e.const(lanes, signs)))
        e.store(value, place(i))

    def between(apart: ir.Value, i: ir.Value) -> None:
        near, far = e.load(lanes, place(i)), e.load(lanes, place(e.b.add(i, apart)))
        e.store(e.b.fadd(near, far), place(i))
        e.store(e.b.fsub(near, far), place(e.b.add(i, apart)))

    def pairs(bit: ir.Value) -> None:
        apart = e.b.shl(e.i64(1), bit)

        def pair(n: ir.Value) -> None:  # the n-th of all vectors that are the first of a pair
            rest = e.b.and_(n, e.b.sub(apart, e.i64(1)))
            between(apart, e.b.sub(e.b.mul(n, e.i64(2)), rest))

        e.each(e.i64(0), e.b.udiv(width, e.i64(2)), 8, pair)

    e.each(e.i64(0), width, 8, within)
    e.each(e.i64(3), log, 1, pairs)
    exponent = e.b.shl(e.b.sub(e.i64(127), log), e.i64(23))
    norm = e.splat(e.sqrt(e.b.bitcast(e.b.trunc(exponent, I32), F32)), 8)
    e.each(e.i64(0), width, 8, lambda i: e.store(e.b.fmul(e.load(lanes, place(i)), norm), place(i)))


@vector_code
def store_codes(
    e: Emitter, cache_type: str, x: ir.Value, count: ir.Value, codes: ir.Value, scales: ir.Value
) -> None:
    """Stores `count` fp32 at address x, a multiple of 32, as codes and fp16 scales."""

    def group(i: ir.Value) -> None:
        address = e.at(x, e.b.mul(i, e.i64(4)))
        values = [e.load(vec(F32, 8), address, 32 * k) for k in range(4)]
        stored, scale = _q8_0_scale(e, values) if cache_type == "q8_0" else _q4_0_scale(e, values)
        e.store(stored, e.b.add(scales, e.b.udiv(i, e.i64(16))))
        bits = [_code_bits(e, value, scale, cache_type == "q4_0") for value in values]
        if cache_type == "q8_0":
            for k, code in enumerate(bits):
                e.store(e.b.trunc(code, vec(I8, 8)), e.b.add(codes, i), 8 * k)
            return
        offset = e.const(vec(I32, 8), 8)
        for k in range(2):
            near, far = (e.and_(e.b.add(bits[part], offset), 15) for part in (k, k + 2))
            both = e.b.or_(near, e.shift_left(far, 4))
            e.store(e.b.trunc(both, vec(I8, 8)), e.b.add(codes, e.b.udiv(i, e.i64(2))), 8 * k)

    e.each(e.i64(0), count, 32, group)


def _code_bits(e: Emitter, value: ir.Value, scale: ir.Value, is_narrow: bool) -> ir.Value:
    """value / scale as integers in the low bits, from -8 to 7 if narrow; 0 where the scale is 0."""
    lanes, zero = vec(F32, 8), e.const(vec(F32, 8), 0.0)
    ratio = e.b.fdiv(value, scale)
    if is_narrow:
        ratio = e.maximum(ratio, e.const(lanes, -8.0))
        ratio = e.b.select(e.b.fcmp_ordered("<", ratio, e.const(lanes, 7.0)), ratio, e.const(lanes, 7.0))
    ratio = e.b.select(e.b.fcmp_ordered("!=", scale, zero), ratio, zero)
    return e.b.bitcast(e.b.fadd(ratio, e.const(lanes, _MAGIC)), vec(I32, 8))


def _q8_0_scale(e: Emitter, values: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """A group's scale as stored, and fp32 before it is rounded, 8 lanes."""
    bits, lanes = vec(I32, 8), vec(F32, 8)
    sizes = [e.b.bitcast(e.and_(e.b.bitcast(v, bits), 0x7FFFFFFF), lanes) for v in values]
    scale = e.b.fdiv(_largest(e, sizes), e.const(vec(F32, 1), 127.0))
    return e.float_to_half(scale), e.splat_lane(scale, 0, 8)


def _q4_0_scale(e: Emitter, values: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """A group's scale as stored, and fp32 of that, 8 lanes."""
    minus = e.const(vec(F32, 8), -1.0)
    high, below = _largest(e, values), _largest(e, [e.b.fmul(v, minus) for v in values])
    low = e.b.fmul(below, e.const(vec(F32, 1), -1.0))
    most = e.b.select(e.b.fcmp_ordered(">", below, high), low, high)
    half = e.float_to_half(e.b.fmul(most, e.const(vec(F32, 1), -0.125)))
    half = e.and_(e.b.add(half, e.const(vec(I16, 1), 4)), -8)
    return half, e.splat_lane(e.half_to_float(half), 0, 8)


def _largest(e: Emitter, values: list[ir.Value]) -> ir.Value:
    top = values[0]
    for value in values[1:]:
        top = e.maximum(top, value)
    return e.largest(top)
