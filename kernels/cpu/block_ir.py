"""Each block format as vector code: from the bytes of blocks to slices of 32 integers and their scales.

One description per format serves the dot product and the dequantization. It follows the byte layouts of
`kernels/block_formats.py`.

Does not know: activations, rows, threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.cpu.vector_ir import F32, I1, I8, I16, I32, I64, Emitter, vec


@dataclass(frozen=True)
class Slices:
    """The contents of a run of blocks while code is being written for it.

    ints(i)   the weights 32i .. 32i+31 of the run as two int16 vectors of 16: the first and the last 16 of them, or
              where `paired` those at even and at odd places (what widening bytes in place gives)
    scales    fp32 lanes, one per group in order: w = scale * int - min. Groups of 16 have two vectors, of slices
              0..3 and 4..7, two lanes a slice
    mins      the minimums to subtract, in the same form, or None
    joint     where the same bytes hold slices i and i + 1 (i even): ints(i) with ints(i + 1) behind, made together
    """

    ints: Callable[[int], tuple[ir.Value, ir.Value]]
    scales: tuple[ir.Value, ...]
    mins: tuple[ir.Value, ...] | None = None
    paired: bool = False
    joint: Callable[[int], tuple[ir.Value, ir.Value]] | None = None


def emit_blocks(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int) -> Slices:
    """Emit the loads of the scales of `count` adjacent blocks; the integers are emitted as they are asked for.

    count is 1 for formats with blocks of 256, whose 8 slices fill the lanes already.
    """
    if fmt.block == 256:
        return _EMIT_256[fmt.name](e, fmt, address)
    ints, scales_and_mins = _EMIT_32[fmt.name]
    scales, mins = scales_and_mins(e, fmt, address, count)
    return Slices(lambda i: ints(e, fmt, e.at(address, i * fmt.nbytes)), (scales,), mins)


def _signed_halves(e: Emitter, v: ir.Value) -> tuple[ir.Value, ir.Value]:
    low, high = e.halves(v)
    return e.widen(low, I16, True), e.widen(high, I16, True)


def _pairs(e: Emitter, v: ir.Value, signed: bool) -> tuple[ir.Value, ir.Value]:
    """int8 lanes at even and at odd places, as int16."""
    wide, eight = e.b.bitcast(v, vec(I16, v.type.count // 2)), e.const(vec(I16, v.type.count // 2), 8)
    if signed:
        return e.b.ashr(e.b.shl(wide, eight), eight), e.b.ashr(wide, eight)
    return e.and_(wide, 0xFF), e.b.lshr(wide, eight)


def _offset(e: Emitter, codes: ir.Value, offset: int) -> ir.Value:
    return e.b.sub(codes, e.const(codes.type, offset)) if offset else codes


def _lookup(e: Emitter, table: tuple[int, ...], codes: ir.Value) -> ir.Value:
    """table[code] of 16 int8 lanes, int16. LLVM turns this chain of single-lane picks into one byte shuffle."""
    entries = e.const(vec(I8, 16), list(table))
    picked: ir.Value = ir.Constant(vec(I8, 16), ir.Undefined)
    for i in range(16):
        index = e.b.extract_element(codes, ir.Constant(I32, i))
        picked = e.b.insert_element(picked, e.b.extract_element(entries, index), ir.Constant(I32, i))
    return e.widen(picked, I16, True)


def _nibbles_16(e: Emitter, fmt: BlockFormat, address: ir.Value, offset: int) -> tuple[ir.Value, ir.Value]:
    """16 bytes: low nibbles are weights 0..15 of a slice, high nibbles 16..31."""
    raw = e.load(vec(I8, 16), address, offset)
    if fmt.table is not None:
        return _lookup(e, fmt.table, e.and_(raw, 15)), _lookup(e, fmt.table, e.shift_left(raw, -4))
    codes = e.widen(raw, I16, False)
    return _offset(e, e.and_(codes, 15), fmt.offset), _offset(e, e.shift_left(codes, -4), fmt.offset)


def _gather(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int, lane: ir.IntType) -> ir.Value:
    """The first bytes of `count` adjacent blocks, one lane a block."""
    lanes: ir.Value = ir.Constant(vec(lane, count), ir.Undefined)
    for i in range(count):
        lanes = e.b.insert_element(lanes, e.load(lane, address, i * fmt.nbytes), ir.Constant(I32, i))
    return lanes


def _d(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int) -> tuple[ir.Value, None]:
    return e.half_to_float(_gather(e, fmt, address, count, I16)), None


def _d_min(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int) -> tuple[ir.Value, tuple[ir.Value]]:
    both = _gather(e, fmt, address, count, I32)
    d, added = (e.half_to_float(e.b.trunc(part, vec(I16, count))) for part in (both, e.shift_left(both, -16)))
    return d, (e.b.fneg(added),)


def _e8m0(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int) -> tuple[ir.Value, None]:
    # 2^(x-128); x = 0 and 1 are the fp32 denormals 2^-128 and 2^-127.
    x, b = e.widen(_gather(e, fmt, address, count, I8), I32, False), e.b
    normal = e.shift_left(b.sub(x, e.const(x.type, 1)), 23)
    tiny = b.shl(e.const(x.type, 0x00200000), e.and_(x, 1))
    return b.bitcast(
        b.select(b.icmp_unsigned("<", x, e.const(x.type, 2)), tiny, normal), vec(F32, count)
    ), None


def _q4(e: Emitter, fmt: BlockFormat, block: ir.Value) -> tuple[ir.Value, ir.Value]:
    return _nibbles_16(e, fmt, block, fmt.layout["codes"][0])


def _q5(e: Emitter, fmt: BlockFormat, block: ir.Value) -> tuple[ir.Value, ir.Value]:
    raw = e.load(vec(I8, 16), block, fmt.layout["codes"][0])
    low = e.join(e.and_(raw, 15), e.shift_left(raw, -4))
    # Bit j of the 32 is the fifth bit of weight j.
    mask = e.b.bitcast(e.load(I32, block, fmt.layout["high"][0]), vec(I1, 32))
    high = e.b.select(mask, e.const(low.type, 16), e.const(low.type, 0))
    return _signed_halves(e, _offset(e, e.b.or_(low, high), fmt.offset))


def _q8(e: Emitter, fmt: BlockFormat, block: ir.Value) -> tuple[ir.Value, ir.Value]:
    at = fmt.layout["codes"][0]
    low, high = e.load(vec(I8, 16), block, at), e.load(vec(I8, 16), block, at + 16)
    return e.widen(low, I16, True), e.widen(high, I16, True)


def _splat_half(e: Emitter, fmt: BlockFormat, block: ir.Value, field: str) -> ir.Value:
    return e.splat_lane(e.load_halves(1, block, fmt.layout[field][0]), 0, 8)


def _to_scales(e: Emitter, sub: ir.Value, signed: bool, super_scale: ir.Value) -> ir.Value:
    """int8 lanes times the super-scale: fp32, exact."""
    return e.b.fmul(e.to_float(e.widen(sub, I32, signed)), super_scale)


def _scales_16(e: Emitter, sub: ir.Value, signed: bool, super_scale: ir.Value) -> tuple[ir.Value, ir.Value]:
    """16 int8 lanes times the super-scale: two vectors of fp32."""
    low, high = e.halves(sub)
    return _to_scales(e, low, signed, super_scale), _to_scales(e, high, signed, super_scale)


def _six_bit_pairs(e: Emitter, block: ir.Value, at: int) -> tuple[ir.Value, ir.Value]:
    """Q4_K, Q5_K: the 12 bytes of 6-bit sub-scales and minimums as two vectors of 8 bytes; see block_formats.py."""
    first, second, third = (e.load(I32, block, at + 4 * k) for k in range(3))

    def upper(low_bits: ir.Value, top_bits: ir.Value) -> ir.Value:
        return e.b.or_(e.and_(low_bits, 0x0F0F0F0F), e.and_(e.shift_left(top_bits, -2), 0x30303030))

    def eight(low: ir.Value, high: ir.Value) -> ir.Value:
        wide = e.b.or_(e.b.zext(low, I64), e.b.shl(e.b.zext(high, I64), e.i64(32)))
        return e.b.bitcast(wide, vec(I8, 8))

    sc = eight(e.and_(first, 0x3F3F3F3F), upper(third, first))
    mn = eight(e.and_(second, 0x3F3F3F3F), upper(e.shift_left(third, -4), second))
    return sc, mn


def _emit_q4_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    sc, mn = _six_bit_pairs(e, block, fmt.layout["scales"][0])
    codes_at = fmt.layout["codes"][0]
    scales = _to_scales(e, sc, False, _splat_half(e, fmt, block, "d"))
    mins = _to_scales(e, mn, False, _splat_half(e, fmt, block, "dmin"))

    def ints(i: int) -> tuple[ir.Value, ir.Value]:
        # 32 bytes hold slices 2j (low nibbles) and 2j+1 (high nibbles).
        parts = (e.load(vec(I8, 16), block, codes_at + 32 * (i // 2) + 16 * k) for k in (0, 1))
        low, high = (e.widen(part, I16, False) for part in parts)
        if i % 2:
            return e.shift_left(low, -4), e.shift_left(high, -4)
        return e.and_(low, 15), e.and_(high, 15)

    def joint(i: int) -> tuple[ir.Value, ir.Value]:
        shifts = e.const(vec(I16, 32), [0] * 16 + [4] * 16)
        parts = (e.load(vec(I8, 16), block, codes_at + 16 * i + 16 * k) for k in (0, 1))
        low, high = (e.and_(e.b.lshr(e.widen(e.join(part, part), I16, False), shifts), 15) for part in parts)
        return low, high

    return Slices(ints, (scales,), (mins,), joint=joint)


def _emit_q5_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    sc, mn = _six_bit_pairs(e, block, fmt.layout["scales"][0])
    scales = _to_scales(e, sc, False, _splat_half(e, fmt, block, "d"))
    mins = _to_scales(e, mn, False, _splat_half(e, fmt, block, "dmin"))
    high = e.load(vec(I8, 32), block, fmt.layout["high"][0])

    def ints(i: int) -> tuple[ir.Value, ir.Value]:
        raw = e.load(vec(I8, 32), block, fmt.layout["codes"][0] + 32 * (i // 2))
        low = e.shift_left(raw, -4) if i % 2 else e.and_(raw, 15)
        # Bit i of byte j is the fifth bit of weight j of slice i.
        return _pairs(e, e.b.or_(low, e.and_(e.shift_left(high, 4 - i), 16)), False)

    return Slices(ints, (scales,), (mins,), paired=True)


def _emit_q6_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    sub = e.load(vec(I8, 16), block, fmt.layout["scales"][0])

    def ints(i: int) -> tuple[ir.Value, ir.Value]:
        # Half h of the block: nibbles of slices 0 and 2 in its first 32 bytes, of 1 and 3 in the next 32; the upper
        # two bits of slice j in bits 2j of its 32 bytes of planes.
        h, j = divmod(i, 4)
        raw = e.load(vec(I8, 32), block, 64 * h + 32 * (j % 2))
        planes = e.load(vec(I8, 32), block, fmt.layout["high"][0] + 32 * h)
        low = e.shift_left(raw, -4) if j >= 2 else e.and_(raw, 15)
        codes = e.b.or_(low, e.and_(e.shift_left(planes, 4 - 2 * j), 0x30))
        return _pairs(e, _offset(e, codes, fmt.offset), True)

    return Slices(ints, _scales_16(e, sub, True, _splat_half(e, fmt, block, "d")), paired=True)


def _two_bits(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int) -> ir.Value:
    """Q2_K, Q3_K: 32 bytes hold four slices, two bits each."""
    raw = e.load(vec(I8, 32), block, fmt.layout["codes"][0] + 32 * (i // 4))
    return e.and_(e.shift_left(raw, -2 * (i % 4)), 3)


def _emit_q2_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    packed = e.load(vec(I8, 16), block, fmt.layout["scales"][0])
    scales = _scales_16(e, e.and_(packed, 15), False, _splat_half(e, fmt, block, "d"))
    mins = _scales_16(e, e.shift_left(packed, -4), False, _splat_half(e, fmt, block, "dmin"))
    return Slices(lambda i: _pairs(e, _two_bits(e, fmt, block, i), False), scales, mins, paired=True)


def _emit_q3_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    high = e.load(vec(I8, 32), block, fmt.layout["high"][0])
    # Sixteen 6-bit sub-scales: nibbles of 8 bytes (low ones first), upper two bits in planes of 4 bytes.
    at = fmt.layout["scales"][0]
    nibbles, top = e.load(vec(I8, 8), block, at), e.load(vec(I8, 4), block, at + 8)
    low = e.join(e.and_(nibbles, 15), e.shift_left(nibbles, -4))
    planes = [e.and_(e.shift_left(top, 4 - 2 * k), 0x30) for k in range(4)]
    codes = e.b.or_(low, e.join(e.join(*planes[:2]), e.join(*planes[2:])))
    scales = _scales_16(e, _offset(e, codes, 32), True, _splat_half(e, fmt, block, "d"))

    def ints(i: int) -> tuple[ir.Value, ir.Value]:
        third = e.and_(e.shift_left(high, 2 - i), 4)
        return _pairs(e, _offset(e, e.b.or_(_two_bits(e, fmt, block, i), third), fmt.offset), True)

    return Slices(ints, scales, paired=True)


def _emit_iq4_xs(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    # Sub-scale i: nibble i of 4 bytes (low nibble first), upper two bits are bits 2i, 2i+1 of a 16-bit field.
    raw = e.load(vec(I8, 4), block, fmt.layout["scales"][0])
    low = e.pick(e.and_(raw, 15), [0, 4, 1, 5, 2, 6, 3, 7], e.shift_left(raw, -4))
    field = e.splat(e.load(I16, block, fmt.layout["scales_high"][0]), 8)
    top = e.b.lshr(field, e.const(vec(I16, 8), list(range(0, 16, 2))))
    high = e.b.shl(e.and_(top, 3), e.const(vec(I16, 8), 4))
    sub = _offset(e, e.b.or_(e.widen(low, I16, False), high), 32)
    scales = _to_scales(e, sub, True, _splat_half(e, fmt, block, "d"))
    codes_at = fmt.layout["codes"][0]
    return Slices(lambda i: _nibbles_16(e, fmt, block, codes_at + 16 * i), (scales,))


_EMIT_32: Mapping[
    str, tuple[Callable[..., tuple[ir.Value, ir.Value]], Callable[..., tuple[ir.Value, Any]]]
] = {
    "Q4_0": (_q4, _d),
    "Q4_1": (_q4, _d_min),
    "Q5_0": (_q5, _d),
    "Q5_1": (_q5, _d_min),
    "Q8_0": (_q8, _d),
    "IQ4_NL": (_q4, _d),
    "MXFP4": (_q4, _e8m0),
}
_EMIT_256: Mapping[str, Callable[[Emitter, BlockFormat, ir.Value], Slices]] = {
    "Q2_K": _emit_q2_k,
    "Q3_K": _emit_q3_k,
    "Q4_K": _emit_q4_k,
    "Q5_K": _emit_q5_k,
    "Q6_K": _emit_q6_k,
    "IQ4_XS": _emit_iq4_xs,
}
