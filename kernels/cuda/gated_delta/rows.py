"""The rows of a step whose sequences have several: where they lie, and how kernels find those of one sequence."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS
from quengine.kernels.forward_batch import MOST_CHECKPOINTS, PrefillTiles

_FIELDS = tl.constexpr(TILE_FIELDS)
_CHECKPOINTS = tl.constexpr(MOST_CHECKPOINTS)
_AT_ONCE = tl.constexpr(128)


@dataclass(frozen=True)
class StateRows:
    """Rows x fp32 [T, columns], unit inner stride, and what they belong to.

    Attributes:
        x: the result of the input matmul.
        row_scale, weight_scale: x stands for x * row_scale * weight_scale, fp32 [T] and a number.
        positions: int32 [T].
        block_tables: int32 [S, ...], whose first column has the slots; of prompts they are `state_table`s.
        tiles: those of a prompt's chunks. None: each row has its own table, as in decode, and the rows of one slot have
            consecutive positions, in any order.
    """

    x: Tensor
    row_scale: Tensor
    weight_scale: float
    positions: Tensor
    block_tables: Tensor
    tiles: PrefillTiles | None

    @property
    def sequences(self) -> Tensor | None:
        """int32 [T], the table of each row; None: row t has table t."""
        return None if self.tiles is None else self.tiles.sequences

    @property
    def all_rows(self) -> int:
        """A power of two, at least T, where a sequence's rows must be searched; else 0."""
        return int(triton.next_power_of_2(len(self.x))) if self.tiles is None else 0


@triton.jit
def chunk_of(tile_ptr, tiles, sequence):
    """The first row of a prompt's chunk, its number of rows (0 where the step has no row of a sequence), and its first
    position."""
    first = 0
    rows = 0
    start = 0
    for begin in range(0, tiles, _AT_ONCE):
        number = begin + tl.arange(0, _AT_ONCE)
        field = tile_ptr + number * _FIELDS
        inside = number < tiles
        count = tl.load(field + 2, mask=inside, other=0)
        begins = (tl.load(field + 1, mask=inside, other=1) == 0) & (count > 0)
        found = begins & (tl.load(field + 4, mask=inside, other=-1) == sequence)
        first += tl.sum(tl.where(found, tl.load(field, mask=inside, other=0), 0), 0)
        rows += tl.sum(tl.where(found, count, 0), 0)
        start += tl.sum(tl.where(found, tl.load(field + 3, mask=inside, other=0), 0), 0)
    return first, rows, start


@triton.jit
def checkpoints_of(table_ptr, sequence, table_stride, start):
    """For each checkpoint in a prompt's chunk from position `start` on: the number of the chunk's rows before it (0: no
    checkpoint), and its block (forward_batch.state_table)."""
    ends = ()
    blocks = ()
    for n in tl.static_range(_CHECKPOINTS):
        entry = table_ptr + sequence * table_stride + (1 + 2 * n)
        mark = tl.load(entry)
        ends = ends + (tl.where(mark < 0, -mark - start, 0),)
        blocks = blocks + (tl.where(mark < 0, tl.load(entry + 1), 0),)
    return ends, blocks


@triton.jit
def block_at(ends, blocks, end):
    """The block of the checkpoint before row `end` of a chunk; 0: there is none."""
    block = 0
    for n in tl.static_range(_CHECKPOINTS):
        block = tl.where(ends[n] == end, blocks[n], block)
    return block


@triton.jit
def pieces_of(rows, ends, C: tl.constexpr):
    """The number of pieces in which a chunk of a prompt is computed: they end every C rows and at checkpoints."""
    pieces = tl.cdiv(rows, C)
    for n in tl.static_range(_CHECKPOINTS):
        pieces += ((ends[n] % C != 0) & (ends[n] < rows)).to(tl.int32)
    return pieces


@triton.jit
def piece_end(begin, rows, ends, C: tl.constexpr):
    """The end of the piece that begins with row `begin`."""
    end = tl.minimum(begin // C * C + C, rows)
    for n in tl.static_range(_CHECKPOINTS):
        end = tl.where((ends[n] > begin) & (ends[n] < end), ends[n], end)
    return end


@triton.jit
def run_of(position_ptr, table_ptr, row, rows, table_stride, ALL_ROWS: tl.constexpr):
    """The number of rows of a decode step that have the slot of row `row`, and the first position. 0 rows where `row`
    is not the first of them, or its slot is padding."""
    other = tl.arange(0, ALL_ROWS)
    slot = tl.load(table_ptr + row * table_stride)
    same = (tl.load(table_ptr + other * table_stride, mask=other < rows, other=0) == slot) & (other < rows)
    position = tl.load(position_ptr + other, mask=other < rows, other=0)
    start = tl.min(tl.where(same, position, 2147483647), 0)
    count = tl.sum(same.to(tl.int32), 0)
    begins = (tl.load(position_ptr + row) == start) & (slot != 0)
    return tl.where(begins, count, 0), start


@triton.jit
def row_at(position_ptr, table_ptr, slot, position, rows, table_stride, ALL_ROWS: tl.constexpr):
    """The row of a decode step with this slot and position."""
    other = tl.arange(0, ALL_ROWS)
    same = tl.load(table_ptr + other * table_stride, mask=other < rows, other=0) == slot
    same &= tl.load(position_ptr + other, mask=other < rows, other=-1) == position
    return tl.max(tl.where(same, other, 0), 0)


@triton.jit
def own_channels(CHANNELS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr):
    """The channels whose history a program keeps, and which of them exist: an equal share for each of the PARTS
    programs of each head. Programs (part of a head, head)."""
    PROGRAMS: tl.constexpr = HEADS * PARTS
    SHARE: tl.constexpr = (CHANNELS + PROGRAMS - 1) // PROGRAMS
    n = tl.arange(0, triton.next_power_of_2(SHARE))
    channel = (tl.program_id(1) * PARTS + tl.program_id(0)) * SHARE + n
    return channel, (n < SHARE) & (channel < CHANNELS)


@triton.jit
def keep_history(
    x_ptr, row_scale_ptr, weight_scale, history_ptr, first, begin, end, start, channel, inside, x_stride,
    CHANNELS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Stores channels [N] of rows begin .. end - 1 of a chunk in a slot's history. The chunk begins with the step's row
    `first`, at position `start`."""
    for n in range(begin, end):
        x = tl.load(x_ptr + (first + n).to(tl.int64) * x_stride + channel, mask=inside, other=0.0)
        x *= tl.load(row_scale_ptr + first + n) * weight_scale
        tl.store(history_ptr + (start + n) % RING * CHANNELS + channel, x, mask=inside)


@triton.jit
def keep_checkpoints(
    x_ptr, row_scale_ptr, weight_scale, history_ptr, slot, ends, blocks, first, start, channel, inside, x_stride,
    CHANNELS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Store the history before each checkpoint of a chunk: the chunk's rows, and before these what the slot's history
    holds, which is not overwritten yet. history_ptr: of block 0."""
    for n in tl.static_range(_CHECKPOINTS):
        if blocks[n] != 0:
            end = ends[n]
            own = history_ptr + slot.to(tl.int64) * (RING * CHANNELS) + channel
            kept = history_ptr + blocks[n].to(tl.int64) * (RING * CHANNELS)
            if (end < RING) & (start > 0):
                for place in range(RING):
                    old = tl.load(own + place * CHANNELS, mask=inside, other=0.0)
                    tl.store(kept + place * CHANNELS + channel, old, mask=inside)
            keep_history(
                x_ptr, row_scale_ptr, weight_scale, kept, first, tl.maximum(end - RING, 0), end, start, channel,
                inside, x_stride, CHANNELS, RING,
            )  # fmt: skip
