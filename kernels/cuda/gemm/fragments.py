"""Device functions that read packed planes in the order of the matrix instructions, shared by the matmul kernels.

Every tensor has one element per thread. `FMT` is the PackedLayout of the matrix. A chunk is loaded as one tuple of
words, so that a kernel can issue the loads long before it uses them:
 low words (int64), high words, then scale words, then the word of super-scales.
"""

import struct

import triton
import triton.language as tl

from quengine.kernels.block_formats import IQ4_TABLE, MXFP4_TABLE
from quengine.kernels.cuda.gemm.mma import byte_permute, in_register
from quengine.kernels.cuda.weights import layout

# The sixteen int8 entries of a table, four per int32.
_IQ4_WORDS = tl.constexpr(struct.unpack("<4i", struct.pack("16b", *IQ4_TABLE)))
_MXFP4_WORDS = tl.constexpr(struct.unpack("<4i", struct.pack("16b", *MXFP4_TABLE)))
# Their absolute values: the first eight entries of a table have one sign, the last eight the other.
_IQ4_SIZES = tl.constexpr(struct.unpack("<4i", struct.pack("16b", *map(abs, IQ4_TABLE))))
_MXFP4_SIZES = tl.constexpr(struct.unpack("<4i", struct.pack("16b", *map(abs, MXFP4_TABLE))))

# layout.ScaleKind, as compile-time constants.
_BYTE = tl.constexpr(3)
_BYTE_MIN = tl.constexpr(4)
_NIBBLE_MIN = tl.constexpr(5)
_SIX = tl.constexpr(6)
_HALF = tl.constexpr(0)
_HALF_MIN = tl.constexpr(1)
_E8M0 = tl.constexpr(2)


LANE_COLUMNS = tl.constexpr(layout.LANE_COLUMNS)


UPPER_SIGN = tl.constexpr((0, 1, -1))
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
    six, half_min = FMT.scales == layout.ScaleKind.SIX, FMT.scales == layout.ScaleKind.HALF_MIN
    scales = (1, 1) if six else (FMT.sets if half_min else 1,)
    return *_powers(FMT.low_words), *high, *scales, *((1,) if FMT.super_bytes else ())


@triton.jit
def stored_planes(planes, chunk, ON: tl.constexpr, lane, FMT: tl.constexpr):
    """Pointers to a lane's words of chunk `chunk + ON`, as stored: of the low plane (in parts of
    `stored_words` words), the high plane, the scales (for SIX an int32 and an int16 part) and the
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
    if FMT.scales == _SIX:
        firsts = firsts + (_pointer(planes[2], tl.int32) + (chunk * 48 + lane) + ON * 48,)
        firsts = firsts + (_pointer(planes[2], tl.int16) + (chunk * 96 + lane) + (ON * 96 + 64),)
    else:
        WIDE: tl.constexpr = FMT.scales == _HALF_MIN or FMT.scale_bytes == 256
        SCALE_WORD: tl.constexpr = tl.int64 if WIDE else tl.int32 if FMT.scale_bytes == 128 else tl.int16
        SCALES: tl.constexpr = 32 * FMT.sets if FMT.scales == _HALF_MIN else 32
        firsts = firsts + (_pointer(planes[2], SCALE_WORD) + (chunk * SCALES + lane) + ON * SCALES,)
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
    else:
        SET_BITS: tl.constexpr = 8 * FMT.scale_bytes // (32 * FMT.sets)
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
def load_chunk(planes, chunk, ON: tl.constexpr, lane, valid, FMT: tl.constexpr, MASKED: tl.constexpr):
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
def half_bits(word):
    """The fp16 in the low half of an int32, as fp32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def super_scales(words, FMT: tl.constexpr):
    """The super-scales of a chunk, (d of rh 0, dmin of rh 0, d of rh 1, dmin of rh 1), to multiply
    `set_scales`; ones and zeros for formats without.
    """
    if FMT.super_bytes == 64:
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
def _e8m0(byte):
    """2^(byte - 128): MXFP4's exponent scale, halved because its table is doubled."""
    bits = tl.where(byte < 2, 0x00200000 << tl.minimum(byte, 1), (byte - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


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
    elif FMT.scales == _HALF:
        return half_bits(words[BASE + s]), 0.0, half_bits(words[BASE + s] >> 16), 0.0
    elif FMT.scales == _E8M0:
        return _e8m0(words[BASE + s] & 255), 0.0, _e8m0((words[BASE + s] >> 8) & 255), 0.0
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


@triton.jit
def _shift(word, by: tl.constexpr):
    """word << by, or a right shift if `by` is negative."""
    if by > 0:
        word = word << by
    elif by < 0:
        word = word >> (0 - by)
    return word


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
def _table_bytes(nibbles, TABLE: tl.constexpr, ASM: tl.constexpr):
    """Four table entries for the four nibbles in the low half of a word."""
    WORDS: tl.constexpr = _IQ4_WORDS if TABLE == 1 else _MXFP4_WORDS
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
    SIZES: tl.constexpr = _IQ4_SIZES if FMT.table == 1 else _MXFP4_SIZES
    zero = words[i].to(tl.int32) & 0
    first_lower = in_register(zero + SIZES[0], ASM)
    first_upper = in_register(zero + SIZES[2], ASM)
    lower = ()
    upper = ()
    for half in tl.static_range(2):
        codes = (words[i] >> (32 * half)).to(tl.int32)
        # A nibble with its top bit set selects the sign of an absolute value: 0.
        flipped = codes ^ -2004318072
        for rh in tl.static_range(2):
            low = byte_permute(first_lower, zero + SIZES[1], codes >> (16 * rh), ASM)
            high = byte_permute(first_upper, zero + SIZES[3], flipped >> (16 * rh), ASM)
            lower = lower + (low,)
            upper = upper + (high,)
    return lower, upper


@triton.jit
def step_codes(words, i: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):
    """The A operand of step i: four int32 of four bytes each, (half, rh) = (0, 0), (0, 1), (1, 0), (1, 1).

    Bytes are signed q for tables and Q8_0; else codes shifted left by FMT.near_shift (rh 0) and FMT.far_shift (rh 1),
    to be treated as signed if the format has an offset.
    """
    UP: tl.constexpr = FMT.near_shift
    FAR: tl.constexpr = FMT.far_shift
    if FMT.low == 8:
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
