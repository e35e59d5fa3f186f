"""Stored integers and scales as the bytes of blocks, the inverse of `block_formats.unpack`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from quengine.kernels.block_formats import Groups


def pack(groups: Groups) -> Tensor:
    """The rows of blocks that `unpack` makes these groups of: uint8 [R, row_bytes], on the groups' device."""
    fmt = groups.format
    rows = groups.codes.shape[0]
    codes = groups.codes.view(torch.uint8).reshape(rows, -1, fmt.block)
    fields = _PACK[fmt.name](groups, codes)
    blocks = torch.cat([fields[name].reshape(rows, codes.shape[1], -1) for name in fmt.layout], -1)
    return blocks.reshape(rows, -1)


def _bytes(half: Tensor) -> Tensor:
    """fp16 [R, B] as bytes [R, B, 2]."""
    return half.unsqueeze(-1).contiguous().view(torch.uint8)


def _blocks(values: Tensor, groups: Groups) -> Tensor:
    """Values of groups, [R, K/group], as uint8 [R, B, groups of a block]."""
    return values.view(torch.uint8).reshape(values.shape[0], -1, groups.format.block // groups.group)


def _planes(codes: Tensor, run: int, width: int) -> Tensor:
    """Codes of `width` bits, uint8 [R, B, n], as planes: `run` bytes hold 8/width runs of codes, low bits first."""
    rows, blocks, _ = codes.shape
    runs = (codes & ((1 << width) - 1)).reshape(rows, blocks, -1, 8 // width, run)
    packed = runs[..., 0, :].clone()
    for i in range(1, 8 // width):
        packed |= runs[..., i, :] << (i * width)
    return packed.reshape(rows, blocks, -1)


def _bits(codes: Tensor) -> Tensor:
    """A bit of each of 32 weights, uint8 [R, B, 32] of 0 and 1, as a little-endian field of four bytes."""
    rows, blocks, _ = codes.shape
    return _planes(codes.reshape(rows, blocks * 4, 8), 1, 1).reshape(rows, blocks, 4)


def _six_bit_pairs(sc: Tensor, mn: Tensor) -> Tensor:
    """Q4_K and Q5_K: as `block_formats._six_bit_pairs` reads them."""
    first = (sc[..., :4] & 63) | (sc[..., 4:] >> 4) << 6
    second = (mn[..., :4] & 63) | (mn[..., 4:] >> 4) << 6
    third = (sc[..., 4:] & 15) | (mn[..., 4:] & 15) << 4
    return torch.cat([first, second, third], -1)


def _scale_and_min(groups: Groups) -> tuple[Tensor, Tensor]:
    assert groups.sc is not None and groups.mn is not None
    return _blocks(groups.sc, groups), _blocks(groups.mn, groups)


def _signed_scales(groups: Groups) -> Tensor:
    """Six-bit sub-scales with their offset of 32, uint8 [R, B, groups]."""
    assert groups.sc is not None
    return _blocks(groups.sc + 32, groups)


def _halves(groups: Groups, **more: Tensor) -> dict[str, Tensor]:
    fields = {"d": groups.d if groups.d.dtype == torch.uint8 else _bytes(groups.d), **more}
    if groups.dmin is not None:
        min_name = "min" if "min" in groups.format.layout else "dmin"
        fields[min_name] = _bytes(-groups.dmin if min_name == "min" else groups.dmin)
    return fields


def _pack_nibbles(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    return _halves(groups, codes=_planes(codes, 16, 4))


def _pack_q5(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    return _halves(groups, high=_bits(codes >> 4), codes=_planes(codes, 16, 4))


def _pack_q8(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    return _halves(groups, codes=codes)


def _pack_q2_k(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    sc, mn = _scale_and_min(groups)
    return _halves(groups, scales=sc | mn << 4, codes=_planes(codes, 32, 2))


def _pack_q3_k(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    sc = _signed_scales(groups)
    scales = torch.cat([_planes(sc, 8, 4), _planes(sc >> 4, 4, 2)], -1)
    return _halves(groups, high=_planes(codes >> 2, 32, 1), codes=_planes(codes, 32, 2), scales=scales)


def _pack_q4_k(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    return _halves(groups, scales=_six_bit_pairs(*_scale_and_min(groups)), codes=_planes(codes, 32, 4))


def _pack_q5_k(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    return _pack_q4_k(groups, codes) | {"high": _planes(codes >> 4, 32, 1)}


def _pack_q6_k(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    assert groups.sc is not None
    scales = _blocks(groups.sc, groups)
    return _halves(groups, codes=_planes(codes, 64, 4), high=_planes(codes >> 4, 32, 2), scales=scales)


def _pack_iq4_xs(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    sc = _signed_scales(groups)
    high, low = _planes(sc >> 4, 1, 2), _planes(sc, 1, 4)
    return _halves(groups, scales_high=high, scales=low, codes=_planes(codes, 16, 4))


_PACK: Mapping[str, Callable[[Groups, Tensor], dict[str, Tensor]]] = MappingProxyType(
    {
        "Q4_0": _pack_nibbles,
        "Q4_1": _pack_nibbles,
        "Q5_0": _pack_q5,
        "Q5_1": _pack_q5,
        "Q8_0": _pack_q8,
        "Q2_K": _pack_q2_k,
        "Q3_K": _pack_q3_k,
        "Q4_K": _pack_q4_k,
        "Q5_K": _pack_q5_k,
        "Q6_K": _pack_q6_k,
        "IQ4_NL": _pack_nibbles,
        "IQ4_XS": _pack_iq4_xs,
        "MXFP4": _pack_nibbles,
    }
)
PACKED = tuple(_PACK)
"""Names of the quantized types that `pack` writes."""
