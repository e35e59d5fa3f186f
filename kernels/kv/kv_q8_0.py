"""Rows of a q8_0 KV cache: the torch definition of how they are stored and read.

A head's row is cut into groups of 32; a group holds 32 int8 codes and one fp16 scale, `x = scale * code`. Codes and
scales are in two tensors, so that the codes of a tile load as one aligned run.
"""

import torch

from quengine.kernels.kv.cache_types import Q8_0_GROUP


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., head_dim] of any float dtype -> codes int8 [..., head_dim], scales fp16 [..., head_dim / 32].

    A group's scale is max|x| / 127. Its codes are x / scale, rounded half to even, with the fp32 scale before it is
    rounded to fp16: as in ggml's Q8_0, except for the rounding of exact halves.
    """
    groups = x.float().reshape(*x.shape[:-1], -1, Q8_0_GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 127.0
    codes = torch.where(scales > 0, groups / scales, 0.0).round().to(torch.int8)
    return codes.flatten(-2), scales.squeeze(-1).to(torch.float16)


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes int8 [..., head_dim], scales [..., head_dim / 32] -> the fp32 values that they encode."""
    groups: torch.Tensor = (
        codes.float().reshape(*codes.shape[:-1], -1, Q8_0_GROUP) * scales.float()[..., None]
    )
    return groups.flatten(-2)
