"""Each block format as vector code: from the bytes of a block to slices of 32 integers and their scales.

One description per format serves the dot product and the dequantization. It follows the byte layouts of
`kernels/block_formats.py`. Where groups have 16 weights, their integer sub-scale is multiplied into the integers
(at most 13 bits), so that every slice of 32 has one fp32 scale.

Does not know: activations, rows, threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llvmlite import ir

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.vector_ir import F32, I1, I8, I16, I32, I64, Emitter, vec


@dataclass(frozen=True)
class Slices:
    """The contents of a block while code is being written for it.

    ints(i)   weights 32i .. 32i+15 and 32i+16 .. 32i+31 of the block as two int16 vectors of 16
    scales    fp32 lanes, lane i the scale of slice i: w = scale * int - min
    mins      None, or fp32 lanes of the minimums to subtract; two vectors (of weights 0..15 and 16..31 of each
              slice) where groups have 16 weights
    """

    ints: Callable[[int], tuple[ir.Value, ir.Value]]
    scales: ir.Value
    mins: tuple[ir.Value, ...] | None = None


def emit_block(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    """Emit the loads of the scales at address `block`; the integers are emitted as they are asked for."""
    return _EMIT[fmt.name](e, fmt, block)


def _signed_halves(e: Emitter, v: ir.Value) -> tuple[ir.Value, ir.Value]:
    low, high = e.halves(v)
    return e.widen(low, I16, True), e.widen(high, I16, True)


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


def _d_and_min(e: Emitter, fmt: BlockFormat, block: ir.Value) -> tuple[ir.Value, tuple[ir.Value, ...] | None]:
    """One-slice formats: the scale in lane 0 and, where there is one, the minimum to subtract."""
    if not fmt.has_min:
        return e.load_halves(1, block), None
    both = e.load_halves(2, block)
    return e.pick(both, [0]), (e.b.fneg(e.pick(both, [1])),)


def _emit_q4(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    scale, mins = _d_and_min(e, fmt, block)
    return Slices(lambda _: _nibbles_16(e, fmt, block, fmt.layout["codes"][0]), scale, mins)


def _emit_mxfp4(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    # 2^(e-128); e = 0 and 1 are the fp32 denormals 2^-128 and 2^-127.
    exponent = e.b.zext(e.load(I8, block), I32)
    normal = e.b.shl(e.b.sub(exponent, e.const(I32, 1)), e.const(I32, 23))
    tiny = e.b.select(
        e.b.icmp_unsigned("==", exponent, e.const(I32, 0)), e.const(I32, 0x00200000), e.const(I32, 0x00400000)
    )
    bits = e.b.select(e.b.icmp_unsigned("<", exponent, e.const(I32, 2)), tiny, normal)
    return Slices(lambda _: _nibbles_16(e, fmt, block, 1), e.splat(e.b.bitcast(bits, F32), 1))


def _emit_q5(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    scale, mins = _d_and_min(e, fmt, block)

    def ints(_: int) -> tuple[ir.Value, ir.Value]:
        raw = e.load(vec(I8, 16), block, fmt.layout["codes"][0])
        low = e.join(e.and_(raw, 15), e.shift_left(raw, -4))
        # Bit j of the 32 is the fifth bit of weight j.
        mask = e.b.bitcast(e.load(I32, block, fmt.layout["high"][0]), vec(I1, 32))
        high = e.b.select(mask, e.const(low.type, 16), e.const(low.type, 0))
        return _signed_halves(e, _offset(e, e.b.or_(low, high), fmt.offset))

    return Slices(ints, scale, mins)


def _emit_q8_0(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    def ints(_: int) -> tuple[ir.Value, ir.Value]:
        at = fmt.layout["codes"][0]
        low, high = e.load(vec(I8, 16), block, at), e.load(vec(I8, 16), block, at + 16)
        return e.widen(low, I16, True), e.widen(high, I16, True)

    return Slices(ints, e.load_halves(1, block))


def _splat_half(e: Emitter, fmt: BlockFormat, block: ir.Value, field: str, lanes: int = 8) -> ir.Value:
    return e.splat_lane(e.load_halves(1, block, fmt.layout[field][0]), 0, lanes)


def _to_scales(e: Emitter, sub: ir.Value, signed: bool, super_scale: ir.Value) -> ir.Value:
    """int8 lanes times the super-scale: fp32, exact."""
    return e.b.fmul(e.to_float(e.widen(sub, I32, signed)), super_scale)


def _times_sub_scales(
    e: Emitter, sub: ir.Value, i: int, ints: tuple[ir.Value, ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """The two groups of 16 of slice i times their int16 sub-scales (lanes 2i, 2i+1 of `sub`)."""
    low, high = (e.splat_lane(sub, 2 * i + k, 16) for k in (0, 1))
    return e.b.mul(ints[0], low), e.b.mul(ints[1], high)


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

    return Slices(ints, scales, (mins,))


def _emit_q5_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    sc, mn = _six_bit_pairs(e, block, fmt.layout["scales"][0])
    scales = _to_scales(e, sc, False, _splat_half(e, fmt, block, "d"))
    mins = _to_scales(e, mn, False, _splat_half(e, fmt, block, "dmin"))
    high = e.load(vec(I8, 32), block, fmt.layout["high"][0])

    def ints(i: int) -> tuple[ir.Value, ir.Value]:
        raw = e.load(vec(I8, 32), block, fmt.layout["codes"][0] + 32 * (i // 2))
        low = e.shift_left(raw, -4) if i % 2 else e.and_(raw, 15)
        # Bit i of byte j is the fifth bit of weight j of slice i.
        return _signed_halves(e, e.b.or_(low, e.and_(e.shift_left(high, 4 - i), 16)))

    return Slices(ints, scales, (mins,))


def _emit_q6_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    sub = e.widen(e.load(vec(I8, 16), block, fmt.layout["scales"][0]), I16, True)

    def ints(i: int) -> tuple[ir.Value, ir.Value]:
        # Half h of the block: nibbles of slices 0 and 2 in its first 32 bytes, of 1 and 3 in the next 32; the upper
        # two bits of slice j in bits 2j of its 32 bytes of planes.
        h, j = divmod(i, 4)
        raw = e.load(vec(I8, 32), block, 64 * h + 32 * (j % 2))
        planes = e.load(vec(I8, 32), block, fmt.layout["high"][0] + 32 * h)
        low = e.shift_left(raw, -4) if j >= 2 else e.and_(raw, 15)
        codes = e.b.or_(low, e.and_(e.shift_left(planes, 4 - 2 * j), 0x30))
        return _times_sub_scales(e, sub, i, _signed_halves(e, _offset(e, codes, fmt.offset)))

    return Slices(ints, _splat_half(e, fmt, block, "d"))


def _two_bits(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int) -> ir.Value:
    """Q2_K, Q3_K: 32 bytes hold four slices, two bits each."""
    raw = e.load(vec(I8, 32), block, fmt.layout["codes"][0] + 32 * (i // 4))
    return e.and_(e.shift_left(raw, -2 * (i % 4)), 3)


def _emit_q2_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    packed = e.load(vec(I8, 16), block, fmt.layout["scales"][0])
    sub = e.widen(e.and_(packed, 15), I16, False)
    dmin = _splat_half(e, fmt, block, "dmin", 16)
    mins = e.evens_odds(_to_scales(e, e.shift_left(packed, -4), False, dmin))

    def ints(i: int) -> tuple[ir.Value, ir.Value]:
        return _times_sub_scales(e, sub, i, _signed_halves(e, _two_bits(e, fmt, block, i)))

    return Slices(ints, _splat_half(e, fmt, block, "d"), mins)


def _emit_q3_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    high = e.load(vec(I8, 32), block, fmt.layout["high"][0])
    # Sixteen 6-bit sub-scales: nibbles of 8 bytes (low ones first), upper two bits in planes of 4 bytes.
    at = fmt.layout["scales"][0]
    nibbles, top = e.load(vec(I8, 8), block, at), e.load(vec(I8, 4), block, at + 8)
    low = e.join(e.and_(nibbles, 15), e.shift_left(nibbles, -4))
    planes = [e.and_(e.shift_left(top, 4 - 2 * k), 0x30) for k in range(4)]
    codes = e.b.or_(low, e.join(e.join(*planes[:2]), e.join(*planes[2:])))
    sub = e.widen(_offset(e, codes, 32), I16, True)

    def ints(i: int) -> tuple[ir.Value, ir.Value]:
        third = e.and_(e.shift_left(high, 2 - i), 4)
        codes = _offset(e, e.b.or_(_two_bits(e, fmt, block, i), third), fmt.offset)
        return _times_sub_scales(e, sub, i, _signed_halves(e, codes))

    return Slices(ints, _splat_half(e, fmt, block, "d"))


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
    return Slices(lambda i: _nibbles_16(e, fmt, block, codes_at + 16 * i), scales)


_EMIT: Mapping[str, Callable[[Emitter, BlockFormat, ir.Value], Slices]] = {
    "Q4_0": _emit_q4,
    "Q4_1": _emit_q4,
    "Q5_0": _emit_q5,
    "Q5_1": _emit_q5,
    "Q8_0": _emit_q8_0,
    "Q2_K": _emit_q2_k,
    "Q3_K": _emit_q3_k,
    "Q4_K": _emit_q4_k,
    "Q5_K": _emit_q5_k,
    "Q6_K": _emit_q6_k,
    "IQ4_NL": _emit_q4,
    "IQ4_XS": _emit_iq4_xs,
    "MXFP4": _emit_mxfp4,
}
QUANTIZED_FORMATS = tuple(name for name in FORMATS if name in _EMIT)
