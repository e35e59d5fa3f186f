"""Types whose scale is a formula of the block, on the CPU, compiled; defined in kernels/quantize/plain.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.cpu.quantize.launch import run_here
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import plain_blocks_kernel


@dataclass
class PlainBlocksArguments(Arguments):
    """x: the address of fp32 weights, block after block. out: the address of the blocks' bytes."""

    x: int
    blocks: int
    out: int


def plain_blocks(fmt: BlockFormat, rows: Tensor) -> Tensor:
    """As `plain.plain_blocks`, with the same bytes."""
    rows = rows.contiguous()
    out = torch.empty((len(rows), fmt.row_bytes(rows.shape[1])), dtype=torch.uint8)
    arguments = PlainBlocksArguments(rows.data_ptr(), rows.numel() // fmt.block, out.data_ptr())
    run_here(plain_blocks_kernel, fmt.name, arguments, 1)
    return out
