"""The search for scales of types without minimums on the CPU, compiled; defined in kernels/quantize/scales.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.cpu.quantize.launch import LANES, BlockArguments, BlockInputs, run_here
from quengine.kernels.cpu.runtime.kernel_table import scale_search_kernel
from quengine.kernels.quantize.scales import ScaleFits


@dataclass
class ScaleSearchArguments(BlockArguments):
    """Also the addresses of what is found.

    codes       uint8 [group, groups, blocks]
    d           int16 [blocks]: bits of fp16
    sub         int8 [groups, blocks]; unused by types without sub-scales
    """

    codes: int
    d: int
    sub: int


def fit_scales(fmt: BlockFormat, rows: Tensor, importance: Tensor | None) -> ScaleFits:
    """As `scales.fit_scales`, with the same bits."""
    inputs, groups = BlockInputs(fmt, rows, importance), fmt.block // fmt.group
    count, blocks = inputs.count, inputs.blocks
    codes = torch.empty((fmt.group, groups, blocks), dtype=torch.uint8)
    d = torch.empty(blocks, dtype=torch.float16)
    sub = torch.empty((groups, blocks), dtype=torch.int8)
    arguments = ScaleSearchArguments(*inputs.fields(), *(each.data_ptr() for each in (codes, d, sub)))
    run_here(scale_search_kernel, fmt.name, arguments, blocks // LANES)
    return ScaleFits(codes[..., :count], d[:count], sub[:, :count] if fmt.sub_scale_bits else None)
