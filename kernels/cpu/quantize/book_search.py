"""The search for entries of codebooks on the CPU, compiled; defined in kernels/quantize/books.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.cpu.quantize.launch import LANES, BlockArguments, BlockInputs, run_here
from quengine.kernels.cpu.runtime.kernel_table import book_search_kernel
from quengine.kernels.quantize.books import BookFits


@dataclass
class BookSearchArguments(BlockArguments):
    """Also the addresses of what is found.

    index       int16 [vectors of a group, groups, blocks]: numbers of entries
    signs       uint8 [group / 8, groups, blocks]: bits of negative weights; unused by IQ1
    d           int16 [blocks]: bits of fp16
    sub         uint8 [groups, blocks]: the n of sub-scales 2n + 1
    """

    index: int
    signs: int
    d: int
    sub: int


def fit_books(fmt: BlockFormat, rows: Tensor, importance: Tensor | None) -> BookFits:
    """As `books.fit_books`, with the same bits."""
    inputs, groups = BlockInputs(fmt, rows, importance), fmt.block // fmt.group
    count, blocks = inputs.count, inputs.blocks
    index = torch.empty((fmt.group // fmt.width, groups, blocks), dtype=torch.int16)
    signs = torch.empty((fmt.group // 8, groups, blocks), dtype=torch.uint8)
    d = torch.empty(blocks, dtype=torch.float16)
    sub = torch.empty((groups, blocks), dtype=torch.uint8)
    arguments = BookSearchArguments(*inputs.fields(), *(each.data_ptr() for each in (index, signs, d, sub)))
    run_here(book_search_kernel, fmt.name, arguments, blocks // LANES)
    return BookFits(index[..., :count], signs[..., :count], d[:count], sub[..., :count])
