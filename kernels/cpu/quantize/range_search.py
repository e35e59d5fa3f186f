"""The search for scales and minimums on the CPU, compiled; defined in kernels/quantize/minimums.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.cpu.quantize.launch import LANES, in_lanes, run_here
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import range_search_kernel
from quengine.kernels.quantize.minimums import RangeFits


@dataclass
class RangeSearchArguments(Arguments):
    """Addresses, of tensors whose last dimension are `blocks`, a multiple of 16; a task has 16 of them.

    x, weights    fp32 [group, groups, blocks]
    codes         uint8 [group, groups, blocks]
    d, dmin       int16 [blocks]: bits of fp16
    sub, sub_min  uint8 [groups, blocks]; unused by types without sub-scales
    """

    x: int
    weights: int
    blocks: int
    codes: int
    d: int
    dmin: int
    sub: int
    sub_min: int


def fit_ranges(fmt: BlockFormat, x: Tensor, weights: Tensor) -> RangeFits:
    """As `minimums.fit_ranges`, with the same bits."""
    count = x.shape[2]
    x, weights = in_lanes(x), in_lanes(weights)
    blocks = x.shape[2]
    codes = torch.empty(x.shape, dtype=torch.uint8)
    d, dmin = (torch.empty(blocks, dtype=torch.float16) for _ in range(2))
    sub, sub_min = (torch.empty(x.shape[1:], dtype=torch.uint8) for _ in range(2))
    arguments = RangeSearchArguments(
        x.data_ptr(),
        weights.data_ptr(),
        blocks,
        *(each.data_ptr() for each in (codes, d, dmin, sub, sub_min)),
    )
    run_here(range_search_kernel, fmt.name, arguments, blocks // LANES)
    subs = (sub[:, :count], sub_min[:, :count]) if fmt.sub_scale_bits else (None, None)
    return RangeFits(codes[..., :count], d[:count], dmin[:count], *subs)
