"""The layout of block formats in packed planes: constants shared by packing, kernels and tests.

A packed matrix is cut into tiles of 16 rows, a tile into chunks of 256 columns (128 if the columns are not a multiple
of 256), a chunk into blocks of 128. Lane 4r + q of a warp holds the adjacent columns 32q .. 32q+31 of each block, of
rows r and r + 8, in every format: 8 in each of four steps. One step feeds one integer matrix instruction (m16n8k32) of
the warp. Step i of a chunk covers columns 8j .. 8j+7 (j = i % 4) of a lane's 32 in block i // 4.

So the four lanes of a quad (q = 0..3) hold columns of four *different* groups. A lane handles one group at a time, and
needs only that group's scales: the group is all 32 of its columns in a block, or the first 16 and then the last 16. The
J = group/8 steps in which a quad handles four such groups are a "set": set s is steps s*J .. s*J + J-1. With groups of
32, lane q then has group 4s + q of the chunk; with groups of 16, group 8*(s // 2) + 2q + s % 2.

Plane  per lane         content (rh: 0 for row r, 1 for row r + 8; half: first or last 4 of the 8 columns)
low    4 bits: 8 B/step byte b of word `half`: code of rh 0 in the low nibble, of rh 1 in the high one
       4 bits, table    word `half`: 16 bits of rh 0, 16 bits of rh 1, one nibble per column
       2, 3, 6 bits     see `CODE_PIECES`
       8 bits: 16 B/step two planes of 8 B: rh 0, then rh 1
       codebooks        see `Book`
high   1 bit: 4 B a pair of steps: byte b: bits 0..3 (half 0 rh 0, half 0 rh 1, half 1 rh 0, half 1 rh 1) for the
       even step, bits 4..7 for the odd one
scales per chunk        see `ScaleKind`
supers per chunk        fp16 d (and dmin), or fp32, of row r, then of row r + 8, for r = 0..7

The plane `high` of a codebook format is the codebook instead, the same memory for all its weights: int32 words of eight
nibbles, one for each code, or (IQ3) of four magnitudes.
"""

from dataclasses import dataclass
from enum import IntEnum

from quengine.kernels.block_formats import FORMATS, NVFP4_SCALED, BlockFormat
from quengine.kernels.codebooks import codebook

MOST_STAGED = 4096
"""Bytes of the largest codebook that is copied to shared memory."""

TILE_ROWS = 16
LANES = 32
BLOCK_COLUMNS = 128
LANE_COLUMNS = 32
"""Adjacent columns of a block in one lane."""


CODE_PIECES: dict[int, tuple[tuple[tuple[int, int, int, int], ...], ...]] = {
    1: tuple(((rh, 2 * step + half, 1, 0),) for step in range(4) for half in (0, 1) for rh in (0, 1)),
    2: tuple(
        ((2 * (step % 2) + half, 4 * (step // 2) + 2 * rh, 2, 0),)
        for step in range(4)
        for half in (0, 1)
        for rh in (0, 1)
    ),
    3: (
        *(((word, 2 + 3 * rh, 3, 0),) for word in range(3) for rh in (0, 1)),
        ((0, 0, 2, 0), (2, 0, 1, 2)),
        ((1, 0, 2, 0), (2, 1, 1, 2)),
    ),
    6: (*(((word, 2, 6, 0),) for word in range(3)), ((0, 0, 2, 0), (1, 0, 2, 2), (2, 0, 2, 4))),
}
"""The place of 1-, 2-, 3- and 6-bit codes in the low plane. The codes of some steps (4 steps of 1- or 2-bit codes, 2 of
3-bit ones, 1 of 6-bit ones) share int32 words of a lane, four columns in the same bits of the four bytes. Code words
are in the order step, half, rh. Each is made of pieces (int32 word, first bit in its bytes, bits, their place in the
code). Most code words take one mask: a code at the top of a byte is a signed byte times a power of two, and 2-bit codes
are multiplied in place.
"""


class Book(IntEnum):
    """How indices and signs of a codebook's entries lie in the low plane: int64 words of a lane in a chunk, for its
    four runs of 32 columns, run 2 * block + rh. Step j of a run has index byte j. Bit 4k + j of a run's 32 bits of
    signs belongs to column k of step j; of IQ3, k counts columns 0, 4, 1, 5, 2, 6, 3, 7, so that the signs of an entry
    lie a byte apart. Where a step has an even number of negative signs, bit 4k + j is instead the sum modulo 2 of the
    signs of columns 0 .. k-1: the bits XOR the bits shifted by 4 give the signs back, and the first nibble, of zeros,
    is free for other bits.
    """

    NONE = 0
    IQ1 = 1  # words 0, 1: index bytes of two runs; word 2: 16 bits of each run as stored, upper index bits and eighths
    IQ2 = 2  # word `run`: index bytes, or indices of 9 bits that end in the free nibble, then signs
    IQ3 = 3  # word `run`: eight index bytes, 2j + half; words 4, 5: signs of two runs


class ScaleKind(IntEnum):
    """The words that a lane reads per chunk, for the sets s of its group column q."""

    HALF = 0  # fp16 d of rh 0, rh 1 for each set, or one pair for all sets; 2^`share` lanes of a quad share a pair
    HALF_MIN = 1  # fp16 d of rh 0, rh 1, dmin of rh 0, rh 1; 8 B a set, set-major
    E8M0 = 2  # exponent byte of rh 0, rh 1 for each set
    BYTE = 3  # int8 sc of rh 0, rh 1 for each set; supers hold d
    BYTE_MIN = 4  # uint8 sc, mn of rh 0, sc, mn of rh 1 for each set; supers hold d, dmin
    NIBBLE_MIN = 5  # byte sc | mn << 4 of rh 0, rh 1 for each set; supers hold d, dmin
    SIX = 6  # sc + 32 in 6 bits, field 2s + rh: 32 words of fields 0..4 and, on top, the low 2 bits of field 7, then 32
    #          shorts of fields 5, 6 and the rest of 7
    E4M3 = 7  # byte of rh 0, rh 1 for each set, 0 for the code of NaN; supers of NVFP4_SCALED: fp32, the tensor's scale
    # Codebook formats: n of sub-scales 2n + 1, field 2s + rh; supers hold d.
    FREE = 8  # the free nibble of a run's signs
    NIBBLE = 9  # a word of nibbles
    NIBBLE_HIGH = 10  # int64: nibbles, then the upper index bits of the four runs, two bits a step
    HIGH_NIBBLE = (
        11  # 32 words of the upper index bits of the four runs, a bit for an index, then 32 shorts of nibbles
    )
    IN_CODES = 12  # bits 12 to 14 of a run's 16 bits in the low plane
    THREE = 13  # fields of three bits: 32 shorts of the lower 16 bits, then 32 bytes


@dataclass(frozen=True)
class PackedLayout:
    """The planes of one format at one chunk size. Kernels take it whole, as a compile-time constant."""

    format: str
    group: int  # weights sharing a scale: 32 or 16
    low: int  # bits in the low plane
    high: int  # bits in the high plane, 0 if there is none
    offset: int  # q = code - offset (a power of two, half the code range) or 0
    table: int  # 0: none; else the index of a format with this table in TABLE_NAMES
    scales: int  # a ScaleKind
    has_min: bool
    chunk: int  # columns per chunk
    book: int = 0  # a Book
    even_signs: bool = False
    index_bits: int = 8  # bits of an index in the low plane, where indices follow each other
    unit: float = 1.0  # scales of BlockFormat are unit * d
    share: int = 0  # 2^share lanes of a quad share a scale
    one_scale: bool = False  # all sets of a chunk share a scale

    @property
    def signed(self) -> bool:
        """Whether bytes of codes are signed."""
        return self.offset > 0 or self.table > 0 or self.low == 8 or self.book > 0

    @property
    def scale_sets(self) -> int:
        """Sets with a scale of their own."""
        return 1 if self.one_scale else self.sets

    @property
    def bits(self) -> int:
        return self.low + self.high

    @property
    def near_shift(self) -> int:
        """The left shift, within their bytes, of codes of rows r when they are multiplied: signed codes are
        at the top.
        """
        return 8 - self.bits if self.offset else 0

    @property
    def far_shift(self) -> int:
        """The same for rows r + 8: plain nibbles stay where they are stored, which saves a shift."""
        return 4 if self.bits == 4 and not self.table else self.near_shift

    @property
    def blocks(self) -> int:
        """Blocks per chunk."""
        return self.chunk // BLOCK_COLUMNS

    @property
    def sets(self) -> int:
        return self.chunk // (4 * self.group)

    @property
    def sets_per_block(self) -> int:
        return LANE_COLUMNS // self.group

    @property
    def steps(self) -> int:
        return self.chunk // 32

    @property
    def steps_per_set(self) -> int:
        return self.group // 8

    @property
    def low_words(self) -> int:
        """int64 words per lane in the low plane of one chunk."""
        if self.book:
            return (0, 3, 4, 6)[self.book]
        return self.steps * self.low // 4

    @property
    def code_words(self) -> int:
        """Words of a lane's codes in one chunk: int64 of the low plane, int32 of the high one."""
        return self.low_words + self.steps * self.high // 2

    @property
    def book_bytes(self) -> int:
        """Bytes of the codebook on the device, 0 for a format without."""
        return 4 * len(codebook(FORMATS[self.format].book)) if self.book else 0

    @property
    def staged_bytes(self) -> int:
        """Bytes of the codebook that programs copy to shared memory (staged_book.py), 0 where they read it in place:
        IQ1's 16 KiB would be a good part of what a program reads."""
        return self.book_bytes if self.book_bytes <= MOST_STAGED else 0

    @property
    def low_bytes(self) -> int:
        """Bytes of the low plane in one chunk of one tile."""
        return 8 * LANES * self.low_words

    @property
    def high_bytes(self) -> int:
        return TILE_ROWS * self.chunk * self.high // 8

    @property
    def scale_bytes(self) -> int:
        whole = {6: 192, 8: 0, 9: 128, 10: 256, 11: 192, 12: 0, 13: 96}
        if self.scales in whole:
            return whole[self.scales]
        per_set = {0: 4, 1: 8, 2: 2, 3: 2, 4: 4, 5: 2, 7: 2}
        return (LANES >> self.share) * per_set[self.scales] * self.scale_sets

    @property
    def super_bytes(self) -> int:
        if self.scales in (ScaleKind.BYTE_MIN, ScaleKind.NIBBLE_MIN) or self.format == NVFP4_SCALED:
            return 4 * TILE_ROWS
        return 2 * TILE_ROWS if self.book or self.scales in (ScaleKind.BYTE, ScaleKind.SIX) else 0

    @property
    def scaled_twice(self) -> bool:
        """Whether sets' scales are to be multiplied by a chunk's: stored ones, or E4M3's unit."""
        return self.super_bytes > 0 or self.scales == ScaleKind.E4M3

    @property
    def plane_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of a unit, one chunk of one tile (16 rows), in each plane."""
        return self.low_bytes, self.high_bytes, self.scale_bytes, self.super_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a unit."""
        return sum(self.plane_bytes)


_SCALE_KINDS = {
    "Q4_0": ScaleKind.HALF,
    "Q4_1": ScaleKind.HALF_MIN,
    "Q5_0": ScaleKind.HALF,
    "Q5_1": ScaleKind.HALF_MIN,
    "Q8_0": ScaleKind.HALF,
    "Q2_K": ScaleKind.NIBBLE_MIN,
    "Q3_K": ScaleKind.SIX,
    "Q4_K": ScaleKind.BYTE_MIN,
    "Q5_K": ScaleKind.BYTE_MIN,
    "Q6_K": ScaleKind.BYTE,
    "IQ4_NL": ScaleKind.HALF,
    "IQ4_XS": ScaleKind.BYTE,
    "MXFP4": ScaleKind.E8M0,
    "NVFP4": ScaleKind.E4M3,
    NVFP4_SCALED: ScaleKind.E4M3,
    "IQ2_XXS": ScaleKind.FREE,
    "IQ2_XS": ScaleKind.NIBBLE,
    "IQ2_S": ScaleKind.NIBBLE_HIGH,
    "IQ3_XXS": ScaleKind.FREE,
    "IQ3_S": ScaleKind.HIGH_NIBBLE,
    "IQ1_S": ScaleKind.IN_CODES,
    "IQ1_M": ScaleKind.THREE,
    "TQ1_0": ScaleKind.HALF,
    "TQ2_0": ScaleKind.HALF,
    "Q1_0": ScaleKind.HALF,
    "Q2_0": ScaleKind.HALF,
}
_HIGH_BITS = {5: 1}
_TABLES = {"IQ4_NL": 1, "IQ4_XS": 1, "MXFP4": 2, "NVFP4": 2, NVFP4_SCALED: 2, "IQ3_XXS": 3, "IQ3_S": 4}
TABLE_NAMES = ("", "IQ4_NL", "MXFP4", "IQ3_XXS", "IQ3_S")
"""A format with each table."""


def packed_layout(fmt: BlockFormat, cols: int) -> PackedLayout:
    """The layout of a matrix of `cols` columns. Raises ValueError for a float format."""
    if not fmt.is_quantized:
        raise ValueError(f"{fmt.name} stores plain floats: it is not packed")
    chunk = 256 if cols % 256 == 0 else 128
    kind, table = int(_SCALE_KINDS[fmt.name]), _TABLES.get(fmt.name, 0)
    if fmt.book:
        book = Book[fmt.book.split("_")[0]]
        even = fmt.name in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")
        index_bits = 9 if fmt.name == "IQ2_XS" else 8
        return PackedLayout(
            fmt.name, fmt.group, 0, 0, 0, table, kind, False, chunk, int(book), even, index_bits, fmt.unit
        )  # fmt: skip
    if fmt.bits < 3 and not fmt.sub_scale_bits:
        # w = unit * d * code - d: the codes of a format without minimum begin at -1.
        share, unit = {64: 1}.get(fmt.block, 2), 2.0 if fmt.bits == 1 else 1.0
        return PackedLayout(
            fmt.name, fmt.group, fmt.bits, 0, 0, 0, kind, True, chunk, unit=unit, share=share,
            one_scale=fmt.block == 256,
        )  # fmt: skip
    high = _HIGH_BITS.get(fmt.bits, 0)
    return PackedLayout(
        fmt.name, fmt.group, fmt.bits - high, high, fmt.offset, table, kind, fmt.has_min, chunk
    )


PACKED_FORMATS = tuple(name for name, fmt in FORMATS.items() if fmt.is_quantized)
