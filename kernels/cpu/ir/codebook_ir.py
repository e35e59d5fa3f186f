"""The codebook formats, IQ1 to IQ3, as vector code: entries are loaded by index, four or eight weights at a time.

Tables of integers and of sign masks are constants of the object code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from llvmlite import ir

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.codebooks import IQ1_ENTRIES, codebook, even_signs
from quengine.kernels.cpu.ir.vector_ir import I8, I16, I32, I64, Emitter, vec

_CodesOf = Callable[[int, int], ir.Value]


def table_address(e: Emitter, name: str, lane: ir.IntType, values: Iterable[int]) -> ir.Value:
    """The address of a constant array of integers, one for each name in a module."""
    module = e.b.module
    array = module.globals.get(name)
    if array is None:
        content = list(values)
        array = ir.GlobalVariable(module, ir.ArrayType(lane, len(content)), name)
        array.initializer = ir.Constant(array.value_type, content)
        array.global_constant, array.linkage, array.align = True, "internal", 64
    return e.b.ptrtoint(array, I64)


@cache
def _entries(name: str) -> tuple[int, ...]:
    """The integers of each entry as one little-endian word; of IQ1 those of 8g, without the eighth."""
    fmt = FORMATS[name]
    assert fmt.table is not None
    codes = codebook(fmt.book)
    values = torch.tensor(fmt.table, dtype=torch.int8)[codes.int()]
    if fmt.book == "IQ1":
        values = values[:IQ1_ENTRIES] - 1
    return tuple(values.view(torch.int64 if fmt.width == 8 else torch.int32).flatten().tolist())


@cache
def _masks() -> tuple[int, ...]:
    """A byte of ones for each negative weight of eight, by the seven bits of their signs."""
    bits = even_signs(torch.arange(128, dtype=torch.uint8)).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)
    return tuple((-(bits & 1).to(torch.int8)).view(torch.int64).flatten().tolist())


def _looked_up(e: Emitter, address: ir.Value, lane: ir.IntType, indices: Sequence[ir.Value]) -> ir.Value:
    """Elements of a table by i64 indices, side by side: int8 lanes."""
    count = len(indices)
    words: ir.Value = ir.Constant(vec(lane, count), ir.Undefined)
    for i, index in enumerate(indices):
        word = e.load(lane, e.at(address, e.b.mul(index, e.i64(lane.width // 8))))
        words = e.b.insert_element(words, word, ir.Constant(I32, i))
    return e.b.bitcast(words, vec(I8, count * lane.width // 8))


def _field(e: Emitter, word: ir.Value, at: int, bits: int) -> ir.Value:
    """Bits of an i64."""
    return e.and_(e.shift_left(word, -at), (1 << bits) - 1)


def _word(e: Emitter, lane: ir.IntType, block: ir.Value, at: int) -> ir.Value:
    """An unsigned integer at block + at, as i64."""
    word = e.load(lane, block, at)
    return word if lane is I64 else e.b.zext(word, I64)


def _book(e: Emitter, fmt: BlockFormat, indices: Sequence[ir.Value]) -> ir.Value:
    lane = I64 if fmt.width == 8 else I32
    return _looked_up(e, table_address(e, f"book_{fmt.book}", lane, _entries(fmt.name)), lane, indices)


def _seven_bit_masks(e: Emitter, signs: Sequence[ir.Value]) -> ir.Value:
    return _looked_up(e, table_address(e, "sign_masks", I64, _masks()), I64, signs)


def _negated(e: Emitter, ints: ir.Value, mask: ir.Value) -> ir.Value:
    """Lanes whose mask is all ones negated."""
    return e.b.sub(e.b.xor(ints, mask), mask)


def bit_mask(e: Emitter, address: ir.Value, offset: int = 0) -> ir.Value:
    """An int8 lane of ones for each set bit of 32. Not by lanes of one bit, which take LLVM an instruction each."""
    lanes = e.pick(e.load(vec(I8, 4), address, offset), [k // 8 for k in range(32)])
    bits = e.b.and_(lanes, e.const(lanes.type, [1 << k % 8 for k in range(32)]))
    return e.b.sext(e.b.icmp_unsigned("!=", bits, e.const(bits.type, 0)), bits.type)


def _iq2_xxs(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int) -> ir.Value:
    word = _word(e, I64, block, fmt.layout["index"][0] + 8 * i)
    ints = _book(e, fmt, [_field(e, word, 8 * k, 8) for k in range(4)])
    return _negated(e, ints, _seven_bit_masks(e, [_field(e, word, 32 + 7 * k, 7) for k in range(4)]))


def _iq2_xs(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int) -> ir.Value:
    word = _word(e, I64, block, fmt.layout["index"][0] + 8 * i)
    ints = _book(e, fmt, [_field(e, word, 16 * k, 9) for k in range(4)])
    return _negated(e, ints, _seven_bit_masks(e, [_field(e, word, 16 * k + 9, 7) for k in range(4)]))


def _iq2_s(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int) -> ir.Value:
    low = _word(e, I32, block, fmt.layout["index"][0] + 4 * i)
    high = _word(e, I8, block, fmt.layout["high"][0] + i)
    indices = [
        e.b.or_(_field(e, low, 8 * k, 8), e.shift_left(_field(e, high, 2 * k, 2), 8)) for k in range(4)
    ]
    return _negated(e, _book(e, fmt, indices), bit_mask(e, block, fmt.layout["signs"][0] + 4 * i))


def _iq3_xxs(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int) -> ir.Value:
    low = _word(e, I64, block, fmt.layout["index"][0] + 8 * i)
    signs = _word(e, I32, block, fmt.layout["signs"][0] + 4 * i)
    ints = _book(e, fmt, [_field(e, low, 8 * k, 8) for k in range(8)])
    return _negated(e, ints, _seven_bit_masks(e, [_field(e, signs, 7 * k, 7) for k in range(4)]))


def _iq3_s(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int) -> ir.Value:
    # The eight indices as 16-bit lanes, which takes fewer instructions than one by one.
    low = e.widen(e.load(vec(I8, 8), block, fmt.layout["index"][0] + 8 * i), I16, False)
    high = e.splat(e.b.zext(e.load(I8, block, fmt.layout["high"][0] + i), I16), 8)
    upper = e.and_(e.b.mul(high, e.const(low.type, [256 >> k for k in range(8)])), 256)
    words = e.b.bitcast(e.b.or_(low, upper), vec(I64, 2))
    indices = [_field(e, e.lane(words, k // 4), 16 * (k % 4), 16) for k in range(8)]
    return _negated(e, _book(e, fmt, indices), bit_mask(e, block, fmt.layout["signs"][0] + 4 * i))


def _iq1_s(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int) -> ir.Value:
    low = _word(e, I32, block, fmt.layout["index"][0] + 4 * i)
    high = _word(e, I16, block, fmt.layout["high"][0] + 2 * i)
    indices = [
        e.b.or_(_field(e, low, 8 * k, 8), e.shift_left(_field(e, high, 3 * k, 3), 8)) for k in range(4)
    ]
    eighth = e.b.sub(e.i64(1), e.shift_left(_field(e, high, 15, 1), 1))
    return e.b.add(_book(e, fmt, indices), e.splat(e.b.trunc(eighth, I8), 32))


def _iq1_m(e: Emitter, fmt: BlockFormat, block: ir.Value, i: int) -> ir.Value:
    low = _word(e, I32, block, fmt.layout["index"][0] + 4 * i)
    high = _word(e, I16, block, fmt.layout["high"][0] + 2 * i)
    indices = [
        e.b.or_(_field(e, low, 8 * k, 8), e.shift_left(_field(e, high, 4 * k, 3), 8)) for k in range(4)
    ]
    four = vec(I64, 4)
    bits = e.b.and_(e.splat(high, 4), e.const(four, [8 << (4 * k) for k in range(4)]))
    plus, minus = e.const(four, 0x0101010101010101), e.const(four, -1)
    eighths = e.b.select(e.b.icmp_signed("==", bits, e.const(four, 0)), plus, minus)
    return e.b.add(_book(e, fmt, indices), e.b.bitcast(eighths, vec(I8, 32)))


_SLICES = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}


def codebook_slices(e: Emitter, fmt: BlockFormat, block: ir.Value, offset: int) -> _CodesOf:
    """`Slices.codes` of a block: integers plus `offset`."""

    def codes(i: int, n: int) -> ir.Value:
        parts = [_SLICES[fmt.name](e, fmt, block, i + k) for k in range(n)]
        ints = parts[0] if n == 1 else e.join(*parts)
        return e.b.add(ints, e.const(ints.type, offset))

    return codes


def codebook_sub_scales(e: Emitter, fmt: BlockFormat, block: ir.Value) -> ir.Value:
    """The sub-scales 2n + 1 of a block, int8 lanes, one for each group."""
    stored = _stored_sub_scales(e, fmt, block)
    return e.b.or_(e.shift_left(stored, 1), e.const(stored.type, 1))


def _stored_sub_scales(e: Emitter, fmt: BlockFormat, block: ir.Value) -> ir.Value:
    if fmt.name in (
        "IQ2_XXS",
        "IQ3_XXS",
    ):  # the upper 4 bits of words, of which IQ2_XXS has two for each group
        words = e.load(vec(I32, 16 if fmt.width == 8 else 8), block, fmt.layout[_SIGN_WORDS[fmt.name]][0])
        if fmt.width == 8:
            words = e.evens_odds(words)[1]
        return e.b.trunc(e.shift_left(words, -28), vec(I8, 8))
    if fmt.name == "IQ1_S":
        words = e.load(vec(I16, 8), block, fmt.layout["high"][0])
        return e.b.trunc(e.and_(e.shift_left(words, -12), 7), vec(I8, 8))
    if fmt.name == "IQ1_M":
        words = e.pick(e.load(vec(I16, 4), block, fmt.layout["scales"][0]), [i // 4 for i in range(16)])
        fields = e.b.lshr(words, e.const(words.type, [0, 3, 6, 9] * 4))
        return e.b.trunc(e.and_(fields, 7), vec(I8, 16))
    start, stop = fmt.layout["scales"]
    raw = e.load(vec(I8, stop - start), block, start)
    return e.interleave(e.and_(raw, 15), e.shift_left(raw, -4))


_SIGN_WORDS = {"IQ2_XXS": "index", "IQ3_XXS": "signs"}


def split_half(e: Emitter, fmt: BlockFormat, block: ir.Value) -> ir.Value:
    """d of IQ1_M as the bits of an fp16, i16: the upper 4 bits of each of four words."""
    word = e.load(I64, block, fmt.layout["scales"][0])
    parts = [e.b.and_(e.shift_left(word, -12 * (k + 1)), e.i64(15 << (4 * k))) for k in range(4)]
    low, high = e.b.or_(parts[0], parts[1]), e.b.or_(parts[2], parts[3])
    return e.b.trunc(e.b.or_(low, high), I16)
