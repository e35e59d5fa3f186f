"""What the search kernels read. They run in the calling thread, as quantizing has threads of its own."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.quantize.importance import by_row_mean, mean_square_of_rows

LANES = 16
"""Blocks of a task."""

_compiling = Lock()


@dataclass
class BlockArguments(Arguments):
    """Addresses, and numbers of blocks.

    rows         fp32 weights of `count` blocks
    blocks       a multiple of 16, the last dimension of what is found
    importance   fp32 [block, period + 15]: of the columns of a row of `period` blocks, whose first 15 blocks follow
                 again after the last; 0: there are none
    mean_square  fp32 [blocks], of each block's row; 0 where it is the block's own
    """

    rows: int
    count: int
    blocks: int
    importance: int
    period: int
    mean_square: int


class BlockInputs:
    """The fields of `BlockArguments` for fp32 rows [R, K] and their importances, [R or 1, K] or None, which it keeps
    alive."""

    def __init__(self, fmt: BlockFormat, rows: Tensor, importance: Tensor | None) -> None:
        self._rows = rows.contiguous()
        self.count = rows.numel() // fmt.block
        self.blocks = self.count + -self.count % LANES
        self.period = 0 if importance is None else importance.numel() // fmt.block
        self._importance = self._mean_square = torch.empty(0)
        if importance is not None:
            columns = torch.arange(self.period + LANES - 1) % self.period
            self._importance = importance.reshape(-1, fmt.block).t()[:, columns].contiguous()
            if by_row_mean(fmt):
                self._mean_square = pad(mean_square_of_rows(fmt, rows), (0, self.blocks - self.count))

    def fields(self) -> tuple[int, ...]:
        importance, mean_square = (
            each.data_ptr() if each.numel() else 0 for each in (self._importance, self._mean_square)
        )
        return (
            *(self._rows.data_ptr(), self.count, self.blocks),
            *(importance, self.period, mean_square),
        )


def run_here(kernel: Callable[[str], int], name: str, arguments: Arguments, tasks: int) -> None:
    """Runs all tasks of the kernel of a format, without the GIL."""
    with _compiling:  # one thread compiles it, the others wait for that
        call = _callable(kernel(name))
    memory = array("q", arguments.to_bytes())
    for task in range(tasks):
        call(memory.buffer_info()[0], task)


@cache
def _callable(kernel: int) -> Any:
    return CFUNCTYPE(None, c_int64, c_int64)(kernel)
