"""Each block format as vector code: from a block's bytes to slices of 32 codes and their scales.

Dot products and dequantization share one description per format. Byte layouts are in `kernels/block_formats.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from quengine.kernels.block_formats import NVFP4_SCALED, BlockFormat
from quengine.kernels.cpu.ir.codebook_ir import bit_mask, codebook_slices, codebook_sub_scales, split_half
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, Emitter, vec


@dataclass(frozen=True)
class Slices:
    """The contents of a run of blocks, as values in the code being emitted.

    codes(i, n)  n slices (1; or 2 if i is even) from weight 32i of the run on: uint8 lanes in order, a weight's
    integer
                 plus `offset`
    scales       fp32 lanes, one per group in order: w = scale * int - min. Groups of 16 have two vectors, for slices
                 0..3 and 4..7, two lanes a slice; of fewer slices the last lanes are zeros
    mins         the minimums to subtract, in the same form, or None
    multiples    the factors of eight slices' `unshifted` codes over those of `codes`, which take instructions to shift
    """

    codes: Callable[[int, int], ir.Value]
    scales: tuple[ir.Value, ...]
    mins: tuple[ir.Value, ...] | None = None
    offset: int = 0
    unshifted: Callable[[int, int], ir.Value] | None = None
    multiples: tuple[int, ...] = ()

    def ints(self, e: Emitter, i: int, n: int) -> ir.Value:
        """The integers of `codes(i, n)`: int8 lanes."""
        codes = self.codes(i, n)
        return e.b.sub(codes, e.const(codes.type, self.offset)) if self.offset else codes


def emit_blocks(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int) -> Slices:
    """Emits the loads of the scales of `count` adjacent blocks; calling `codes` emits those of the integers.

    count is 1 for formats with blocks of 256, whose 8 slices fill the lanes already.
    """
    if fmt.book:
        return _emit_codebook(e, fmt, address)
    if fmt.block == 256:
        return _EMIT_256[fmt.name](e, fmt, address)
    if fmt.block > 32:
        return _EMIT_LONG[fmt.name](e, fmt, address, count)
    emit_codes, scales_and_mins = _EMIT_32[fmt.name]
    scales, mins = scales_and_mins(e, fmt, address, count)

    def codes(i: int, n: int) -> ir.Value:
        return emit_codes(e, fmt, [e.at(address, (i + k) * fmt.nbytes) for k in range(n)])

    return Slices(codes, (scales,), mins, _code_offset(fmt))


TABLE_OFFSET = 128  # the offset of integers that are stored, or looked up, as signed bytes


def _code_offset(fmt: BlockFormat) -> int:
    return TABLE_OFFSET if fmt.table is not None or fmt.name == "Q8_0" else fmt.offset


def _nibbles(e: Emitter, raw: ir.Value, run: int) -> ir.Value:
    """Codes from bytes given twice: alternating runs of `run` lanes keep the low and the high nibbles."""
    wide = vec(I16, raw.type.count // 2)
    shifts = [4 * (i // (run // 2) % 2) for i in range(wide.count)]
    return e.and_(e.b.bitcast(e.b.lshr(e.b.bitcast(raw, wide), e.const(wide, shifts)), raw.type), 15)


def _nibbles_16(e: Emitter, starts: list[ir.Value], offset: int) -> ir.Value:
    """16 bytes at each address: low nibbles are weights 0..15 of a slice, high nibbles 16..31."""
    twice = [e.join(raw, raw) for raw in (e.load(vec(I8, 16), start, offset) for start in starts)]
    return _nibbles(e, _row(e, twice), 16)


def _row(e: Emitter, vectors: list[ir.Value]) -> ir.Value:
    """Joins one or two vectors."""
    return vectors[0] if len(vectors) == 1 else e.join(*vectors)


def _twice(e: Emitter, v: ir.Value, n: int) -> ir.Value:
    """A vector repeated n (1 or 2) times."""
    return _row(e, [v] * n)


def _shifted(e: Emitter, v: ir.Value, by: list[int]) -> ir.Value:
    """Shifts runs of 32 bytes by `by` bits each, left, or right if negative; bits cross byte borders.

    All amounts have one sign.
    """
    if not any(by):
        return v
    wide = vec(I16, v.type.count // 2)
    amounts = e.const(wide, [abs(bits) for bits in by for _ in range(16)])
    shift = e.b.shl if max(by) > 0 else e.b.lshr
    return e.b.bitcast(shift(e.b.bitcast(v, wide), amounts), v.type)


def lookup(e: Emitter, table: tuple[int, ...], codes: ir.Value) -> ir.Value:
    """table[code] + TABLE_OFFSET of int8 lanes. LLVM turns the 16 single-lane selections into one byte shuffle."""
    if codes.type.count > 16:
        return e.join(*(lookup(e, table, half) for half in e.halves(codes)))
    entries = e.const(vec(I8, 16), [(entry + TABLE_OFFSET) % 256 for entry in table])
    picked: ir.Value = ir.Constant(vec(I8, 16), ir.Undefined)
    for i in range(16):
        index = e.b.extract_element(codes, ir.Constant(I32, i))
        picked = e.b.insert_element(picked, e.b.extract_element(entries, index), ir.Constant(I32, i))
    return picked


def _offset(e: Emitter, codes: ir.Value, offset: int) -> ir.Value:
    return e.b.sub(codes, e.const(codes.type, offset))


def _gather(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int, lane: ir.IntType) -> ir.Value:
    """The first bytes of `count` adjacent blocks, one lane per block."""
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


def _q4(e: Emitter, fmt: BlockFormat, blocks: list[ir.Value]) -> ir.Value:
    codes = _nibbles_16(e, blocks, fmt.layout["codes"][0])
    return codes if fmt.table is None else lookup(e, fmt.table, codes)


def _q5(e: Emitter, fmt: BlockFormat, blocks: list[ir.Value]) -> ir.Value:
    low = _nibbles_16(e, blocks, fmt.layout["codes"][0])
    # Bit j of the field is the fifth bit of weight j.
    masks = [bit_mask(e, block, fmt.layout["high"][0]) for block in blocks]
    return e.b.or_(low, e.and_(_row(e, masks), 16))


def _q8(e: Emitter, fmt: BlockFormat, blocks: list[ir.Value]) -> ir.Value:
    ints = _row(e, [e.load(vec(I8, 32), block, fmt.layout["codes"][0]) for block in blocks])
    return e.b.xor(ints, e.const(ints.type, TABLE_OFFSET))


def _splat_half(e: Emitter, fmt: BlockFormat, block: ir.Value, field: str) -> ir.Value:
    return e.splat_lane(e.load_halves(1, block, fmt.layout[field][0]), 0, 8)


def _to_scales(e: Emitter, sub: ir.Value, signed: bool, super_scale: ir.Value) -> ir.Value:
    """int8 lanes times the super-scale: fp32, exact."""
    return e.b.fmul(e.to_float(e.widen(sub, I32, signed)), super_scale)


def _scales_16(e: Emitter, sub: ir.Value, signed: bool, super_scale: ir.Value) -> tuple[ir.Value, ir.Value]:
    """16 int8 lanes times the super-scale: two vectors of fp32."""
    low, high = e.halves(sub)
    return _to_scales(e, low, signed, super_scale), _to_scales(e, high, signed, super_scale)


def _six_bit_pairs(e: Emitter, block: ir.Value, at: int) -> ir.Value:
    """The 12 bytes of 6-bit sub-scales and minimums of Q4_K and Q5_K as 8 + 8 bytes; see block_formats.py.

    The first four sub-scales are the lower six bits of bytes 0..3, the first four minimums those of bytes 4..7. The
    last four of each take their lower four bits from the nibbles of bytes 8..11 and their upper two from the upper
    two bits of bytes 0..7.
    """
    four = vec(I32, 4)
    words = e.load(four, block, at - 4)  # the first is d and dmin
    six = e.b.lshr(e.pick(words, [1, 1, 2, 2]), e.const(four, [0, 2, 0, 2]))
    nibbles = e.b.lshr(e.pick(words, [3, 3, 3, 3]), e.const(four, [0, 0, 0, 4]))
    six = e.b.and_(six, e.const(four, [0x3F3F3F3F, 0x30303030] * 2))
    nibbles = e.b.and_(nibbles, e.const(four, [0, 0x0F0F0F0F] * 2))
    return e.b.bitcast(e.b.or_(six, nibbles), vec(I8, 16))


def _scales_and_mins(e: Emitter, fmt: BlockFormat, block: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Scales and minimums of Q4_K and Q5_K, computed together, which takes fewer instructions."""
    both = e.load_halves(2, block, fmt.layout["d"][0])  # d and dmin
    sub = _six_bit_pairs(e, block, fmt.layout["scales"][0])
    return e.halves(_to_scales(e, sub, False, e.pick(both, [0] * 8 + [1] * 8)))


def _emit_q4_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    scales, mins = _scales_and_mins(e, fmt, block)
    codes_at = fmt.layout["codes"][0]

    def codes(i: int, n: int) -> ir.Value:
        return _four_bits(e, block, codes_at + 32 * (i // 2), i, n)

    def unshifted(i: int, n: int) -> ir.Value:
        return _masked(e, e.load(vec(I8, 32), block, codes_at + 32 * (i // 2)), 4, i % 2, n)

    return Slices(codes, (scales,), (mins,), unshifted=unshifted, multiples=(1, 16) * 4)


def _masked(e: Emitter, raw: ir.Value, bits: int, i: int, n: int) -> ir.Value:
    """32 bytes, each with a code of `bits` bits of several slices, masked to the codes of n slices from i on,
    unshifted."""
    masks = [(1 << bits) - 1 << bits * (i + k) for k in range(n) for _ in range(32)]
    return e.b.and_(_twice(e, raw, n), e.const(vec(I8, 32 * n), masks))


def _four_bits(e: Emitter, block: ir.Value, at: int, i: int, n: int) -> ir.Value:
    """Slice i, or i and i + 1, of 32 bytes that hold slices 2j in the low and 2j + 1 in the high nibbles."""
    raw = e.load(vec(I8, 32), block, at)
    if n == 1:
        return e.shift_left(raw, -4) if i % 2 else e.and_(raw, 15)
    return _nibbles(e, e.join(raw, raw), 32)


def _emit_q5_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    scales, mins = _scales_and_mins(e, fmt, block)
    high = e.load(vec(I8, 32), block, fmt.layout["high"][0])

    def codes(i: int, n: int) -> ir.Value:
        low = _four_bits(e, block, fmt.layout["codes"][0] + 32 * (i // 2), i, n)
        # Bit i of byte j is the fifth bit of weight j of slice i.
        fifth = _shifted(e, _twice(e, high, n), [4 - i - k for k in range(n)])
        return e.b.or_(low, e.and_(fifth, 16))

    return Slices(codes, (scales,), (mins,))


def _emit_q6_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    sub = e.load(vec(I8, 16), block, fmt.layout["scales"][0])

    def codes(i: int, n: int) -> ir.Value:
        # Half h of the block: nibbles of slices 0 and 2 in its first 32 bytes, of 1 and 3 in the next 32; the upper
        # two bits of slice j in bits 2j of its 32 bytes of planes.
        h, j = divmod(i, 4)
        raw = e.load(vec(I8, 32 * n), block, 64 * h + 32 * (j % 2))
        planes = e.load(vec(I8, 32), block, fmt.layout["high"][0] + 32 * h)
        low = e.shift_left(raw, -4) if j >= 2 else e.and_(raw, 15)
        top = _shifted(e, _twice(e, planes, n), [4 - 2 * (j + k) for k in range(n)])
        return e.b.or_(low, e.and_(top, 0x30))

    scales = _scales_16(e, sub, True, _splat_half(e, fmt, block, "d"))
    return Slices(codes, scales, offset=fmt.offset)


def _two_bits(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int, n: int) -> ir.Value:
    """Slices of Q2_K and Q3_K: 32 bytes hold four slices, two bits each."""
    raw = e.load(vec(I8, 32), block, fmt.layout["codes"][0] + 32 * (i // 4))
    return e.and_(_shifted(e, _twice(e, raw, n), [-2 * ((i + k) % 4) for k in range(n)]), 3)


def _emit_q2_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    packed = e.load(vec(I8, 16), block, fmt.layout["scales"][0])
    scales = _scales_16(e, e.and_(packed, 15), False, _splat_half(e, fmt, block, "d"))
    mins = _scales_16(e, e.shift_left(packed, -4), False, _splat_half(e, fmt, block, "dmin"))

    def unshifted(i: int, n: int) -> ir.Value:
        raw = e.load(vec(I8, 32), block, fmt.layout["codes"][0] + 32 * (i // 4))
        return _masked(e, raw, 2, i % 4, n)

    of_slices = (1, 4, 16, 64) * 2
    return Slices(lambda i, n: _two_bits(e, fmt, block, i, n), scales, mins, 0, unshifted, of_slices)


def _emit_q3_k(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    high = e.load(vec(I8, 32), block, fmt.layout["high"][0])
    # Sixteen 6-bit sub-scales: nibbles of 8 bytes (low ones first), upper two bits in planes of 4 bytes.
    at = fmt.layout["scales"][0]
    nibbles, top = e.load(vec(I8, 8), block, at), e.load(vec(I8, 4), block, at + 8)
    low = e.join(e.and_(nibbles, 15), e.shift_left(nibbles, -4))
    planes = [e.and_(e.shift_left(top, 4 - 2 * k), 0x30) for k in range(4)]
    sub = e.b.or_(low, e.join(e.join(*planes[:2]), e.join(*planes[2:])))
    scales = _scales_16(e, _offset(e, sub, 32), True, _splat_half(e, fmt, block, "d"))

    def codes(i: int, n: int) -> ir.Value:
        third = _shifted(e, _twice(e, high, n), [2 - i - k for k in range(n)])
        return e.b.or_(_two_bits(e, fmt, block, i, n), e.and_(third, 4))

    return Slices(codes, scales, offset=fmt.offset)


def _emit_iq4_xs(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    # Sub-scale i: nibble i of 4 bytes (low nibble first); its upper two bits are bits 2i, 2i+1 of a 16-bit field.
    raw = e.load(vec(I8, 4), block, fmt.layout["scales"][0])
    low = e.pick(e.and_(raw, 15), [0, 4, 1, 5, 2, 6, 3, 7], e.shift_left(raw, -4))
    field = e.splat(e.load(I16, block, fmt.layout["scales_high"][0]), 8)
    top = e.b.lshr(field, e.const(vec(I16, 8), list(range(0, 16, 2))))
    high = e.b.shl(e.and_(top, 3), e.const(vec(I16, 8), 4))
    sub = _offset(e, e.b.or_(e.widen(low, I16, False), high), 32)
    scales = _to_scales(e, sub, True, _splat_half(e, fmt, block, "d"))

    def codes(i: int, n: int) -> ir.Value:
        starts = [e.at(block, 16 * (i + k)) for k in range(n)]
        return _q4(e, fmt, starts)

    return Slices(codes, (scales,), offset=_code_offset(fmt))


def _emit_codebook(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    if "d" in fmt.layout:
        d = _splat_half(e, fmt, block, "d")
    else:
        d = e.splat_lane(e.half_to_float(e.splat(split_half(e, fmt, block), 1)), 0, 8)
    if fmt.unit != 1.0:
        d = e.b.fmul(d, e.const(d.type, fmt.unit))
    sub = codebook_sub_scales(e, fmt, block)
    scales = (_to_scales(e, sub, False, d),) if fmt.group == 32 else _scales_16(e, sub, False, d)
    return Slices(codebook_slices(e, fmt, block, TABLE_OFFSET), scales, offset=TABLE_OFFSET)


def _emit_tq2_0(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    scales = _splat_half(e, fmt, block, "d")
    return Slices(lambda i, n: _two_bits(e, fmt, block, i, n), (scales,), offset=fmt.offset)


def _emit_tq1_0(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    def codes(i: int, n: int) -> ir.Value:
        return _row(e, [_ternary_slice(e, fmt, block, i + k) for k in range(n)])

    return Slices(codes, (_splat_half(e, fmt, block, "d"),), offset=fmt.offset)


def _ternary_slice(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int) -> ir.Value:
    """Slice i of TQ1_0: digit i of the first 32 bytes, or two runs of 16, see `block_formats`."""
    if i < 5:
        return _digit(e, e.load(vec(I8, 32), block, 0), [i] * 32)
    raw = e.load(vec(I8, 16), block, 32)
    if i < 7:
        return _digit(e, e.join(raw, raw), [2 * (i - 5) + k // 16 for k in range(32)])
    last = e.load(vec(I8, 4), block, fmt.layout["high"][0])
    both = e.join(raw, e.pick(last, [k % 4 for k in range(16)]))
    return _digit(e, both, [4] * 16 + [k // 4 for k in range(16)])


def _digit(e: Emitter, raw: ir.Value, digits: list[int]) -> ir.Value:
    """A digit in base 3 of each byte, as a fraction of 256: uint8 lanes."""
    wide = e.widen(raw, I16, False)
    rest = e.and_(e.b.mul(wide, e.const(wide.type, [3**digit for digit in digits])), 255)
    return e.b.trunc(e.shift_left(e.b.mul(rest, e.const(wide.type, 3)), -8), raw.type)


def _long_halves(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int) -> ir.Value:
    """d of blocks of several slices, a lane for each slice."""
    each = fmt.block // 32
    return e.pick(_d(e, fmt, address, count)[0], [i // each for i in range(count * each)])


def _slice_at(e: Emitter, fmt: BlockFormat, address: ir.Value, i: int) -> ir.Value:
    """The address of slice i's codes in a run of blocks of several slices."""
    each = fmt.block // 32
    return e.at(address, i // each * fmt.nbytes + fmt.layout["codes"][0] + i % each * 4 * fmt.bits)


def _emit_q1_0(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int) -> Slices:
    def codes(i: int, n: int) -> ir.Value:
        return e.and_(_row(e, [bit_mask(e, _slice_at(e, fmt, address, i + k)) for k in range(n)]), 2)

    return Slices(codes, (_long_halves(e, fmt, address, count),), offset=1)


def _emit_q2_0(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int) -> Slices:
    def codes(i: int, n: int) -> ir.Value:
        # Each byte has four neighbours: copies of it shifted by 6 bits have one in the low bits of each byte.
        raw = _row(e, [e.load(vec(I8, 8), _slice_at(e, fmt, address, i + k)) for k in range(n)])
        word = e.widen(raw, I32, False)
        twice = e.b.or_(word, e.shift_left(word, 6))
        four = e.and_(e.b.or_(twice, e.shift_left(twice, 12)), 0x03030303)
        return e.b.bitcast(four, vec(I8, 32 * n))

    return Slices(codes, (_long_halves(e, fmt, address, count),), offset=fmt.offset)


def _emit_nvfp4(e: Emitter, fmt: BlockFormat, address: ir.Value, count: int) -> Slices:
    scale_bytes = e.b.bitcast(_gather(e, fmt, address, count, I32), vec(I8, 4 * count))
    lanes = [min(lane, 4 * count) for lane in range(16)]
    low, high = e.halves(_e4m3(e, e.pick(scale_bytes, lanes, e.const(scale_bytes.type, 0))))
    return Slices(_nvfp4_codes(e, fmt, address), (low, high), offset=TABLE_OFFSET)


def _nvfp4_codes(e: Emitter, fmt: BlockFormat, address: ir.Value) -> Callable[[int, int], ir.Value]:
    table = fmt.table or ()
    return lambda i, n: lookup(
        e, table, _row(e, [_sixteen_nibbles(e, fmt, address, i + k) for k in range(n)])
    )


def _emit_nvfp4_scaled(e: Emitter, fmt: BlockFormat, block: ir.Value) -> Slices:
    top = e.splat(e.load(F32, block, fmt.layout["top"][0]), 16)
    scales = e.b.fmul(_e4m3(e, e.load(vec(I8, 16), block, fmt.layout["d"][0])), top)
    return Slices(_nvfp4_codes(e, fmt, block), e.halves(scales), offset=TABLE_OFFSET)


def _sixteen_nibbles(e: Emitter, fmt: BlockFormat, address: ir.Value, i: int) -> ir.Value:
    """Slice i of NVFP4: of each 16 weights, the low nibbles of 8 bytes, then the high ones."""
    start = _slice_at(e, fmt, address, i)
    eights = [e.load(vec(I8, 8), start, at) for at in (0, 8)]
    return _nibbles(e, e.join(*(e.join(eight, eight) for eight in eights)), 8)


def _e4m3(e: Emitter, codes: ir.Value) -> ir.Value:
    """Half of unsigned E4M3 numbers, as `block_formats`: fp32 lanes."""
    low = e.and_(codes, 127)
    value = e.half_to_float(e.shift_left(e.widen(low, I16, False), 7))
    value = e.b.fmul(value, e.const(value.type, 128.0))
    return e.b.select(
        e.b.icmp_unsigned("==", codes, e.const(codes.type, 127)), e.const(value.type, 0.0), value
    )


_EMIT_LONG: Mapping[str, Callable[[Emitter, BlockFormat, ir.Value, int], Slices]] = {
    "NVFP4": _emit_nvfp4,
    "Q1_0": _emit_q1_0,
    "Q2_0": _emit_q2_0,
}
_EMIT_32: Mapping[str, tuple[Callable[..., ir.Value], Callable[..., tuple[ir.Value, Any]]]] = {
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
    NVFP4_SCALED: _emit_nvfp4_scaled,
    "TQ1_0": _emit_tq1_0,
    "TQ2_0": _emit_tq2_0,
}
