"""Device functions that read packed planes in the order of the matrix instructions, shared by the matmul kernels.

Every tensor has one element per thread. `FMT` is the PackedLayout of the matrix. A chunk is loaded as one tuple of
words, so that a kernel can issue the loads long before it uses them:
 low words (int64), high words, then scale words, then the word of super-scales; at the end of a codebook format's words
 stands the address of the codebook.
"""

import struct
from collections.abc import Iterable

import triton
import triton.language as tl

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.codebooks import IQ1_TABLE, IQ2_TABLE
from quengine.kernels.cuda.gemm.mma import byte_permute, in_register, load_entry
from quengine.kernels.cuda.weights import layout


def _int32s(values: Iterable[int]) -> tuple[int, ...]:
    """int8 values, four to an int32."""
    content = bytes(value & 255 for value in values)
    return struct.unpack(f"<{len(content) // 4}i", content)


_TABLES = [FORMATS[name].table or () for name in layout.TABLE_NAMES[1:]]
_TABLE_WORDS = tl.constexpr(((), *map(_int32s, _TABLES)))
"""The sixteen int8 entries of each table, four per int32."""
_TABLE_SIZES = tl.constexpr(((), *(_int32s(map(abs, table)) for table in _TABLES)))
"""Their absolute values: the first eight entries of a table have one sign, the last eight the other."""
_TOP_BITS = tl.constexpr(0xBA98)
"""The selector of `byte_permute` that repeats the top bit of each byte in the whole byte."""
_BOOK_WORDS = tl.constexpr(((), _int32s(IQ1_TABLE), _int32s(IQ2_TABLE)))
"""The integers of codebooks of few magnitudes: both signs fit a byte permutation."""

# layout.ScaleKind, as compile-time constants.
_BYTE = tl.constexpr(3)
_BYTE_MIN = tl.constexpr(4)
_NIBBLE_MIN = tl.constexpr(5)
_SIX = tl.constexpr(6)
_HALF = tl.constexpr(0)
_HALF_MIN = tl.constexpr(1)
_E8M0 = tl.constexpr(2)
_E4M3 = tl.constexpr(7)
_FREE = tl.constexpr(8)
_NIBBLE = tl.constexpr(9)
_NIBBLE_HIGH = tl.constexpr(10)
_HIGH_NIBBLE = tl.constexpr(11)
_IN_CODES = tl.constexpr(12)
_THREE = tl.constexpr(13)

_E4M3_UNIT = tl.constexpr(128.0)
"""E4M3's bits, moved to an fp16's, are a number's value / 256. Times this, they are half of it: E2M1's table is
doubled."""

# layout.Book.
_IQ1 = tl.constexpr(1)
_IQ2 = tl.constexpr(2)
_IQ3 = tl.constexpr(3)


LANE_COLUMNS = tl.constexpr(layout.LANE_COLUMNS)


UPPER_SIGN = tl.constexpr((0, 1, -1, -1, -1))
"""The sign of entries 8 to 15 of a table; entries 0 to 7 have the opposite one."""


@triton.constexpr_function
def step_column(step: int) -> int:
    """The distance of lane q's columns of a step from its first column in a chunk, LANE_COLUMNS * q."""
    return step // 4 * layout.BLOCK_COLUMNS + step % 4 * 8


@triton.jit
def _pointer(base, dtype: tl.constexpr):
    return base.to(tl.pointer_type(dtype), bitcast=True)


@triton.constexpr_function
def _powers(count: int) -> tuple[int, ...]:
    """The powers of two that sum to `count`, the largest first."""
    return tuple(1 << bit for bit in range(count.bit_length() - 1, -1, -1) if count >> bit & 1)


@triton.constexpr_function
def stored_words(FMT: layout.PackedLayout) -> tuple[int, ...]:
    """Words that a lane reads per chunk from each of `stored_planes`: powers of two."""
    high = (FMT.steps * FMT.high // 2,) if FMT.high else ()
    kind, kinds = FMT.scales, layout.ScaleKind
    scales: tuple[int, ...] = (FMT.sets if kind == kinds.HALF_MIN else 1,)
    if kind in (kinds.SIX, kinds.HIGH_NIBBLE, kinds.THREE):
        scales = (1, 1)
    elif kind in (kinds.FREE, kinds.IN_CODES):
        scales = ()
    return *_powers(FMT.low_words), *high, *scales, *((1,) if FMT.super_bytes else ())


@triton.jit
def stored_planes(planes, chunk, ON: tl.constexpr, lane, FMT: tl.constexpr):
    """Pointers to a lane's words of chunk `chunk + ON`, as stored: of the low plane (in parts of
    `stored_words` words), the high plane, the scales (of some kinds in two parts, of others none) and the
    super-scales, if any. Each points to its first word, of 8, 4 or 2 bytes; the next word is 32 words on.
    """
    firsts = ()
    LOW: tl.constexpr = FMT.low_words * 32
    PARTS: tl.constexpr = _powers(FMT.low_words)
    low = _pointer(planes[0], tl.int64) + (chunk * LOW + lane) + ON * LOW
    for part in tl.static_range(len(PARTS)):
        firsts = firsts + (low,)
        low += PARTS[part] * 32
    if FMT.high > 0:
        HIGH: tl.constexpr = FMT.steps * FMT.high // 2 * 32
        firsts = firsts + (_pointer(planes[1], tl.int32) + (chunk * HIGH + lane) + ON * HIGH,)
    if FMT.scales == _SIX or FMT.scales == _HIGH_NIBBLE:
        firsts = firsts + (_pointer(planes[2], tl.int32) + (chunk * 48 + lane) + ON * 48,)
        firsts = firsts + (_pointer(planes[2], tl.int16) + (chunk * 96 + lane) + (ON * 96 + 64),)
    elif FMT.scales == _THREE:
        firsts = firsts + (_pointer(planes[2], tl.int16) + (chunk * 48 + lane) + ON * 48,)
        firsts = firsts + (_pointer(planes[2], tl.int8) + (chunk * 96 + lane) + (ON * 96 + 64),)
    elif FMT.scale_bytes > 0:
        LANES: tl.constexpr = 32 >> FMT.share
        WIDE: tl.constexpr = FMT.scales == _HALF_MIN or FMT.scale_bytes == 8 * LANES
        SCALE_WORD: tl.constexpr = (
            tl.int64 if WIDE else tl.int32 if FMT.scale_bytes == 4 * LANES else tl.int16
        )
        SCALES: tl.constexpr = 32 * FMT.sets if FMT.scales == _HALF_MIN else LANES
        place = (lane >> FMT.share) if FMT.share > 0 else lane
        firsts = firsts + (_pointer(planes[2], SCALE_WORD) + (chunk * SCALES + place) + ON * SCALES,)
    if FMT.super_bytes > 0:
        SUPER_WORD: tl.constexpr = tl.int64 if FMT.super_bytes == 64 else tl.int32
        firsts = firsts + (_pointer(planes[3], SUPER_WORD) + (chunk * 8 + (lane >> 2)) + ON * 8,)
    return firsts


@triton.jit
def chunk_words(stored, FMT: tl.constexpr):
    """The words of a chunk, from a lane's loads of `stored_planes`."""
    BEFORE: tl.constexpr = FMT.code_words
    SETS: tl.constexpr = FMT.sets
    words = ()
    for i in tl.static_range(BEFORE):
        words = words + (stored[i],)
    if FMT.scales == _HALF_MIN:
        for s in tl.static_range(SETS):
            words = words + (stored[BEFORE + s].to(tl.int32), (stored[BEFORE + s] >> 32).to(tl.int32))
    elif FMT.scales == _SIX:
        words = words + (stored[BEFORE], stored[BEFORE + 1].to(tl.int32))
    elif FMT.scales == _NIBBLE:
        words = words + (stored[BEFORE],)
    elif FMT.scales == _NIBBLE_HIGH:
        words = words + (stored[BEFORE].to(tl.int32), (stored[BEFORE] >> 32).to(tl.int32))
    elif FMT.scales == _HIGH_NIBBLE:
        words = words + (stored[BEFORE + 1].to(tl.int32), stored[BEFORE])
    elif FMT.scales == _THREE:
        words = words + ((stored[BEFORE].to(tl.int32) & 0xFFFF) | (stored[BEFORE + 1].to(tl.int32) << 16),)
    elif FMT.one_scale:
        words = words + (stored[BEFORE],)
    elif FMT.scales == _E4M3:
        words = words + (stored[BEFORE].to(tl.int32),)
        if SETS == 4:
            words = words + ((stored[BEFORE] >> 32).to(tl.int32),)
    elif FMT.scale_bytes > 0:
        SET_BITS: tl.constexpr = 8 * FMT.scale_bytes // ((32 >> FMT.share) * SETS)
        if SET_BITS * SETS == 16:
            words = words + (stored[BEFORE].to(tl.int32),)
        else:
            for s in tl.static_range(SETS):
                words = words + ((stored[BEFORE] >> (SET_BITS * s)).to(tl.int32),)
    if FMT.super_bytes > 0:
        words = words + (stored[len(stored) - 1],)
    return words


@triton.jit
def _read_words(first, valid, COUNT: tl.constexpr, MASKED: tl.constexpr):
    words = ()
    for i in tl.static_range(COUNT):
        if MASKED:
            words = words + (tl.load(first + i * 32, mask=valid, other=0),)
        else:
            words = words + (tl.load(first + i * 32),)
    return words


@triton.jit
def load_words(planes, chunk, ON: tl.constexpr, lane, valid, FMT: tl.constexpr, MASKED: tl.constexpr):
    """Loads one lane's words of chunk `chunk + ON`, counted over the whole matrix, tiles outermost: low words, high
    words, the scale words of each set as int32 (two per set for HALF_MIN, two in all for SIX), the super-scale word.

    `planes`: pointers of the low, high, scale and super-scale planes. ON is separate from `chunk` because a constant
    offset from a pointer costs no instruction.
    """
    firsts = stored_planes(planes, chunk, ON, lane, FMT)
    WORDS: tl.constexpr = stored_words(FMT)
    stored = ()
    for plane in tl.static_range(len(WORDS)):
        stored = stored + _read_words(firsts[plane], valid, WORDS[plane], MASKED)
    return chunk_words(stored, FMT)


@triton.jit
def load_chunk(planes, chunk, ON: tl.constexpr, lane, valid, FMT: tl.constexpr, MASKED: tl.constexpr):
    """`load_words`, then the codebook, if the format has one: what decodes a chunk. Parameters: see `load_words`."""
    return with_book(load_words(planes, chunk, ON, lane, valid, FMT, MASKED), planes[1], FMT)


@triton.jit
def with_book(words, book, FMT: tl.constexpr):
    """The words of a chunk, and the codebook, if the format has one: a pointer, or an address in shared memory."""
    if FMT.book > 0:
        if book.dtype.is_ptr():
            words = words + (_pointer(book, tl.int32),)
        else:
            words = words + (book,)
    return words


@triton.jit
def _shift(word, by: tl.constexpr):
    """word << by, or a right shift if `by` is negative."""
    if by > 0:
        word = word << by
    elif by < 0:
        word = word >> (0 - by)
    return word


@triton.jit
def _field(word, first: tl.constexpr, bits: tl.constexpr, to: tl.constexpr):
    """Bits first .. first + bits - 1 of an int32 or int64, moved to bit `to` of an int32."""
    return _shift(word, to - first).to(tl.int32) & (((1 << bits) - 1) << to)


@triton.jit
def half_bits(word):
    """The fp16 in the low half of an int32, as fp32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def super_scales(words, FMT: tl.constexpr):
    """The super-scales of a chunk, (d of rh 0, dmin of rh 0, d of rh 1, dmin of rh 1), to multiply
    `set_scales`; ones and zeros for formats without.
    """
    if FMT.scales == _E4M3 and FMT.super_bytes > 0:
        wide = words[len(words) - 1]
        near = wide.to(tl.int32).to(tl.float32, bitcast=True)
        far = (wide >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        return near * _E4M3_UNIT, 0.0, far * _E4M3_UNIT, 0.0
    elif FMT.scales == _E4M3:
        return _E4M3_UNIT, 0.0, _E4M3_UNIT, 0.0
    elif FMT.book > 0:
        both = words[len(words) - 2]
        return half_bits(both) * FMT.unit, 0.0, half_bits(both >> 16) * FMT.unit, 0.0
    elif FMT.super_bytes == 64:
        wide = words[len(words) - 1]
        near = wide.to(tl.int32)
        far = (wide >> 32).to(tl.int32)
        d0, m0, d1, m1 = half_bits(near), half_bits(near >> 16), half_bits(far), half_bits(far >> 16)
        if FMT.scales == _NIBBLE_MIN:
            m0, d1, m1 = m0 / 16.0, d1 / 256.0, m1 / 4096.0
        return d0, m0, d1, m1
    elif FMT.super_bytes == 32:
        both = words[len(words) - 1]
        return half_bits(both), 0.0, half_bits(both >> 16), 0.0
    else:
        return 1.0, 0.0, 1.0, 0.0


@triton.jit
def e8m0(byte):
    """2^(byte - 128): MXFP4's exponent scale, halved because its table is doubled."""
    bits = tl.where(byte < 2, 0x00200000 << (byte & 1), (byte - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _run_bits(words, run: tl.constexpr, FMT: tl.constexpr):
    """The signs of a run of 32 columns as stored, 16 bits of IQ1: int32. See `layout.Book`."""
    if FMT.book == _IQ2:
        bits = (words[run] >> 32).to(tl.int32)
    elif FMT.book == _IQ3:
        bits = (words[4 + run // 2] >> (32 * (run % 2))).to(tl.int32)
    else:
        bits = (words[2] >> (16 * run)).to(tl.int32) & 0xFFFF
    return bits


@triton.jit
def _book_scale(words, s: tl.constexpr, rh: tl.constexpr, FMT: tl.constexpr):
    """The sub-scale of set s of a codebook format, for rows r + 8 * rh."""
    BITS: tl.constexpr = 3 if FMT.book == _IQ1 else 4
    IN_RUN: tl.constexpr = FMT.scales == _FREE or FMT.scales == _IN_CODES
    AT: tl.constexpr = (0 if FMT.scales == _FREE else 12) if IN_RUN else BITS * (2 * s + rh)
    if IN_RUN:
        word = _run_bits(words, 2 * s + rh, FMT)
    else:
        word = words[FMT.code_words]
    # Converted in place, as an unsigned number times a power of two.
    field = word.to(tl.uint32, bitcast=True) & (((1 << BITS) - 1) << AT)
    return tl.fma(field.to(tl.float32), 2.0 / (1 << AT), 1.0)


@triton.jit
def _signed_byte(word, at: tl.constexpr):
    return ((word << (24 - at)) >> 24).to(tl.float32)


@triton.jit
def _unsigned(word, at: tl.constexpr):
    return ((word >> at) & 255).to(tl.float32)


@triton.jit
def _six_bits(words, field: tl.constexpr, BASE: tl.constexpr):
    """Sub-scale number `field` of ScaleKind.SIX. Fields are converted in place, scaled by a power of two
    instead of shifted.
    """
    AT: tl.constexpr = 6 * (field % 5) if field < 7 else 0
    if field < 7:
        bits = words[BASE + field // 5] & (63 << AT)
    else:
        bits = ((words[BASE] >> 30) & 3) | ((words[BASE + 1] >> 10) & 60)
    return tl.fma(bits.to(tl.float32), 1.0 / (1 << AT), -32.0)


@triton.jit
def set_scales(words, s: tl.constexpr, FMT: tl.constexpr):
    """(scale of rh 0, minimum of rh 0, scale of rh 1, minimum of rh 1) of set s, without the super-scales.
    Nibbles are converted in place, which multiplies them by 1, 16, 256 and 4096; the super-scales undo it.
    """
    BASE: tl.constexpr = FMT.code_words
    if FMT.scales == _HALF_MIN:
        d = words[BASE + 2 * s]
        m = words[BASE + 2 * s + 1]
        return half_bits(d), half_bits(m), half_bits(d >> 16), half_bits(m >> 16)
    elif FMT.scales == _SIX:
        return _six_bits(words, 2 * s, BASE), 0.0, _six_bits(words, 2 * s + 1, BASE), 0.0
    elif FMT.book > 0:
        return _book_scale(words, s, 0, FMT), 0.0, _book_scale(words, s, 1, FMT), 0.0
    elif FMT.scales == _HALF:
        word = words[BASE + (0 if FMT.one_scale else s)]
        near, far = half_bits(word), half_bits(word >> 16)
        if FMT.has_min:
            return near * FMT.unit, near, far * FMT.unit, far
        else:  # Triton compiles what follows a return, too
            return near, 0.0, far, 0.0
    elif FMT.scales == _E4M3:
        # Moved to the bits of an fp16; bit 7 means nothing.
        word = words[BASE + s // 2]
        near = half_bits(_field(word, 16 * (s % 2), 7, 7))
        return near, 0.0, half_bits(_field(word, 16 * (s % 2) + 8, 7, 7)), 0.0
    elif FMT.scales == _E8M0:
        return e8m0(words[BASE + s] & 255), 0.0, e8m0((words[BASE + s] >> 8) & 255), 0.0
    elif FMT.scales == _BYTE:
        return _signed_byte(words[BASE + s], 0), 0.0, _signed_byte(words[BASE + s], 8), 0.0
    elif FMT.scales == _BYTE_MIN:
        return (
            _unsigned(words[BASE + s], 0),
            _unsigned(words[BASE + s], 8),
            _unsigned(words[BASE + s], 16),
            _unsigned(words[BASE + s], 24),
        )
    else:
        word = words[BASE + s]
        near, far = (word & 0xF).to(tl.float32), (word & 0xF00).to(tl.float32)
        return near, (word & 0xF0).to(tl.float32), far, (word & 0xF000).to(tl.float32)


@triton.jit
def chunk_scales(words, s: tl.constexpr, weight_scale, FMT: tl.constexpr, UP: tl.constexpr = 1.0):
    """Scales, times UP, and minimums of set s, with super-scales and weight_scale, for codes as of `step_codes`."""
    d0, dm0, d1, dm1 = super_scales(words, FMT)
    s0, m0, s1, m1 = set_scales(words, s, FMT)
    # Powers of two do not round; multiplied into the super-scales, which all sets share, they cost little.
    near = s0 * (d0 * (weight_scale * (UP / (1 << FMT.near_shift))))
    far = s1 * (d1 * (weight_scale * (UP / (1 << FMT.far_shift))))
    if not FMT.has_min:
        near_min = (words[0] & 0).to(tl.float32)
        far_min = (words[0] & 0).to(tl.float32)
    elif FMT.super_bytes == 0:
        near_min = m0 * weight_scale
        far_min = m1 * weight_scale
    else:
        near_min = m0 * (dm0 * weight_scale)
        far_min = m1 * (dm1 * weight_scale)
    return near, near_min, far, far_min


@triton.constexpr_function
def _repeat(byte: int) -> int:
    """A byte repeated in all four bytes of an int32."""
    word = (byte & 255) * 0x01010101
    return word - (1 << 32) if word >= 1 << 31 else word


@triton.constexpr_function
def _piece(bits: int, step: int, code: int, number: int, field: int) -> int:
    """A field of a piece (layout.CODE_PIECES) of code word `code` (of four) of a step; its int32 word is
    counted from the chunk's first.
    """
    pieces = layout.CODE_PIECES[bits]
    steps = len(pieces) // 4
    before = step // steps * (steps * bits // 2) if field == 0 else 0
    return before + pieces[step % steps * 4 + code][number][field]


@triton.constexpr_function
def _piece_count(bits: int, step: int, code: int) -> int:
    pieces = layout.CODE_PIECES[bits]
    return len(pieces[step % (len(pieces) // 4) * 4 + code])


@triton.constexpr_function
def dot_shift(fmt: layout.PackedLayout, step: int, rh: int) -> int:
    """The left shift of a step's codes within their bytes, as `dot_codes` returns them, for rows r + 8 * rh."""
    if fmt.low == 2:
        if fmt.group == 32:  # four steps of a set stand in different bits
            return 0
        return int(layout.CODE_PIECES[2][step % 4 * 4 + rh][0][1])
    return fmt.far_shift if rh else fmt.near_shift


@triton.jit
def _read_piece(
    words, i: tl.constexpr, j: tl.constexpr, n: tl.constexpr, up: tl.constexpr, FMT: tl.constexpr
):
    WORD: tl.constexpr = _piece(FMT.low, i, j, n, 0)
    TO: tl.constexpr = up + _piece(FMT.low, i, j, n, 3)
    BY: tl.constexpr = TO - _piece(FMT.low, i, j, n, 1)
    MASK: tl.constexpr = _repeat(((1 << _piece(FMT.low, i, j, n, 2)) - 1) << TO)
    word = words[WORD // 2]
    if WORD % 2 == 1:
        word >>= 32
    return _shift(word.to(tl.int32), BY) & MASK


@triton.jit
def _from_pieces(words, i: tl.constexpr, j: tl.constexpr, up: tl.constexpr, FMT: tl.constexpr):
    """Code word j of step i, with its codes shifted left by `up`."""
    code = _read_piece(words, i, j, 0, up, FMT)
    COUNT: tl.constexpr = _piece_count(FMT.low, i, j)
    for n in tl.static_range(1, COUNT):
        code |= _read_piece(words, i, j, n, up, FMT)
    return code


@triton.jit
def _with_high(code, words, i: tl.constexpr, j: tl.constexpr, up: tl.constexpr, FMT: tl.constexpr):
    """`code` with the high bit of code word j (of four) of step i, above its low bits."""
    if FMT.high > 0:
        BASE: tl.constexpr = FMT.low_words
        AT: tl.constexpr = up + FMT.low
        code |= _shift(words[BASE + i // 2], AT - (4 * (i % 2) + j)) & _repeat(1 << AT)
    return code


@triton.jit
def _entry_offset(words, run: tl.constexpr, entry: tl.constexpr, FMT: tl.constexpr):
    """Four times the index number `entry` (of four; of IQ3, eight) of a run of 32 columns: the entry's first byte. See
    `layout.Book`.
    """
    if FMT.book == _IQ1:
        bits = _run_bits(words, run, FMT)
        offset = _field(words[run // 2], 32 * (run % 2) + 8 * entry, 8, 2)
        if FMT.scales == _IN_CODES:
            offset |= _field(bits, 3 * entry, 3, 10)
            offset |= _field(bits, 15, 1, 13)
        else:
            offset |= _field(bits, 4 * entry, 4, 10)
    elif FMT.book == _IQ2:
        offset = _field(words[run], FMT.index_bits * entry, FMT.index_bits, 2)
        if FMT.scales == _NIBBLE_HIGH:
            offset |= _field(words[FMT.code_words + 1], 8 * run + 2 * entry, 2, 10)
    else:
        offset = _field(words[run], 8 * entry, 8, 2)
        if FMT.scales == _HIGH_NIBBLE:
            offset |= _field(words[FMT.code_words + 1], 8 * run + entry, 1, 10)
    return offset


@triton.jit
def _run_signs(words, run: tl.constexpr, FMT: tl.constexpr):
    """The signs of a run of 32 columns, in the order of `layout.Book`: bit 4k + j, k as there, belongs to step j."""
    signs = _run_bits(words, run, FMT)
    if FMT.even_signs:
        signs = (signs & -16) ^ (signs.to(tl.uint32, bitcast=True) >> 4).to(tl.int32, bitcast=True)
    return signs


@triton.jit
def _selectors(words, i: tl.constexpr, rh: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):
    """The nibbles of the eight codes of step i of rows r + 8 * rh, in column order, as (first four, last four): the
    lower 16 bits of each int32. The sign is the nibble's bit 2.
    """
    RUN: tl.constexpr = i // 4 * 2 + rh
    STEP: tl.constexpr = i % 4
    nibbles = load_entry(words[len(words) - 1], _entry_offset(words, RUN, STEP, FMT), ASM)
    if FMT.book == _IQ2:
        nibbles |= _shift(_run_signs(words, RUN, FMT), 2 - STEP) & _repeat(0x44)
    return nibbles, nibbles >> 16


@triton.jit
def _magnitudes(words, i: tl.constexpr, rh: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):
    """The magnitudes, four unsigned bytes, of columns 0 to 3 and 4 to 7 of step i of rows r + 8 * rh of IQ3, each with
    its mask: bytes of ones where the sign is negative.
    """
    RUN: tl.constexpr = i // 4 * 2 + rh
    STEP: tl.constexpr = i % 4
    book = words[len(words) - 1]
    signs = _run_signs(words, RUN, FMT)
    both = ()
    for half in tl.static_range(2):
        entry = load_entry(book, _entry_offset(words, RUN, 2 * STEP + half, FMT), ASM)
        tops = _shift(signs, 7 - STEP - 4 * half)
        both = both + (entry, byte_permute(tops, tops, (signs & 0) + _TOP_BITS, ASM))
    return both


@triton.jit
def magnitudes(words, i: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):
    """Step i of IQ3 as two A operands of unsigned bytes: the magnitudes, and those of negative codes alone, which are
    to be taken away twice.
    """
    near = _magnitudes(words, i, 0, FMT, ASM)
    far = _magnitudes(words, i, 1, FMT, ASM)
    return (
        (near[0], far[0], near[2], far[2]),
        (near[0] & near[1], far[0] & far[1], near[2] & near[3], far[2] & far[3]),
    )


@triton.jit
def _signed_magnitude(size, mask):
    """Bytes of magnitudes with signs: two's complement, from the ones' complement that the mask makes."""
    return (size ^ mask) + (mask & _repeat(1))


@triton.jit
def _book_codes(words, i: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):
    """`step_codes` of a codebook of few magnitudes: its integers and their negatives are eight bytes."""
    WORDS: tl.constexpr = _BOOK_WORDS[FMT.book]
    near = _selectors(words, i, 0, FMT, ASM)
    far = _selectors(words, i, 1, FMT, ASM)
    zero = near[0] & 0
    positive = in_register(zero + WORDS[0], ASM)
    codes = ()
    for half in tl.static_range(2):
        codes = codes + (byte_permute(positive, zero + WORDS[1], near[half], ASM),)
        codes = codes + (byte_permute(positive, zero + WORDS[1], far[half], ASM),)
    return codes


@triton.jit
def table_nibbles(words, i: tl.constexpr):
    """Step i of a table format: four int32 of four nibbles in their lower halves, in the order of `step_codes`."""
    first = words[i].to(tl.int32)
    last = (words[i] >> 32).to(tl.int32)
    return first, first >> 16, last, last >> 16


@triton.jit
def _table_bytes(nibbles, TABLE: tl.constexpr, ASM: tl.constexpr):
    """Four table entries for the four nibbles in the low half of a word."""
    WORDS: tl.constexpr = _TABLE_WORDS[TABLE]
    zero = nibbles & 0
    index = nibbles & 0x7777
    near = byte_permute(zero + WORDS[0], zero + WORDS[1], index, ASM)
    far = byte_permute(zero + WORDS[2], zero + WORDS[3], index, ASM)
    # A nibble's top bit selects the byte from the upper half of the table.
    return byte_permute(near, far, ((nibbles >> 1) & 0x4444) | 0x3210, ASM)


@triton.jit
def table_sizes(words, i: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):
    """Step i of a table format as two A operands: absolute values of codes 0 to 7 with zeros for the other
    codes, and those of codes 8 to 15; four instructions per word instead of the seven of `step_codes`. See
    `UPPER_SIGN`.
    """
    SIZES: tl.constexpr = _TABLE_SIZES[FMT.table]
    nibbles = table_nibbles(words, i)
    zero = nibbles[0] & 0
    first_lower = in_register(zero + SIZES[0], ASM)
    first_upper = in_register(zero + SIZES[2], ASM)
    lower = ()
    upper = ()
    for j in tl.static_range(4):
        # A nibble with its top bit set selects the sign of an absolute value: 0.
        low = byte_permute(first_lower, zero + SIZES[1], nibbles[j], ASM)
        high = byte_permute(first_upper, zero + SIZES[3], nibbles[j] ^ -2004318072, ASM)
        lower = lower + (low,)
        upper = upper + (high,)
    return lower, upper


@triton.jit
def step_codes(words, i: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):
    """The A operand of step i: four int32 of four bytes each, (half, rh) = (0, 0), (0, 1), (1, 0), (1, 1).

    Bytes are signed q for tables, codebooks and Q8_0; else codes shifted left by FMT.near_shift (rh 0) and
    FMT.far_shift (rh 1), to be treated as signed if the format has an offset.
    """
    UP: tl.constexpr = FMT.near_shift
    FAR: tl.constexpr = FMT.far_shift
    if FMT.book > 0 and FMT.table == 0:
        return _book_codes(words, i, FMT, ASM)
    elif FMT.book > 0:
        near = _magnitudes(words, i, 0, FMT, ASM)
        far = _magnitudes(words, i, 1, FMT, ASM)
        return (
            _signed_magnitude(near[0], near[1]),
            _signed_magnitude(far[0], far[1]),
            _signed_magnitude(near[2], near[3]),
            _signed_magnitude(far[2], far[3]),
        )
    elif FMT.low == 8:
        near = words[2 * i]
        far = words[2 * i + 1]
        return (near.to(tl.int32), far.to(tl.int32), (near >> 32).to(tl.int32), (far >> 32).to(tl.int32))
    elif FMT.low != 4:
        codes = ()
        for j in tl.static_range(4):
            codes = codes + (_from_pieces(words, i, j, UP, FMT),)
        return codes
    elif FMT.table > 0:
        first = words[i].to(tl.int32)
        last = (words[i] >> 32).to(tl.int32)
        return (
            _table_bytes(first, FMT.table, ASM),
            _table_bytes(first >> 16, FMT.table, ASM),
            _table_bytes(last, FMT.table, ASM),
            _table_bytes(last >> 16, FMT.table, ASM),
        )
    else:
        first = words[i].to(tl.int32)
        last = (words[i] >> 32).to(tl.int32)
        return (
            _with_high(_shift(first, UP) & _repeat(15 << UP), words, i, 0, UP, FMT),
            _with_high(_shift(first, FAR - 4) & _repeat(15 << FAR), words, i, 1, FAR, FMT),
            _with_high(_shift(last, UP) & _repeat(15 << UP), words, i, 2, UP, FMT),
            _with_high(_shift(last, FAR - 4) & _repeat(15 << FAR), words, i, 3, FAR, FMT),
        )


@triton.jit
def dot_codes(words, i: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):
    """`step_codes` for integer products, where codes may stand anywhere in their bytes: shifted left by `dot_shift`."""
    if FMT.low == 2:
        codes = ()
        for j in tl.static_range(4):
            codes = codes + (_from_pieces(words, i, j, dot_shift(FMT, i, j % 2), FMT),)
        return codes
    else:
        return step_codes(words, i, FMT, ASM)
