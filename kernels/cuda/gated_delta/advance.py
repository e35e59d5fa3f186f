"""The states of a step that has verified drafts, carried over the rows that were accepted.

A program takes a sequence, a value head and some columns of its S, as `recurrence` does row by row, and gives the same
bits: it reads the queries, keys, values and gates that the step computed.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gated_delta.arithmetic import Net, delta_step, key_head_of
from quengine.kernels.cuda.gated_delta.recurrence import ROW_COLUMNS, row_warps, state_at
from quengine.kernels.cuda.gated_delta.rows import own_channels
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch


@DirectLaunch
@triton.jit(do_not_specialize=["table_stride", "rows"])
def _advance_kernel(
    qkv_ptr, gates_ptr, kept_ptr, position_ptr, table_ptr, accepted_ptr, history_ptr, memory_ptr,
    table_stride, rows, NET: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    D: tl.constexpr = NET.head_dim
    KEYS: tl.constexpr = NET.key_heads * D
    CHANNELS: tl.constexpr = 2 * KEYS + NET.value_heads * D
    head = tl.program_id(1)
    first = tl.program_id(2) * rows
    count = tl.load(accepted_ptr + tl.program_id(2)) + 1
    slot = tl.load(table_ptr + first * table_stride)
    if (count > 0) & (slot != 0):
        start = tl.load(position_ptr + first)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        place = state_at(memory_ptr, slot, head, 0, D, column, NET)
        memory = tl.load(place, mask=(slot != 0) & (start > 0), other=0.0)
        element = key_head_of(head, NET) * D + tl.arange(0, D)
        channel, inside = own_channels(CHANNELS, NET.value_heads, NET.head_dim // COLUMNS)
        history = history_ptr + slot.to(tl.int64) * (NET.ring * CHANNELS)
        for n in range(count):
            own = qkv_ptr + (first + n).to(tl.int64) * CHANNELS
            q = tl.load(own + element)
            k = tl.load(own + KEYS + element)
            v = tl.load(own + 2 * KEYS + head * D + column)
            gate = gates_ptr + (first + n) * (2 * NET.value_heads) + head
            kq = tl.sum(q * k, 0)
            memory, _ = delta_step(
                memory, q, k, kq, v, tl.exp(tl.load(gate)), tl.load(gate + NET.value_heads)
            )
            if n + NET.ring >= count:
                x = tl.load(kept_ptr + (first + n).to(tl.int64) * CHANNELS + channel, mask=inside, other=0.0)
                tl.store(history + (start + n) % NET.ring * CHANNELS + channel, x, mask=inside)
        tl.store(place, memory)


@dataclass(frozen=True)
class PendingNet:
    """`forward_batch.PendingStates` of a layer. qkv, gates: of `convolve`; kept: of `verify_by_rows`."""

    net: Net
    qkv: Tensor
    gates: Tensor
    kept: Tensor
    positions: Tensor
    block_tables: Tensor
    history: Tensor
    memory: Tensor
    pdl: bool

    def advance(self, accepted: Tensor) -> None:
        net, columns = self.net, min(ROW_COLUMNS, self.net.head_dim)
        _advance_kernel[(net.head_dim // columns, net.value_heads, len(accepted))](
            self.qkv, self.gates, self.kept, self.positions, self.block_tables, accepted, self.history, self.memory,
            self.block_tables.stride(0), len(self.qkv) // len(accepted),
            NET=net, COLUMNS=columns, PDL=self.pdl, num_warps=row_warps(net, columns), launch_pdl=self.pdl,
        )  # fmt: skip
