"""The GGUF block formats as one table, and their torch unpacking: the meaning of a weight row's bytes.

A row of K weights is K / `block` blocks of `nbytes` bytes. Each group of `group` weights in the row shares a scale:

    w = s*q - m      s = d*sc (d where the format has no sub-scales),  m = dmin*mn (dmin without sub-minimums)

q is `code - offset`, or `table[code]` for formats with a non-uniform grid. Codebook formats (IQ1 to IQ3) store indices
of codebook entries, each of several codes (codebooks.py); IQ2 and IQ3 store signs too. `Groups` keeps the stored
integers (codes, sc, mn) and 16-bit scales (d, dmin) unchanged, so any packed layout can be made from it. References:
the `gguf` package (`gguf.quants`, to which `dequantize` is bit-exact) and ggml's `ggml-common.h`. MXFP4 follows the OCP
Microscaling Formats specification 1.0; NVFP4 is NVIDIA's E2M1 with one unsigned E4M3 scale per 16 weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quengine.kernels.codebooks import (
    IQ1_ENTRIES,
    IQ1_TABLE,
    IQ2_TABLE,
    IQ3_S_TABLE,
    IQ3_XXS_TABLE,
    codebook_on,
    even_signs,
)

# Entries are integers; MXFP4's and NVFP4's are E2M1 values times two, and their scales are halved.
IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class BlockFormat:
    """How one GGUF type stores weights. `layout` maps each field of a block to its bytes (start, stop)."""

    name: str
    block: int  # weights per block
    nbytes: int  # bytes per block
    layout: Mapping[str, tuple[int, int]]
    group: int = 0  # weights that share one scale; 0: a plain float format, not quantized
    bits: int = 0  # of one stored code; Q8_0's code is a signed byte, the others are unsigned
    offset: int = 0  # q = code - offset
    table: tuple[int, ...] | None = None  # q = table[code]
    sub_scale_bits: int = 0  # of sc (and mn); 0: the scale is d itself
    has_min: bool = False
    book: str = ""  # the codebook (codebooks.py) that the block's indices refer to
    width: int = 0  # weights of an entry of the codebook
    unit: float = 1.0  # the super-scale is unit * d; a power of two

    @property
    def is_quantized(self) -> bool:
        return self.group > 0

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` weights. Raises ValueError if `cols` is not a whole number of blocks."""
        if cols % self.block:
            raise ValueError(
                f"{self.name} rows hold whole blocks of {self.block} weights; {cols} is not a multiple"
            )
        return cols // self.block * self.nbytes

    def cols(self, row_bytes: int) -> int:
        """Weights in a row of `row_bytes` bytes. Raises ValueError if that is not whole blocks."""
        if row_bytes % self.nbytes:
            raise ValueError(f"{self.name} blocks have {self.nbytes} bytes; {row_bytes} is not a multiple")
        return row_bytes // self.nbytes * self.block


def _format(name: str, block: int, group: int, bits: int, fields: str, **more: Any) -> BlockFormat:
    """A format from `fields`, the names and byte sizes of a block's fields in order.

    `codes` has the low bits of the codes, `high` the upper bits of codes or indices.
    """
    layout, start = {}, 0
    for field in fields.split(", "):
        name_of, size = field.split()
        layout[name_of] = (start, start + int(size))
        start += int(size)
    has_min = "min" in layout or "dmin" in layout
    return BlockFormat(name, block, start, MappingProxyType(layout), group, bits, has_min=has_min, **more)


NVFP4_SCALED = "NVFP4_SCALED"
"""NVFP4 in blocks of 256, each headed by the fp32 scale that files store once per tensor. GGUF has no such type."""
_IQ1: Mapping[str, Any] = {"table": IQ1_TABLE, "book": "IQ1", "width": 8, "unit": 0.125}
_IQ2: Mapping[str, Any] = {"table": IQ2_TABLE, "width": 8, "unit": 0.125}

_TABLE = (
    _format("F32", 1, 0, 0, "codes 4"),
    _format("F16", 1, 0, 0, "codes 2"),
    _format("BF16", 1, 0, 0, "codes 2"),
    _format("Q4_0", 32, 32, 4, "d 2, codes 16", offset=8),
    _format("Q4_1", 32, 32, 4, "d 2, min 2, codes 16"),
    _format("Q5_0", 32, 32, 5, "d 2, high 4, codes 16", offset=16),
    _format("Q5_1", 32, 32, 5, "d 2, min 2, high 4, codes 16"),
    _format("Q8_0", 32, 32, 8, "d 2, codes 32"),
    _format("Q2_K", 256, 16, 2, "scales 16, codes 64, d 2, dmin 2", sub_scale_bits=4),
    _format("Q3_K", 256, 16, 3, "high 32, codes 64, scales 12, d 2", offset=4, sub_scale_bits=6),
    _format("Q4_K", 256, 32, 4, "d 2, dmin 2, scales 12, codes 128", sub_scale_bits=6),
    _format("Q5_K", 256, 32, 5, "d 2, dmin 2, scales 12, high 32, codes 128", sub_scale_bits=6),
    _format("Q6_K", 256, 16, 6, "codes 128, high 64, scales 16, d 2", offset=32, sub_scale_bits=8),
    _format("IQ4_NL", 32, 32, 4, "d 2, codes 16", table=IQ4_TABLE),
    _format(
        "IQ4_XS", 256, 32, 4, "d 2, scales_high 2, scales 4, codes 128", table=IQ4_TABLE, sub_scale_bits=6
    ),
    _format("MXFP4", 32, 32, 4, "d 1, codes 16", table=MXFP4_TABLE),
    _format("NVFP4", 64, 16, 4, "d 4, codes 32", table=MXFP4_TABLE),
    _format(NVFP4_SCALED, 256, 16, 4, "top 4, d 16, codes 128", table=MXFP4_TABLE),
    _format("IQ2_XXS", 256, 32, 3, "d 2, index 64", sub_scale_bits=4, **_IQ2, book="IQ2_XXS"),
    _format("IQ2_XS", 256, 16, 3, "d 2, index 64, scales 8", sub_scale_bits=4, **_IQ2, book="IQ2_XS"),
    _format(
        "IQ2_S", 256, 16, 3, "d 2, index 32, signs 32, high 8, scales 8", sub_scale_bits=4, **_IQ2, book="IQ2_S"
    ),
    _format(
        "IQ3_XXS", 256, 32, 4, "d 2, index 64, signs 32", table=IQ3_XXS_TABLE, sub_scale_bits=4,
        book="IQ3_XXS", width=4, unit=0.25,
    ),
    _format(
        "IQ3_S", 256, 32, 4, "d 2, index 64, high 8, signs 32, scales 4", table=IQ3_S_TABLE, sub_scale_bits=4,
        book="IQ3_S", width=4,
    ),
    _format("IQ1_S", 256, 32, 3, "d 2, index 32, high 16", sub_scale_bits=3, **_IQ1),
    _format("IQ1_M", 256, 16, 3, "index 32, high 16, scales 8", sub_scale_bits=3, **_IQ1),
    _format("TQ1_0", 256, 32, 2, "codes 48, high 4, d 2", offset=1),
    _format("TQ2_0", 256, 32, 2, "codes 64, d 2", offset=1),
    _format("Q1_0", 128, 32, 1, "d 2, codes 16", table=(-1, 1)),
    _format("Q2_0", 64, 32, 2, "d 2, codes 16", offset=1),
)  # fmt: skip
FORMATS: Mapping[str, BlockFormat] = MappingProxyType({fmt.name: fmt for fmt in _TABLE})


Fields: TypeAlias = Mapping[str, Tensor]
"""The bytes of each field of blocks: uint8 [R, blocks, bytes]."""
Scales: TypeAlias = dict[str, Tensor]
"""The fields d, sc, dmin, mn and top of `Groups`, as far as a format has them."""


@dataclass(frozen=True)
class Groups:
    """The stored integers and scales of R rows of K weights, on the device of the bytes they were read from.

    codes  uint8 [R, K] in weight order (Q8_0: int8), see `BlockFormat.offset` and `.table`
    d      fp16 [R, K/block]. MXFP4: uint8 [R, K/block], the E8M0 exponent e of the scale 2^(e-128). NVFP4 and
           NVFP4_SCALED: uint8 [R, K/group], an E4M3 number
    sc     [R, K/group] sub-scales or None: uint8 (Q2_K 4 bits, Q4_K and Q5_K 6 bits; codebook formats 2n + 1 of
           n in 3 or 4 bits), int8 where signed (Q3_K and IQ4_XS -32..31, Q6_K 8 bits)
    dmin   fp16 [R, K/block] or None. Q4_1 and Q5_1 store a minimum to add; here it is negated, so w = d*q - dmin
    mn     uint8 [R, K/group] sub-minimums or None (same bits as sc)
    top    fp32 [R, K/block] of NVFP4_SCALED, by which scales are multiplied, else None
    index  int16 [R, K/width] of codebook formats, else None: entries of the codebook; index and signs give `codes`
    signs  uint8 [R, K/8] of IQ2 and IQ3, a bit for each weight, else None
    """

    format: BlockFormat
    codes: Tensor
    d: Tensor
    sc: Tensor | None = None
    dmin: Tensor | None = None
    mn: Tensor | None = None
    top: Tensor | None = None
    index: Tensor | None = None
    signs: Tensor | None = None

    @property
    def group(self) -> int:
        return self.format.group

    def super_scales(self) -> Tensor:
        """d times the format's unit, as fp32 of the shape of d. Exact, except that a product with `top` is rounded."""
        if self.top is not None:
            return self.top.repeat_interleave(self.format.block // self.group, 1) * e4m3_half(self.d)
        if self.d.dtype == torch.uint8:
            return _e8m0_half(self.d) if self.format.block == self.group else e4m3_half(self.d)
        return self.d.float() * self.format.unit

    def scales(self) -> Tensor:
        """s of w = s*q - m: fp32 [R, K/group]. Exact without `top`, as it multiplies 11 bits by at most 8."""
        supers, groups = self.super_scales(), self.codes.shape[1] // self.group
        if self.sc is None and supers.shape[1] != groups:
            return supers.repeat_interleave(groups // supers.shape[1], dim=1)
        return _times(supers, self.sc)

    def mins(self) -> Tensor | None:
        """m of w = s*q - m: fp32 [R, K/group], exact; None for formats without minimums."""
        return None if self.dmin is None else _times(self.dmin.float(), self.mn)

    def ints(self) -> Tensor:
        """q of w = s*q - m: int8 [R, K]."""
        if self.format.table is not None:
            table = torch.tensor(self.format.table, dtype=torch.int8, device=self.codes.device)
            return table[self.codes.int()]
        return self.codes.to(torch.int8) - self.format.offset

    def dequantize(self) -> Tensor:
        """The weights, fp32 [R, K]: one rounding of s*q and one of the subtraction, as `gguf.quants` does."""
        rows = self.codes.shape[0]
        w = self.ints().view(rows, -1, self.group).float() * self.scales().unsqueeze(-1)
        mins = self.mins()
        if mins is not None:
            w = w - mins.unsqueeze(-1)
        return w.view(rows, -1)


def unpack(fmt: BlockFormat, data: Tensor) -> Groups:
    """Split rows of blocks, uint8 [R, row_bytes], into integers and scales. Runs on any device.

    Raises ValueError for a float format and for rows that are not whole blocks.
    """
    fields = _fields_of(fmt, data)
    if fmt.name in _UNPACK_BOOK:
        return _UNPACK_BOOK[fmt.name](fmt, fields)
    codes, scales = _UNPACK[fmt.name]
    return Groups(fmt, codes(fields), **scales(fields))


def unpack_scales(fmt: BlockFormat, data: Tensor) -> Groups:
    """As `unpack`, for callers that read only scales and minimums.

    The codes are arbitrary and take neither time nor memory, except in codebook formats, where they are unpacked.
    """
    if fmt.name in _UNPACK_BOOK:
        return unpack(fmt, data)
    codes = data.new_zeros(1).expand(data.shape[0], fmt.cols(data.shape[1]))
    return Groups(fmt, codes, **_UNPACK[fmt.name][1](_fields_of(fmt, data)))


def _fields_of(fmt: BlockFormat, data: Tensor) -> Fields:
    if not fmt.is_quantized:
        raise ValueError(f"{fmt.name} stores plain floats: it has no groups to unpack")
    rows, cols = data.shape[0], fmt.cols(data.shape[1])
    blocks = data.reshape(rows, cols // fmt.block, fmt.nbytes)
    return {name: blocks[..., a:b] for name, (a, b) in fmt.layout.items()}


def dequantize(fmt: BlockFormat, data: Tensor) -> Tensor:
    """The weights of uint8 rows [R, row_bytes] as fp32 [R, K], bit-exact with `gguf.quants.dequantize`."""
    if fmt.is_quantized:
        return unpack(fmt, data).dequantize()
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[fmt.name]
    fmt.cols(data.shape[1])
    return _aligned(data).view(dtype).float()


def with_tensor_scale(data: Tensor, scales: Tensor) -> Tensor:
    """NVFP4 rows, uint8 [R, row_bytes], as NVFP4_SCALED rows. scales: fp32 [R], of each row's tensor.

    Raises ValueError for rows that are not whole blocks of 256 weights.
    """
    rows, cols = data.shape[0], FORMATS["NVFP4"].cols(data.shape[1])
    FORMATS[NVFP4_SCALED].row_bytes(cols)
    fours = data.view(rows, cols // 256, 4, 36)
    top = scales.float().view(rows, 1, 1).expand(rows, cols // 256, 1).contiguous().view(torch.uint8)
    d, codes = fours[..., :4].flatten(-2), fours[..., 4:].flatten(-2)
    return torch.cat([top, d, codes], -1).view(rows, -1)


def _aligned(data: Tensor) -> Tensor:
    """data, or a contiguous copy if its bytes do not start or step at a multiple of 4, as a wider view requires."""
    aligned = data.is_contiguous() and data.storage_offset() % 4 == 0 and data.data_ptr() % 4 == 0
    return data if aligned and data.shape[-1] % 4 == 0 else data.clone(memory_format=torch.contiguous_format)


def _times(scale: Tensor, sub: Tensor | None) -> Tensor:
    """Super-scales [R, K/block] times their sub-scales [R, K/group]: fp32 [R, K/group]."""
    if sub is None:
        return scale
    rows, blocks = scale.shape
    return (scale.unsqueeze(-1) * sub.view(rows, blocks, -1).float()).view(rows, -1)


def _half(field: Tensor) -> Tensor:
    """The fp16 in a two-byte field [R, B, 2]: [R, B]."""
    return field.contiguous().view(torch.float16).squeeze(-1)


def _e8m0_half(e: Tensor) -> Tensor:
    """2^(e-128) as fp32; e = 0 and 1 are fp32 denormals, so the bits are written, not computed."""
    e = e.int()
    return torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)


def e4m3_half(byte: Tensor) -> Tensor:
    """Half of the unsigned E4M3 number in each byte, exact in fp32. As in ggml, NaN (0x7F) is 0; bit 7 is ignored.

    The code's bits, moved to the exponent and mantissa of an fp16, are 2^-8 times the number.
    """
    half = ((byte & 127).to(torch.int16) << 7).view(torch.float16).float() * 128.0
    return torch.where(byte == 127, 0.0, half)


def _bit_planes(field: Tensor, run: int, width: int) -> Tensor:
    """Codes of `width` bits in planes: each run of `run` bytes holds 8/width runs of codes, low bits first.

    field uint8 [R, B, n] -> uint8 [R, B, n*8/width].
    """
    rows, blocks, _ = field.shape
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=field.device).view(-1, 1)
    planes = (field.reshape(rows, blocks, -1, 1, run) >> shifts) & ((1 << width) - 1)
    return planes.reshape(rows, blocks, -1)


def _join(codes: Tensor) -> Tensor:
    return codes.reshape(codes.shape[0], -1)


def _high_bits_q5(high: Tensor) -> Tensor:
    """Bit j of a little-endian 32-bit field belongs to weight j: [R, B, 4] -> uint8 [R, B, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=high.device)
    return ((high.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _six_bit_pairs(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K and Q5_K: eight 6-bit sub-scales and sub-minimums in 12 bytes.

    Bytes 0..3 hold sc[0..3] in bits 0..5 and the top two bits of sc[4..7] in bits 6..7; bytes 4..7 the same
    of mn; bytes 8..11 hold the low four bits of sc[4..7] (low nibble) and of mn[4..7] (high nibble).
    """
    first, second, third = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
    sc = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], -1)
    mn = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], -1)
    return _join(sc), _join(mn)


def _nibbles(f: Fields) -> Tensor:
    """Q4_0, Q4_1, IQ4_NL, MXFP4, and groups of IQ4_XS: low nibbles are weights 0..15 of 32, high nibbles 16..31."""
    return _join(_bit_planes(f["codes"], 16, 4))


def _q5_codes(f: Fields) -> Tensor:
    return _join(_bit_planes(f["codes"], 16, 4) | (_high_bits_q5(f["high"]) << 4))


def _bytes(f: Fields) -> Tensor:
    return _join(f["codes"]).view(torch.int8)


def _q2_k_codes(f: Fields) -> Tensor:
    return _join(_bit_planes(f["codes"], 32, 2))


def _q3_k_codes(f: Fields) -> Tensor:
    # The mask bit is the third bit of the code: q = code - 4.
    return _join(_bit_planes(f["codes"], 32, 2) | (_bit_planes(f["high"], 32, 1) << 2))


def _q4_k_codes(f: Fields) -> Tensor:
    return _join(_bit_planes(f["codes"], 32, 4))


def _q5_k_codes(f: Fields) -> Tensor:
    return _join(_bit_planes(f["codes"], 32, 4) | (_bit_planes(f["high"], 32, 1) << 4))


def _q6_k_codes(f: Fields) -> Tensor:
    # Each half of the block (128 weights): 64 bytes of nibbles, 32 bytes of four 2-bit planes.
    return _join(_bit_planes(f["codes"], 64, 4) | (_bit_planes(f["high"], 32, 2) << 4))


def _nvfp4_codes(f: Fields) -> Tensor:
    # Of each 16 weights, the first 8 are the low nibbles of 8 bytes, the last 8 the high nibbles.
    return _join(_bit_planes(f["codes"], 8, 4))


def _tq1_0_codes(f: Fields) -> Tensor:
    """Codes 0, 1, 2: base-3 digits of the fraction byte/256. The n-th digits of a run of bytes are a run of weights."""
    runs = (f["codes"][..., :32], 5), (f["codes"][..., 32:], 5), (f["high"], 4)
    return _join(torch.cat([_digits(field, count) for field, count in runs], -1))


def _two_bit_runs(f: Fields) -> Tensor:
    # TQ2_0: planes of 32 bytes.
    return _join(_bit_planes(f["codes"], 32, 2))


def _neighbours(f: Fields, bits: int) -> Tensor:
    # Q1_0 and Q2_0: neighbours share a byte.
    return _join(_bit_planes(f["codes"], 1, bits))


def _one_scale(f: Fields) -> Scales:
    return {"d": _half(f["d"])}


def _one_byte(f: Fields) -> Scales:
    return {"d": f["d"].squeeze(-1)}


def _added_min(f: Fields) -> Scales:
    return {"d": _half(f["d"]), "dmin": -_half(f["min"])}


def _q2_k_scales(f: Fields) -> Scales:
    sc, mn = f["scales"] & 15, f["scales"] >> 4
    return {"d": _half(f["d"]), "sc": _join(sc), "dmin": _half(f["dmin"]), "mn": _join(mn)}


def _q3_k_scales(f: Fields) -> Scales:
    # Low nibbles of 8 bytes, then their high nibbles, with the top two bits in four bytes, as planes of four.
    low, top = f["scales"][..., 0:8], f["scales"][..., 8:12]
    sc = (_bit_planes(low, 8, 4) | (_bit_planes(top, 4, 2) << 4)).view(torch.int8) - 32
    return {"d": _half(f["d"]), "sc": _join(sc)}


def _six_bit_scales(f: Fields) -> Scales:
    sc, mn = _six_bit_pairs(f["scales"])
    return {"d": _half(f["d"]), "sc": sc, "dmin": _half(f["dmin"]), "mn": mn}


def _signed_scales(f: Fields) -> Scales:
    return {"d": _half(f["d"]), "sc": _join(f["scales"]).view(torch.int8)}


def _iq4_xs_scales(f: Fields) -> Scales:
    # 6 bits: low nibbles two to a byte; the top two bits of scale i are bits 2i, 2i+1 of 16 bits.
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=f["d"].device)
    top = ((f["scales_high"].unsqueeze(-1) >> shifts) & 3).flatten(-2)
    return {
        "d": _half(f["d"]),
        "sc": _join((_bit_planes(f["scales"], 1, 4) | (top << 4)).view(torch.int8) - 32),
    }


def _nvfp4_scales(f: Fields) -> Scales:
    scales = {"d": _join(f["d"])}
    return scales | {"top": _join(_words(f["top"], torch.float32))} if "top" in f else scales


def _digits(field: Tensor, count: int) -> Tensor:
    """The first `count` digits in base 3 of bytes [R, B, n]: [R, B, count*n], digit by digit."""
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.int16, device=field.device).view(-1, 1)
    rest = (field.to(torch.int16).unsqueeze(-2) * powers) & 255
    return ((rest * 3) >> 8).to(torch.uint8).flatten(-2)


def _words(field: Tensor, dtype: torch.dtype) -> Tensor:
    """A field's bytes as little-endian words: [R, B, words]."""
    return field.clone(memory_format=torch.contiguous_format).view(dtype)


def _fields(words: Tensor, width: int, count: int) -> Tensor:
    """`count` fields of `width` bits of each word [R, B, n], the lowest first: [R, B, n*count]."""
    shifts = torch.arange(0, width * count, width, dtype=words.dtype, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << width) - 1)).flatten(-2)


def _odd(sub: Tensor) -> Tensor:
    """Sub-scales 2n + 1 of stored n: uint8 [R, groups]."""
    return _join((2 * sub + 1).to(torch.uint8))


def from_book(fmt: BlockFormat, index: Tensor, signs: Tensor | None, d: Tensor, sub: Tensor) -> Groups:
    """Groups of a codebook format. index [R, B, n]; signs [R, B, 32] or None; sub: stored sub-scales."""
    index = _join(index).to(torch.int16)
    codes = _join(codebook_on(fmt.book, index.device)[index.int()])
    if signs is not None:
        signs = _join(signs).to(torch.uint8)
        bits = torch.arange(8, dtype=torch.uint8, device=signs.device)
        each = _join((signs.unsqueeze(-1) >> bits) & 1)
        codes = codes | (each << (fmt.bits - 1))
    return Groups(fmt, codes, d, _odd(sub), index=index, signs=signs)


def _unpack_iq2_xxs(fmt: BlockFormat, f: Fields) -> Groups:
    # 32 weights have 8 bytes: four indices, then 7 bits of signs for each 8 weights and 4 of the sub-scale.
    pairs = f["index"].reshape(*f["index"].shape[:2], 8, 2, 4)
    index, word = pairs[..., 0, :].flatten(-2), _words(pairs[..., 1, :].flatten(-2), torch.int32)
    return from_book(fmt, index, _seven_signs(word), _half(f["d"]), _fields(word >> 28, 4, 1))


def _seven_signs(word: Tensor) -> Tensor:
    return even_signs(_fields(word, 7, 4).to(torch.uint8))


def _unpack_iq2_xs(fmt: BlockFormat, f: Fields) -> Groups:
    word = _words(f["index"], torch.int16).int()
    signs = even_signs(((word >> 9) & 127).to(torch.uint8))
    return from_book(fmt, word & 511, signs, _half(f["d"]), _fields(f["scales"], 4, 2))


def _unpack_iq2_s(fmt: BlockFormat, f: Fields) -> Groups:
    index = f["index"].int() | (_fields(f["high"], 2, 4).int() << 8)
    return from_book(fmt, index, f["signs"], _half(f["d"]), _fields(f["scales"], 4, 2))


def _unpack_iq3_xxs(fmt: BlockFormat, f: Fields) -> Groups:
    word = _words(f["signs"], torch.int32)
    return from_book(fmt, f["index"], _seven_signs(word), _half(f["d"]), _fields(word >> 28, 4, 1))


def _unpack_iq3_s(fmt: BlockFormat, f: Fields) -> Groups:
    index = f["index"].int() | (_fields(f["high"], 1, 8).int() << 8)
    return from_book(fmt, index, f["signs"], _half(f["d"]), _fields(f["scales"], 4, 2))


def _unpack_iq1_s(fmt: BlockFormat, f: Fields) -> Groups:
    # 16 bits for each 32 weights: the upper 3 bits of four indices, the sub-scale's 3 bits, the sign of the eighth.
    high = _words(f["high"], torch.int16).int()
    index = f["index"].int() | (_fields(high, 3, 4) << 8)
    index += _fields(high >> 15, 1, 1).repeat_interleave(4, -1) * IQ1_ENTRIES
    return from_book(fmt, index, None, _half(f["d"]), _fields(high >> 12, 3, 1))


def put_split_half(blocks: Tensor, d: Tensor) -> None:
    """Writes d [R, B] to IQ1_M blocks, uint8 [R, B, 56]: each word of the scales has four bits of the fp16 on top."""
    bits = d.half().view(torch.int16).int().unsqueeze(-1) >> torch.arange(0, 16, 4, device=d.device)
    start, stop = FORMATS["IQ1_M"].layout["scales"]
    upper = blocks[..., start + 1 : stop : 2]
    blocks[..., start + 1 : stop : 2] = (upper & 15) | ((bits & 15) << 4).to(torch.uint8)


def _unpack_iq1_m(fmt: BlockFormat, f: Fields) -> Groups:
    # A nibble for each 8 weights: the upper 3 bits of an index, and the sign of the eighth. Each of four 16-bit words
    # has four sub-scales of 3 bits and, on top, 4 bits of d.
    index = f["index"].int() + _fields(f["high"], 4, 2).int() * (IQ1_ENTRIES // 8)
    word = _words(f["scales"], torch.int16).int()
    at = torch.arange(0, 16, 4, dtype=torch.int32, device=word.device)
    d = (
        (((word >> 12) & 15) << at)
        .sum(-1, keepdim=True, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.float16)
    )
    return from_book(fmt, index, None, d.squeeze(-1), _fields(word, 3, 4))


_UNPACK: Mapping[str, tuple[Callable[[Fields], Tensor], Callable[[Fields], Scales]]] = MappingProxyType(
    {
        "Q4_0": (_nibbles, _one_scale),
        "Q4_1": (_nibbles, _added_min),
        "Q5_0": (_q5_codes, _one_scale),
        "Q5_1": (_q5_codes, _added_min),
        "Q8_0": (_bytes, _one_scale),
        "Q2_K": (_q2_k_codes, _q2_k_scales),
        "Q3_K": (_q3_k_codes, _q3_k_scales),
        "Q4_K": (_q4_k_codes, _six_bit_scales),
        "Q5_K": (_q5_k_codes, _six_bit_scales),
        "Q6_K": (_q6_k_codes, _signed_scales),
        "IQ4_NL": (_nibbles, _one_scale),
        "IQ4_XS": (_nibbles, _iq4_xs_scales),
        "MXFP4": (_nibbles, _one_byte),
        "NVFP4": (_nvfp4_codes, _nvfp4_scales),
        NVFP4_SCALED: (_nvfp4_codes, _nvfp4_scales),
        "TQ1_0": (_tq1_0_codes, _one_scale),
        "TQ2_0": (_two_bit_runs, _one_scale),
        "Q1_0": (partial(_neighbours, bits=1), _one_scale),
        "Q2_0": (partial(_neighbours, bits=2), _one_scale),
    }
)
"""(function that reads codes, function that reads scales) of each format."""

_UNPACK_BOOK: Mapping[str, Callable[[BlockFormat, Fields], Groups]] = MappingProxyType(
    {
        "IQ2_XXS": _unpack_iq2_xxs,
        "IQ2_XS": _unpack_iq2_xs,
        "IQ2_S": _unpack_iq2_s,
        "IQ3_XXS": _unpack_iq3_xxs,
        "IQ3_S": _unpack_iq3_s,
        "IQ1_S": _unpack_iq1_s,
        "IQ1_M": _unpack_iq1_m,
    }
)
