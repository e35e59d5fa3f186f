"""The search for scales and minimums on the CPU, compiled; defined in kernels/quantize/minimums.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.cpu.quantize.launch import LANES, BlockArguments, BlockInputs, run_here
from quengine.kernels.cpu.runtime.kernel_table import range_search_kernel
from quengine.kernels.quantize.minimums import RangeFits


@dataclass
class RangeSearchArguments(BlockArguments):
    """Also the addresses of what is found.

    codes         uint8 [group, groups, blocks]
    d, dmin       int16 [blocks]: bits of fp16
    sub, sub_min  uint8 [groups, blocks]; unused by types without sub-scales
    """

    codes: int
    d: int
    dmin: int
    sub: int
    sub_min: int


def fit_ranges(fmt: BlockFormat, rows: Tensor, importance: Tensor | None) -> RangeFits:
    """As `minimums.fit_ranges`, with the same bits."""
    inputs, groups = BlockInputs(fmt, rows, importance), fmt.block // fmt.group
    count, blocks = inputs.count, inputs.blocks
    codes = torch.empty((fmt.group, groups, blocks), dtype=torch.uint8)
    d, dmin = (torch.empty(blocks, dtype=torch.float16) for _ in range(2))
    sub, sub_min = (torch.empty((groups, blocks), dtype=torch.uint8) for _ in range(2))
    arguments = RangeSearchArguments(
        *inputs.fields(), *(each.data_ptr() for each in (codes, d, dmin, sub, sub_min))
    )
    run_here(range_search_kernel, fmt.name, arguments, blocks // LANES)
    subs = (sub[:, :count], sub_min[:, :count]) if fmt.sub_scale_bits else (None, None)
    return RangeFits(codes[..., :count], d[:count], dmin[:count], *subs)
