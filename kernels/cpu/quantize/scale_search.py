"""The search for scales of types without minimums on the CPU, compiled; defined in kernels/quantize/scales.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.cpu.quantize.launch import LANES, in_lanes, run_here
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import scale_search_kernel
from quengine.kernels.quantize.scales import ScaleFits


@dataclass
class ScaleSearchArguments(Arguments):
    """Addresses, of tensors whose last dimension are `blocks`, a multiple of 16; a task has 16 of them.

    x, weights  fp32 [group, groups, blocks]
    codes       uint8 [group, groups, blocks]
    d           int16 [blocks]: bits of fp16
    sub         int8 [groups, blocks]; unused by types without sub-scales
    """

    x: int
    weights: int
    blocks: int
    codes: int
    d: int
    sub: int


def fit_scales(fmt: BlockFormat, x: Tensor, weights: Tensor) -> ScaleFits:
    """As `scales.fit_scales`, with the same bits."""
    count = x.shape[2]
    x, weights = in_lanes(x), in_lanes(weights)
    blocks = x.shape[2]
    codes = torch.empty(x.shape, dtype=torch.uint8)
    d = torch.empty(blocks, dtype=torch.float16)
    sub = torch.empty(x.shape[1:], dtype=torch.int8)
    arguments = ScaleSearchArguments(
        x.data_ptr(), weights.data_ptr(), blocks, *(each.data_ptr() for each in (codes, d, sub))
    )
    run_here(scale_search_kernel, fmt.name, arguments, blocks // LANES)
    return ScaleFits(codes[..., :count], d[:count], sub[:, :count] if fmt.sub_scale_bits else None)
