"""Rows by expert: which rows each expert computes, and the prompt kernels run over such groups.

The T rows of a step have k experts each; the T * k slots, numbered row by row, are sorted by expert. Slots of one
expert are a group, or several where they are many. A kernel over groups has tasks for as many as there can be, and
those beyond the last end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.gemm.tiles import MatmulArguments
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import group_kernel
from quengine.kernels.cpu.runtime.threads import Launch

HEAD, GROUP = 2, 4
"""int64 in front of the table of groups, the numbers of groups and of blocks; and of a group: expert, first of its
places, places, first of its blocks."""


@dataclass
class GroupArguments(Arguments):
    """experts: int32 [slots]. order, places: int64 [slots]. table: int64; all at addresses.

    most: places of a group; block_rows: places of a block.
    """

    experts: int
    slots: int
    count: int
    most: int
    block_rows: int
    order: int
    places: int
    table: int


@dataclass
class SpreadArguments(Arguments):
    """Rows of `row_bytes` bytes, of which each goes to `used` places: int64 [T, used]."""

    rows: int
    row_bytes: int
    places: int
    used: int
    out: int


@dataclass
class PackGroupsArguments(Arguments):
    """fp32 rows, in the order of the groups, or those of the slots in `order`, `used` slots a row; 0: in order.

    block_bytes: of a block of `block_rows` packed rows over all columns; panel_bytes: of one over DEPTH columns. kernel
    packs such a panel.
    """

    table: int
    order: int
    used: int
    x: int
    x_stride: int
    cols: int
    block_rows: int
    packed: int
    block_bytes: int
    panel_bytes: int
    kernel: int


@dataclass
class GroupedMatmulArguments(Arguments):
    """A matmul of each group with its expert's weights, in `tasks` tasks a group, of `task_rows` weight rows.

    addresses: int64, of the experts' weights. bias: fp32, bias_stride bytes from an expert to the next. read_first: 1:
    a task's weights are read before they are multiplied. matmul: what is not of a group, with `packed` and `y` of the
    first.
    """

    table: int
    tasks: int
    addresses: int
    bias: int
    bias_stride: int
    block_bytes: int
    task_rows: int
    read_first: int
    kernel: int
    matmul: MatmulArguments


@dataclass(frozen=True)
class Groups:
    """Where a step's slots lie by expert.

    order: int64 [T, k], the slot at each place. places: int64 [T, k], the place of each slot. table: int64, HEAD and
    GROUP for each group. repeats: of a single row, several slots may have one expert.
    """

    order: Tensor
    places: Tensor
    table: Tensor
    repeats: bool = False

    @property
    def slots(self) -> int:
        return self.order.numel()

    @property
    def used(self) -> int:
        return self.order.shape[1]

    @property
    def single_places(self) -> bool:
        """Whether each group has one place: the groups of a single row."""
        return self.order.shape[0] == 1 and not self.repeats

    @classmethod
    def empty(cls, rows: int, used: int, repeats: bool = False) -> Groups:
        """For so many rows, each with `used` experts."""
        order, places = torch.empty(2, rows, used, dtype=torch.int64)
        return cls(order, places, torch.empty(HEAD + GROUP * rows * used, dtype=torch.int64), repeats)

    def launch(self, experts: Tensor, count: int, most: int = 1 << 40, block_rows: int = 1) -> Launch:
        """The kernel that fills this in, one task: of experts int32 [T, k], below `count`.

        A group has at most `most` places, and blocks of so many of them.
        """
        arguments = GroupArguments(
            *(experts.data_ptr(), self.slots, count, most, block_rows),
            order=self.order.data_ptr(),
            places=self.places.data_ptr(),
            table=self.table.data_ptr(),
        )
        return Launch(group_kernel(), arguments, 1, keep=(experts, self))
