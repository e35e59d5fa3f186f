"""The kernel of types whose scale is a formula: kernels/quantize/plain.py, operation for operation, block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from llvmlite import ir

from quengine.kernels.block_formats import FORMATS, MXFP4_TABLE, BlockFormat
from quengine.kernels.cpu.ir.codebook_ir import table_address
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, I64, Emitter, vec
from quengine.kernels.cpu.quantize.lanes import INTS, LANE_BYTES, LANES, Lanes, largest, least, load
from quengine.kernels.cpu.quantize.plain_blocks import PlainBlocksArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def plain_blocks_kernel(format_name: str) -> bytes:
    """One task: all blocks."""
    fmt = FORMATS[format_name]
    weights_bytes, block_bytes = 4 * fmt.block, fmt.nbytes

    def quantize(args: PlainBlocksArguments, _task: int) -> None:
        for block in range(args.blocks):
            _quantize_block(format_name, args.x + block * weights_bytes, args.out + block * block_bytes)

    return compile_kernel(quantize, PlainBlocksArguments)


@vector_code
def _quantize_block(e: Emitter, name: str, x: ir.Value, out: ir.Value) -> None:
    """The block at address x to address out."""
    _BLOCKS[name](e, FORMATS[name], x, out)


def _all_lanes(values: Sequence[Lanes], best: Callable[[Sequence[Lanes]], Lanes]) -> Lanes:
    """The best of all lanes, in every lane."""
    value = best(values)
    for apart in (8, 4, 2, 1):
        others = Lanes(value.e, value.e.pick(value.value, [lane ^ apart for lane in range(LANES)]))
        value = best([value, others])
    return value


def _first_peak(e: Emitter, values: list[Lanes], x: ir.Value) -> Lanes:
    """The first weight of the largest magnitude, in every lane."""
    peak = _all_lanes([each.abs() for each in values], largest)
    bits = e.const(I64, 0)
    for i, each in enumerate(values):
        mask = e.b.zext(e.b.bitcast(each.abs().equals(peak).value, I16), I64)
        bits = e.b.or_(bits, e.shift_left(mask, LANES * i))
    place = e.b.cttz(bits, ir.Constant(ir.IntType(1), 1))
    found = e.load(F32, e.b.add(x, e.b.mul(place, e.i64(4))))
    return Lanes(e, e.splat(found, LANES)) + 0.0


def _store_half(out: ir.Value, offset: int, value: Lanes) -> None:
    e = value.e
    e.store(e.b.trunc(e.lane(value.to_half().value, 0), I16), out, offset)


def _store_bytes(out: ir.Value, offset: int, values: Lanes, lanes: range = range(LANES)) -> None:
    e = values.e
    cut = e.b.trunc(values.value, vec(I8, LANES))
    e.store(e.pick(cut, lanes), out, offset)


def _store_codes(fmt: BlockFormat, out: ir.Value, codes: list[Lanes]) -> None:
    """Codes of 32 weights: four bits of a weight and of the one 16 later in a byte, fifth bits in a field."""
    low, high = codes
    if fmt.bits == 5:
        e = low.e
        fifths = [e.b.bitcast(((code & 16) > 0).value, I16) for code in codes]
        for i, each in enumerate(fifths):
            e.store(each, out, fmt.layout["high"][0] + 2 * i)
    _store_bytes(out, fmt.layout["codes"][0], (low & 15) | ((high & 15) << 4))


def _truncated(value: Lanes, top: int) -> Lanes:
    return value.clamp(0.0, top).to_int()


def _from_peak(e: Emitter, fmt: BlockFormat, x: ir.Value, out: ir.Value) -> None:
    values = [load(e, x, i * LANE_BYTES) for i in range(2)]
    d = _first_peak(e, values, x).by_number(-fmt.offset)
    inverse = d.inverse()
    codes = [_truncated(each * inverse + (fmt.offset + 0.5), 2 * fmt.offset - 1) for each in values]
    _store_half(out, fmt.layout["d"][0], d)
    _store_codes(fmt, out, codes)


def _from_minimum(e: Emitter, fmt: BlockFormat, x: ir.Value, out: ir.Value) -> None:
    values, top = [load(e, x, i * LANE_BYTES) for i in range(2)], (1 << fmt.bits) - 1
    low = _all_lanes(values, least)
    d = (_all_lanes(values, largest) - low).by_number(top)
    inverse = d.inverse()
    codes = [_truncated((each - low) * inverse + 0.5, top) for each in values]
    _store_half(out, fmt.layout["d"][0], d)
    _store_half(out, fmt.layout["min"][0], low)
    _store_codes(fmt, out, codes)


def _nvfp4(e: Emitter, fmt: BlockFormat, x: ir.Value, out: ir.Value) -> None:
    """Four groups of 16 weights, each with a scale in E4M3 that takes the largest magnitude to 6."""
    for group in range(4):
        value = load(e, x, group * LANE_BYTES)
        magnitude = value.abs()
        scale, step = _e4m3(_all_lanes([magnitude], largest).by_number(6))
        best, code = magnitude, Lanes(e, e.const(INTS, 0))
        for each in range(1, 8):
            distance = (step * MXFP4_TABLE[each] - magnitude).abs()
            nearer = distance < best
            code = Lanes(e, e.const(INTS, each)).where(nearer, code)
            best = distance.minimum(best)
        code = code | Lanes(e, e.const(INTS, 8)).where((value < 0.0) & (code > 0), 0)
        low, high = (Lanes(e, e.pick(code.value, range(i, i + 8))) for i in (0, 8))
        packed = e.b.or_(low.value, e.shift_left(high.value, 4))
        e.store(e.b.trunc(packed, vec(I8, 8)), out, fmt.layout["codes"][0] + 8 * group)
        e.store(e.b.trunc(e.lane(scale.value, 0), I8), out, fmt.layout["d"][0] + group)


def _e4m3(value: Lanes) -> tuple[Lanes, Lanes]:
    """The nearest number of unsigned E4M3, and half of it in fp32, as `plain._unsigned_e4m3` and `e4m3_half`."""
    e, bits = value.e, value.bits()
    normal = ((bits + (1 << 19)) >> 20) - ((127 - 7) << 3)
    normal = Lanes(e, e.const(INTS, 0x7E)).where(normal >= 120, normal)
    small = (value * 512.0 + 0.5).minimum(7.0).to_int()
    code = small.where(value < 2.0**-6, normal)
    return code, (code << 7).from_half() * 128.0


def _signed_bytes(e: Emitter, fmt: BlockFormat, x: ir.Value, out: ir.Value) -> None:
    d, codes = _of_largest(e, fmt, x, 127)
    for i, code in enumerate(codes):
        _store_bytes(out, fmt.layout["codes"][0] + LANES * i, code.to_int())
    _store_half(out, fmt.layout["d"][0], d)


def _of_largest(e: Emitter, fmt: BlockFormat, x: ir.Value, top: int) -> tuple[Lanes, list[Lanes]]:
    """d, of which the largest magnitude is `top` times, and the integers of the weights."""
    values = [load(e, x, i * LANE_BYTES) for i in range(fmt.block // LANES)]
    d = _all_lanes([each.abs() for each in values], largest).by_number(top)
    inverse = d.inverse()
    return d, [_half_away(each * inverse) for each in values]


def _digits(e: Emitter, fmt: BlockFormat, x: ir.Value) -> tuple[Lanes, list[Lanes]]:
    """d and the codes 0, 1 and 2 of three values."""
    d, codes = _of_largest(e, fmt, x, 1)
    return d, [code.clamp(-1.0, 1.0).to_int() + 1 for code in codes]


def _tq2_0(e: Emitter, fmt: BlockFormat, x: ir.Value, out: ir.Value) -> None:
    """Codes of 256 weights, two bits each of weights 32 apart in a byte."""
    d, digits = _digits(e, fmt, x)
    for half in (0, 8):
        for i in range(half, half + 2):
            run = digits[i : i + 8 : 2]
            packed = run[0] | (run[1] << 2) | (run[2] << 4) | (run[3] << 6)
            _store_bytes(out, fmt.layout["codes"][0] + 4 * half + LANES * (i - half), packed)
    _store_half(out, fmt.layout["d"][0], d)


def _tq1_0(e: Emitter, fmt: BlockFormat, x: ir.Value, out: ir.Value) -> None:
    """Codes of 256 weights, five or four digits in base 3 a byte."""
    d, digits = _digits(e, fmt, x)
    places = ((0, digits[0:10:2]), (16, digits[1:10:2]), (32, digits[10:15]))
    for offset, run in places:
        _store_bytes(out, fmt.layout["codes"][0] + offset, _fraction(run))
    last = digits[15]
    fours = [
        Lanes(e, e.pick(last.value, [(4 * i + lane) % LANES for lane in range(LANES)])) for i in range(4)
    ]
    _store_bytes(out, fmt.layout["high"][0], _fraction(fours), range(4))
    _store_half(out, fmt.layout["d"][0], d)


def _q2_0(e: Emitter, fmt: BlockFormat, x: ir.Value, out: ir.Value) -> None:
    """Codes of 64 weights, two bits each of four neighbours in a byte."""
    d, digits = _digits(e, fmt, x)
    shifts = e.const(INTS, [2 * (lane % 4) for lane in range(LANES)])
    for i, digit in enumerate(digits):
        bits = Lanes(e, e.b.shl(digit.value, shifts))
        for apart in (1, 2):
            bits = bits | Lanes(e, e.pick(bits.value, [lane ^ apart for lane in range(LANES)]))
        _store_bytes(out, fmt.layout["codes"][0] + 4 * i, bits, range(0, LANES, 4))
    _store_half(out, fmt.layout["d"][0], d)


def _q1_0(e: Emitter, fmt: BlockFormat, x: ir.Value, out: ir.Value) -> None:
    """A bit of each of 128 weights; d is the mean magnitude, its sum in the order of the weights."""
    total = e.const(F32, 0.0)
    for i in range(fmt.block // LANES):
        value = load(e, x, i * LANE_BYTES)
        e.store(e.b.bitcast((value >= 0.0).value, I16), out, fmt.layout["codes"][0] + 2 * i)
        magnitude = value.abs().value
        for lane in range(LANES):
            total = e.b.fadd(total, e.lane(magnitude, lane))
    _store_half(out, fmt.layout["d"][0], Lanes(e, e.splat(total, LANES)).by_number(fmt.block))


def _mxfp4(e: Emitter, fmt: BlockFormat, x: ir.Value, out: ir.Value) -> None:
    values = [load(e, x, i * LANE_BYTES) for i in range(2)]
    peak = e.lane(_all_lanes([each.abs() for each in values], largest).bits().value, 0)
    binade = e.b.lshr(peak, e.const(I32, 23))
    table = table_address(e, "rounded up", I32, _rounded_up())
    limit = e.load(I32, e.b.add(table, e.b.mul(e.b.zext(binade, I64), e.i64(4))))
    exponent = e.b.add(binade, e.b.zext(e.b.icmp_signed(">=", peak, limit), I32))
    exponent = e.b.sub(exponent, e.const(I32, 2))
    exponent = e.b.select(e.b.icmp_signed(">", exponent, e.const(I32, 0)), exponent, e.const(I32, 0))
    tiny = e.b.shl(e.const(I32, 0x00200000), exponent)
    normal = e.b.shl(e.b.sub(exponent, e.const(I32, 1)), e.const(I32, 23))
    scale = e.b.select(e.b.icmp_signed("<", exponent, e.const(I32, 2)), tiny, normal)
    step = e.splat(e.b.bitcast(scale, F32), LANES)
    codes = [_e2m1(each, Lanes(e, e.b.fdiv(each.abs().value, step))) for each in values]
    e.store(e.b.trunc(exponent, I8), out, fmt.layout["d"][0])
    _store_bytes(out, fmt.layout["codes"][0], codes[0] | (codes[1] << 4))


def _rounded_up() -> list[int]:
    """Of each binade of fp32 the bits of the first number whose logarithm is rounded to the next integer."""
    limits = []
    for binade in range(256):
        bits = torch.arange((binade << 23) + (1 << 23) - 256, (binade << 23) + (1 << 23), dtype=torch.int32)
        whole = bits.view(torch.float32).double().log2().float().floor()
        up = bits[whole > binade - 127]
        limits.append(int(up[0]) if len(up) and 0 < binade < 255 else (1 << 31) - 1)
    return limits


def _e2m1(value: Lanes, ratio: Lanes) -> Lanes:
    """The code nearest to a magnitude in units of the scale, of two that are as near the lower one, with its sign."""
    e, code = value.e, Lanes(value.e, value.e.const(INTS, 0))
    doubled = ratio * 2.0
    for i in range(1, 8):
        middle = float(MXFP4_TABLE[i - 1] + MXFP4_TABLE[i])
        code = Lanes(e, e.const(INTS, i)).where(doubled > middle, code)
    return code | Lanes(e, e.const(INTS, 8)).where((value < 0.0) & (code > 0), 0)


def _fraction(digits: Sequence[Lanes]) -> Lanes:
    """Digits in base 3 as a byte: the least of which byte/256 begins with them."""
    value = digits[0] * 81
    for i, digit in enumerate(digits[1:]):
        value = value + digit * 3 ** (3 - i)
    total = value * 256 + 242
    return Lanes(total.e, total.e.b.udiv(total.value, total.e.const(INTS, 243)))


def _half_away(ratio: Lanes) -> Lanes:
    """The nearest whole number, halves away from zero."""
    magnitude = ratio.abs()
    whole = magnitude.floor()
    whole = whole + ((magnitude - whole) * 2.0).floor()
    return (-whole).where(ratio < 0.0, whole)


_Block = Callable[[Emitter, BlockFormat, ir.Value, ir.Value], None]
_BLOCKS: Mapping[str, _Block] = MappingProxyType(
    {
        "Q4_0": _from_peak,
        "Q5_0": _from_peak,
        "Q4_1": _from_minimum,
        "Q5_1": _from_minimum,
        "MXFP4": _mxfp4,
        "NVFP4": _nvfp4,
        "Q1_0": _q1_0,
        "Q2_0": _q2_0,
        "Q8_0": _signed_bytes,
        "TQ1_0": _tq1_0,
        "TQ2_0": _tq2_0,
    }
)
