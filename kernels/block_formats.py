"""The GGUF block formats as one table, and their torch unpacking: the meaning of a weight row's bytes.

A row of K weights is K / `block` blocks of `nbytes` bytes. Groups of `group` weights in it share a scale:

    w = s*q - m      s = d*sc (d where the format has no sub-scales),  m = dmin*mn (dmin without sub-minimums)

q is `code - offset`, or `table[code]` for the 4-bit formats with a non-uniform grid. `Groups` keeps the stored
integers (codes, sc, mn) and 16-bit scales (d, dmin) unchanged: any packed layout can be made from it. References: the
`gguf` package (`gguf.quants`, to which `dequantize` is bit-exact) and ggml's `ggml-common.h`; MXFP4 is the OCP
Microscaling Formats specification 1.0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# Entries are integers; MXFP4's are E2M1 values times two, and its scale is halved.
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
    """`fields`: names and sizes in bytes, in order. `codes`: the low bits of the codes; `high`: their upper bits."""
    layout, start = {}, 0
    for field in fields.split(", "):
        name_of, size = field.split()
        layout[name_of] = (start, start + int(size))
        start += int(size)
    has_min = "min" in layout or "dmin" in layout
    return BlockFormat(name, block, start, MappingProxyType(layout), group, bits, has_min=has_min, **more)


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
)
FORMATS: Mapping[str, BlockFormat] = MappingProxyType({fmt.name: fmt for fmt in _TABLE})


@dataclass(frozen=True)
class Groups:
    """The stored integers and scales of R rows of K weights, on the device of the bytes they were read from.

    codes  uint8 [R, K] in weight order (Q8_0: int8), see `BlockFormat.offset` and `.table`
    d      fp16 [R, K/block]; for MXFP4 uint8, the E8M0 exponent e of the scale 2^(e-128)
    sc     [R, K/group] sub-scales or None: uint8 (Q2_K 4 bits, Q4_K and Q5_K 6 bits), int8 where signed
           (Q3_K and IQ4_XS -32..31, Q6_K 8 bits)
    dmin   fp16 [R, K/block] or None; Q4_1 and Q5_1 store an added minimum: negated here, so w = d*q - dmin
    mn     uint8 [R, K/group] sub-minimums or None (same bits as sc)
    """

    format: BlockFormat
    codes: Tensor
    d: Tensor
    sc: Tensor | None = None
    dmin: Tensor | None = None
    mn: Tensor | None = None

    @property
    def group(self) -> int:
        return self.format.group

    def super_scales(self) -> Tensor:
        """d as fp32 [R, K/block], exact."""
        return _e8m0_half(self.d) if self.d.dtype == torch.uint8 else self.d.float()

    def scales(self) -> Tensor:
        """s of w = s*q - m: fp32 [R, K/group]; exact, a product of 11 by at most 8 bits."""
        return _times(self.super_scales(), self.sc)

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
    if fmt.name not in _UNPACK:
        raise ValueError(f"{fmt.name} stores plain floats: it has no groups to unpack")
    rows, cols = data.shape[0], fmt.cols(data.shape[1])
    blocks = data.reshape(rows, cols // fmt.block, fmt.nbytes)
    return _UNPACK[fmt.name](fmt, {name: blocks[..., a:b] for name, (a, b) in fmt.layout.items()})


def dequantize(fmt: BlockFormat, data: Tensor) -> Tensor:
    """The weights of uint8 rows [R, row_bytes] as fp32 [R, K], bit-exact with `gguf.quants.dequantize`."""
    if fmt.is_quantized:
        return unpack(fmt, data).dequantize()
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[fmt.name]
    fmt.cols(data.shape[1])
    return _aligned(data).view(dtype).float()


def _aligned(data: Tensor) -> Tensor:
    """A copy if the bytes do not start or step at a multiple of 4, as a wider view requires."""
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


def _unpack_q4(fmt: BlockFormat, f: Mapping[str, Tensor]) -> Groups:
    # Q4_0, Q4_1, IQ4_NL, MXFP4: low nibbles are weights 0..15 of the block, high nibbles 16..31.
    d = f["d"].squeeze(-1) if fmt.name == "MXFP4" else _half(f["d"])
    dmin = -_half(f["min"]) if fmt.has_min else None
    return Groups(fmt, _join(_bit_planes(f["codes"], 16, 4)), d, dmin=dmin)


def _unpack_q5(fmt: BlockFormat, f: Mapping[str, Tensor]) -> Groups:
    codes = _bit_planes(f["codes"], 16, 4) | (_high_bits_q5(f["high"]) << 4)
    dmin = -_half(f["min"]) if fmt.has_min else None
    return Groups(fmt, _join(codes), _half(f["d"]), dmin=dmin)


def _unpack_q8(fmt: BlockFormat, f: Mapping[str, Tensor]) -> Groups:
    return Groups(fmt, _join(f["codes"]).view(torch.int8), _half(f["d"]))


def _unpack_q2_k(fmt: BlockFormat, f: Mapping[str, Tensor]) -> Groups:
    codes = _bit_planes(f["codes"], 32, 2)
    sc, mn = f["scales"] & 15, f["scales"] >> 4
    return Groups(fmt, _join(codes), _half(f["d"]), _join(sc), _half(f["dmin"]), _join(mn))


def _unpack_q3_k(fmt: BlockFormat, f: Mapping[str, Tensor]) -> Groups:
    # The mask bit is the third bit of the code: q = code - 4. Sub-scales: low nibbles of 8 bytes, then their
    # high nibbles, with the top two bits in four bytes, as planes of four.
    codes = _bit_planes(f["codes"], 32, 2) | (_bit_planes(f["high"], 32, 1) << 2)
    low, top = f["scales"][..., 0:8], f["scales"][..., 8:12]
    sc = (_bit_planes(low, 8, 4) | (_bit_planes(top, 4, 2) << 4)).view(torch.int8) - 32
    return Groups(fmt, _join(codes), _half(f["d"]), _join(sc))


def _unpack_q4_k(fmt: BlockFormat, f: Mapping[str, Tensor]) -> Groups:
    sc, mn = _six_bit_pairs(f["scales"])
    return Groups(fmt, _join(_bit_planes(f["codes"], 32, 4)), _half(f["d"]), sc, _half(f["dmin"]), mn)


def _unpack_q5_k(fmt: BlockFormat, f: Mapping[str, Tensor]) -> Groups:
    codes = _bit_planes(f["codes"], 32, 4) | (_bit_planes(f["high"], 32, 1) << 4)
    sc, mn = _six_bit_pairs(f["scales"])
    return Groups(fmt, _join(codes), _half(f["d"]), sc, _half(f["dmin"]), mn)


def _unpack_q6_k(fmt: BlockFormat, f: Mapping[str, Tensor]) -> Groups:
    # Each half of the block (128 weights): 64 bytes of nibbles, 32 bytes of four 2-bit planes.
    codes = _bit_planes(f["codes"], 64, 4) | (_bit_planes(f["high"], 32, 2) << 4)
    return Groups(fmt, _join(codes), _half(f["d"]), _join(f["scales"]).view(torch.int8))


def _unpack_iq4_xs(fmt: BlockFormat, f: Mapping[str, Tensor]) -> Groups:
    # 6-bit sub-scales: low nibbles two to a byte; the top two bits of scale i are bits 2i, 2i+1 of 16 bits.
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=f["d"].device)
    top = ((f["scales_high"].unsqueeze(-1) >> shifts) & 3).flatten(-2)
    sc = (_bit_planes(f["scales"], 1, 4) | (top << 4)).view(torch.int8) - 32
    return Groups(fmt, _join(_bit_planes(f["codes"], 16, 4)), _half(f["d"]), _join(sc))


_UNPACK: Mapping[str, Callable[[BlockFormat, Mapping[str, Tensor]], Groups]] = MappingProxyType(
    {
        "Q4_0": _unpack_q4,
        "Q4_1": _unpack_q4,
        "Q5_0": _unpack_q5,
        "Q5_1": _unpack_q5,
        "Q8_0": _unpack_q8,
        "Q2_K": _unpack_q2_k,
        "Q3_K": _unpack_q3_k,
        "Q4_K": _unpack_q4_k,
        "Q5_K": _unpack_q5_k,
        "Q6_K": _unpack_q6_k,
        "IQ4_NL": _unpack_q4,
        "IQ4_XS": _unpack_iq4_xs,
        "MXFP4": _unpack_q4,
    }
)
