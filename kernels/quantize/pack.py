"""Stored integers and scales as the bytes of blocks, the inverse of `block_formats.unpack`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from quengine.kernels.block_formats import Groups
from quengine.kernels.codebooks import IQ1_ENTRIES


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


def _pack_plane(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    run = 32 if groups.format.name == "TQ2_0" else 1
    return _halves(groups, codes=_planes(codes, run, groups.format.bits))


def _pack_tq1_0(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    runs = torch.split(codes, [160, 80, 16], -1)
    first, second, high = (_fractions(part, count) for part, count in zip(runs, (5, 5, 4), strict=True))
    return _halves(groups, codes=torch.cat([first, second], -1), high=high)


def _fractions(codes: Tensor, count: int) -> Tensor:
    """Digits in base 3, [R, B, count*n] digit by digit, as bytes: the least of which byte/256 begins with them."""
    rows, blocks, _ = codes.shape
    places = codes.reshape(rows, blocks, count, -1).int()
    powers = torch.tensor([3 ** (4 - i) for i in range(count)], dtype=torch.int32, device=codes.device)
    number = (places * powers.view(-1, 1)).sum(-2, dtype=torch.int32)
    return ((number * 256 + 242) // 243).to(torch.uint8)


def _pack_nvfp4(groups: Groups, codes: Tensor) -> dict[str, Tensor]:
    return {"d": groups.d, "codes": _planes(codes, 8, 4)}


def _entries(groups: Groups) -> Tensor:
    """Indices of entries, int32 [R, B, n]."""
    assert groups.index is not None
    return groups.index.int().reshape(len(groups.codes), -1, groups.format.block // groups.format.width)


def _signs(groups: Groups) -> Tensor:
    """A bit for each weight, uint8 [R, B, 32]."""
    assert groups.signs is not None
    return groups.signs.reshape(len(groups.codes), -1, groups.format.block // 8)


def _odd_scales(groups: Groups) -> Tensor:
    """n of the sub-scales 2n + 1: uint8 [R, B, groups]."""
    assert groups.sc is not None
    return _blocks(groups.sc, groups) >> 1


def _join_fields(values: Tensor, width: int, count: int) -> Tensor:
    """`count` neighbours of `width` bits as one integer, the first lowest: int32 [R, B, n / count]."""
    shifts = torch.arange(0, width * count, width, dtype=torch.int32, device=values.device)
    return (values.int().view(*values.shape[:-1], -1, count) << shifts).sum(-1, dtype=torch.int32)


def _word_bytes(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Little-endian words of integers: uint8 [R, B, bytes]."""
    return words.to(dtype).contiguous().view(torch.uint8)


def _signs_and_scales(groups: Groups) -> Tensor:
    """Seven of the signs of each eight weights, four times, and the sub-scale of the 32: int32 [R, B, 8]."""
    return _join_fields(_signs(groups) & 127, 7, 4) | _odd_scales(groups).int() << 28


def _pack_iq2_xxs(groups: Groups, _codes: Tensor) -> dict[str, Tensor]:
    index, words = _entries(groups).to(torch.uint8), _word_bytes(_signs_and_scales(groups), torch.int32)
    fours = [each.view(*each.shape[:2], 8, 4) for each in (index, words)]
    return _halves(groups, index=torch.cat(fours, -1).flatten(-2))


def _pack_iq2_xs(groups: Groups, _codes: Tensor) -> dict[str, Tensor]:
    words = _entries(groups) | (_signs(groups).int() & 127) << 9
    scales = _join_fields(_odd_scales(groups), 4, 2)
    return _halves(groups, index=_word_bytes(words, torch.int16), scales=scales.to(torch.uint8))


def _pack_wide(groups: Groups, _codes: Tensor) -> dict[str, Tensor]:
    """IQ2_S and IQ3_S: eight bits of an index in one field, the others in another."""
    index = _entries(groups)
    width, count = (2, 4) if groups.format.name == "IQ2_S" else (1, 8)
    high, scales = _join_fields(index >> 8, width, count), _join_fields(_odd_scales(groups), 4, 2)
    return _halves(
        groups,
        index=(index & 255).to(torch.uint8),
        signs=_signs(groups),
        high=high.to(torch.uint8),
        scales=scales.to(torch.uint8),
    )


def _pack_iq3_xxs(groups: Groups, _codes: Tensor) -> dict[str, Tensor]:
    words = _word_bytes(_signs_and_scales(groups), torch.int32)
    return _halves(groups, index=_entries(groups).to(torch.uint8), signs=words)


def _pack_iq1_s(groups: Groups, _codes: Tensor) -> dict[str, Tensor]:
    index = _entries(groups)
    below, place = index // IQ1_ENTRIES, index % IQ1_ENTRIES
    high = _join_fields(place >> 8, 3, 4) | _odd_scales(groups).int() << 12 | below[..., ::4] << 15
    return _halves(groups, index=(place & 255).to(torch.uint8), high=_word_bytes(high, torch.int16))


def _pack_iq1_m(groups: Groups, _codes: Tensor) -> dict[str, Tensor]:
    index = _entries(groups)
    d = groups.d.view(torch.int16).int().unsqueeze(-1) >> torch.arange(0, 16, 4, device=index.device) & 15
    scales = _join_fields(_odd_scales(groups), 3, 4) | d << 12
    return {
        "index": (index & 255).to(torch.uint8),
        "high": _join_fields(index >> 8, 4, 2).to(torch.uint8),
        "scales": _word_bytes(scales, torch.int16),
    }


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
        "NVFP4": _pack_nvfp4,
        "IQ2_XXS": _pack_iq2_xxs,
        "IQ2_XS": _pack_iq2_xs,
        "IQ2_S": _pack_wide,
        "IQ3_XXS": _pack_iq3_xxs,
        "IQ3_S": _pack_wide,
        "IQ1_S": _pack_iq1_s,
        "IQ1_M": _pack_iq1_m,
        "TQ1_0": _pack_tq1_0,
        "TQ2_0": _pack_plane,
        "Q1_0": _pack_plane,
        "Q2_0": _pack_plane,
    }
)
PACKED = tuple(_PACK)
"""Names of the quantized types that `pack` writes."""
