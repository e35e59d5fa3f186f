"""Rows of a q8_0 or q4_0 KV cache: the torch definition of how they are stored and read.

A head's row is cut into groups of 32; a group has 32 codes and one fp16 scale, `x = scale * code`. Codes and scales are
in two tensors, so that the codes of a tile load as one aligned run. q8_0 has int8 codes. q4_0 has codes from -8 to 7,
stored as 8 more in uint8: byte i of a group has code i in its low half and code i + 16 in its high half, as in ggml.
"""

import torch
from torch import Tensor

from quengine.kernels.kv.cache_types import CODE_GROUP

SCALE_STEP = 2.0**-7
"""The most by which two neighbouring scales of q4_0 differ, relative to the smaller one."""


def quantize_rows(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] of any float dtype -> codes [..., head_dim * bits / 8], scales fp16 [..., head_dim / 32]."""
    groups = x.float().reshape(*x.shape[:-1], -1, CODE_GROUP)
    codes, scales = _q8_0(groups) if bits == 8 else _q4_0(groups)
    return codes.flatten(-2), scales.squeeze(-1).to(torch.float16)


def _q8_0(groups: Tensor) -> tuple[Tensor, Tensor]:
    """A group's scale is max|x| / 127. Its codes are x / scale, rounded half to even, with the fp32 scale before it is
    rounded to fp16: as in ggml's Q8_0, except for the rounding of exact halves.
    """
    scales = groups.abs().amax(-1, keepdim=True) / 127.0
    return torch.where(scales > 0, groups / scales, 0.0).round().to(torch.int8), scales


def _q4_0(groups: Tensor) -> tuple[Tensor, Tensor]:
    """A group's scale is its largest value by magnitude, with its sign, over -8, as in ggml's Q4_0, rounded to 8 bits:
    a product of scale and code is then exact in fp16. Codes are x / scale, rounded half to even, at most 7."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = round_scales(torch.where(-low > high, low, high) / -8.0)
    codes = torch.where(scales != 0, groups / scales, 0.0).round().clamp(-8, 7).to(torch.int16) + 8
    near, far = codes[..., : CODE_GROUP // 2], codes[..., CODE_GROUP // 2 :]
    return (near | far << 4).to(torch.uint8), scales


def round_scales(scales: Tensor) -> Tensor:
    """fp32 of the nearest fp16, rounded again to a multiple of 8 of its last places, halves away from zero."""
    bits = scales.to(torch.float16).view(torch.int16)
    return (bits + 4 & ~7).view(torch.float16).float()


def unpack_codes(codes: Tensor) -> Tensor:
    """The codes of q4_0 rows, uint8 [..., head_dim / 2], as int8 [..., head_dim]; codes of q8_0 are returned as they
    are."""
    if codes.dtype == torch.int8:
        return codes
    packed = codes.reshape(*codes.shape[:-1], -1, CODE_GROUP // 2)
    return (torch.cat([packed & 15, packed >> 4], dim=-1).to(torch.int8) - 8).flatten(-2)


def dequantize_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """codes int8 [..., head_dim] or uint8 [..., head_dim / 2], scales [..., head_dim / 32] -> the fp32 values that they
    encode."""
    groups = unpack_codes(codes).float().reshape(*scales.shape, CODE_GROUP)
    return (groups * scales.float()[..., None]).flatten(-2)
