"""Rows grouped by expert: which rows each expert computes, and the arguments of the kernels over groups.

The T rows of a step have k experts each. The T * k slots, numbered row by row, are sorted by expert; a slot's index in
that order is its place. The slots of one expert are a group, or several if they are many. A kernel over groups is
launched with tasks for the most groups possible; surplus tasks return at once. A slot whose expert is not here, but
computed by another device, has the place -1: it is in no group, and adds nothing.
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
"""The table, in int64: a header (groups, blocks), then per group an entry (expert, first place, places, first
block).
"""


@dataclass
class GroupArguments(Arguments):
    """experts: int32 [slots]. order, places: int64 [slots]. table: int64. All are addresses.

    first, count: the experts that are here, by their numbers; most: places per group; block_rows: places per block.
    """

    experts: int
    slots: int
    first: int
    count: int
    most: int
    block_rows: int
    order: int
    places: int
    table: int


@dataclass
class SpreadArguments(Arguments):
    """Rows of `row_bytes` bytes, each copied to its `used` places: int64 [T, used]."""

    rows: int
    row_bytes: int
    places: int
    used: int
    out: int


@dataclass
class PackGroupsArguments(Arguments):
    """fp32 rows x to pack group by group.

    order: the slot at each place, where x has one row per `used` slots; 0: x has one row per place. block_bytes:
    packed bytes of a block of `block_rows` rows over all columns; panel_bytes: over DEPTH columns. kernel packs one
    such panel.
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
    """The matmul of each group with its expert's weights, in `tasks` tasks per group, of `task_rows` weight rows.

    addresses: int64, of the experts' weights. bias: fp32, bias_stride bytes between experts. read_first: 1 if a task
    reads its weights before it multiplies. matmul: the arguments that groups share; `packed` and `y` are those of the
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
class ExpertSlots:
    """A step's slots by expert.

    order: int64 [T, k], the slot at each place. places: int64 [T, k], the place of each slot. table: int64, HEAD and
    GROUP for each group.
    """

    order: Tensor
    places: Tensor
    table: Tensor

    @property
    def slots(self) -> int:
        return self.order.numel()

    @property
    def used(self) -> int:
        return self.order.shape[1]

    @property
    def single_places(self) -> bool:
        """Whether every group has one place, as with a single row."""
        return self.order.shape[0] == 1

    @classmethod
    def empty(cls, rows: int, used: int) -> ExpertSlots:
        """Uninitialised groups of `rows` rows with `used` experts each."""
        order, places = torch.empty(2, rows, used, dtype=torch.int64)
        return cls(order, places, torch.empty(HEAD + GROUP * rows * used, dtype=torch.int64))

    def launch(self, experts: Tensor, held: range, most: int = 1 << 40, block_rows: int = 1) -> Launch:
        """The kernel, of one task, that fills this in from experts int32 [T, k], of which `held` are here.

        A group has at most `most` places, in blocks of `block_rows`.
        """
        arguments = GroupArguments(
            *(experts.data_ptr(), self.slots, held.start, len(held), most, block_rows),
            order=self.order.data_ptr(),
            places=self.places.data_ptr(),
            table=self.table.data_ptr(),
        )
        return Launch(group_kernel(), arguments, 1, keep=(experts, self))
