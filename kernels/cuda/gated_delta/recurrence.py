"""The states of a step's sequences, carried over their rows: chunk by chunk, or row by row.

A program takes a sequence, a value head and some columns of its S; no other columns depend on these. The newest rows of
qkv are stored in the sequence's history here, after the launch that reads the rows they replace. o is written over v.

Row by row, a result does not depend on where a prompt is cut: `batch_invariant` selects this form, and so does a decode
step in which sequences have several rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gated_delta.arithmetic import Net, delta_step, key_head_of
from quengine.kernels.cuda.gated_delta.chunks import PRECISION, chunk_rows
from quengine.kernels.cuda.gated_delta.rows import (
    StateRows,
    block_at,
    checkpoints_of,
    chunk_of,
    keep_checkpoints,
    keep_history,
    own_channels,
    piece_end,
    pieces_of,
    row_at,
    run_of,
)
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.weights.many_rows import MULTIPROCESSORS

_PRECISION = tl.constexpr(PRECISION.value)

ROW_COLUMNS = 64
"""Columns of S in a program that goes row by row."""


class ChunkShape(NamedTuple):
    """Columns of S in a program that goes by chunks, rows of S multiplied at once, warps, chunks in flight."""

    columns: int
    block: int
    warps: int
    stages: int


def chunk_shape(net: Net, sequences: int, hopper: bool) -> ChunkShape:
    """The shape of a program. Hopper's matrix instruction takes 64 rows of S, and its shared memory holds the next
    chunk beside the current one or, with more programs than multiprocessors, the chunks of two programs. On one H200
    2048 rows with 32 value heads of 128 take 688 us (827 the other way), with 48 heads 988 us (1,127)."""
    columns = min(net.head_dim, 32)
    if not hopper:
        return ChunkShape(columns, columns, 8, 1)
    programs = net.head_dim // columns * net.value_heads * sequences
    alone = programs <= MULTIPROCESSORS and net.head_dim <= 128
    return ChunkShape(columns, min(net.head_dim, 64), 4, 2 if alone else 1)


@triton.jit
def state_at(memory_ptr, slot, head, first, ROWS: tl.constexpr, column, NET: tl.constexpr):
    """Pointers to rows first .. first + ROWS - 1 and columns [N] of the S of a head: [ROWS, N]."""
    D: tl.constexpr = NET.head_dim
    memory_ptr += (slot.to(tl.int64) * NET.value_heads + head) * (D * D)
    return memory_ptr + (first + tl.arange(0, ROWS))[:, None] * D + column[None, :]


@DirectLaunch
@triton.jit(do_not_specialize=["tiles", "table_stride"])
def _by_chunks_kernel(
    qkv_ptr, gates_ptr, solve_ptr, reach_ptr, tile_ptr, table_ptr, x_ptr, row_scale_ptr, history_ptr, memory_ptr,
    tiles, table_stride, x_stride, weight_scale,
    NET: tl.constexpr, C: tl.constexpr, SHAPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (columns, value head, sequence). S is held in blocks of rows, so that a product has few registers."""
    wait_then_launch(PDL)
    D: tl.constexpr = NET.head_dim
    COLUMNS: tl.constexpr = SHAPE.columns
    BLOCK: tl.constexpr = SHAPE.block
    PARTS: tl.constexpr = D // BLOCK
    KEYS: tl.constexpr = NET.key_heads * D
    CHANNELS: tl.constexpr = 2 * KEYS + NET.value_heads * D
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first, rows, start = chunk_of(tile_ptr, tiles, sequence)
    if rows > 0:
        slot = tl.load(table_ptr + sequence * table_stride)
        kept = slot != 0
        ends, blocks = checkpoints_of(table_ptr, sequence, table_stride, start)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        memory = ()
        for part in tl.static_range(PARTS):
            place = state_at(memory_ptr, slot, head, part * BLOCK, BLOCK, column, NET)
            memory = memory + (tl.load(place, mask=kept & (start > 0), other=0.0),)
        i = tl.arange(0, C)
        element = key_head_of(head, NET) * D + tl.arange(0, BLOCK)[None, :]
        begin = 0
        for _ in range(pieces_of(rows, ends, C)):
            end = piece_end(begin, rows, ends, C)
            n = begin // C * C + i
            live = (n >= begin) & (n < end)
            row = (first + n).to(tl.int64)
            gate = gates_ptr + row * (2 * NET.value_heads) + head
            kept_log = tl.load(gate, mask=live, other=0.0)
            beta = tl.load(gate + NET.value_heads, mask=live, other=0.0)
            sums = tl.cumsum(kept_log, 0)
            whole = tl.sum(kept_log, 0)
            own = qkv_ptr + row[:, None] * CHANNELS
            v_place = own + (2 * KEYS + head * D) + column[None, :]
            seen = tl.zeros([C, COLUMNS], tl.float32)
            o = tl.zeros([C, COLUMNS], tl.float32)
            for part in tl.static_range(PARTS):
                q = tl.load(own + (part * BLOCK + element), mask=live[:, None], other=0.0)
                k = tl.load(own + (KEYS + part * BLOCK + element), mask=live[:, None], other=0.0)
                seen = tl.dot(k, memory[part], seen, input_precision=_PRECISION)
                o = tl.dot(q, memory[part], o, input_precision=_PRECISION)
            decay = tl.exp(sums)[:, None]
            v = tl.load(v_place, mask=live[:, None], other=0.0)
            at = (row[:, None] * NET.value_heads + head) * C + i[None, :]
            solve = tl.load(solve_ptr + at, mask=live[:, None], other=0.0)
            delta = tl.dot(solve, beta[:, None] * (v - decay * seen), input_precision=_PRECISION)
            reach = tl.load(reach_ptr + at, mask=live[:, None], other=0.0)
            o = tl.dot(reach, delta, decay * o, input_precision=_PRECISION)
            tl.store(v_place, o, mask=live[:, None])
            left = delta * tl.exp(whole - sums)[:, None]
            after = ()
            for part in tl.static_range(PARTS):
                k = tl.load(own + (KEYS + part * BLOCK + element), mask=live[:, None], other=0.0)
                kept_part = memory[part] * tl.exp(whole)
                after = after + (tl.dot(tl.trans(k), left, kept_part, input_precision=_PRECISION),)
            memory = after
            block = block_at(ends, blocks, end)
            if block != 0:
                for part in tl.static_range(PARTS):
                    place = state_at(memory_ptr, block, head, part * BLOCK, BLOCK, column, NET)
                    tl.store(place, memory[part])
            begin = end
        for part in tl.static_range(PARTS):
            place = state_at(memory_ptr, slot, head, part * BLOCK, BLOCK, column, NET)
            tl.store(place, memory[part], mask=kept)
        if slot != 0:
            channel, inside = own_channels(CHANNELS, NET.value_heads, NET.head_dim // COLUMNS)
            keep_checkpoints(
                x_ptr, row_scale_ptr, weight_scale, history_ptr, slot, ends, blocks, first, start, channel, inside,
                x_stride, CHANNELS, NET.ring,
            )  # fmt: skip
            keep_history(
                x_ptr, row_scale_ptr, weight_scale, history_ptr + slot.to(tl.int64) * (NET.ring * CHANNELS),
                first, tl.maximum(rows - NET.ring, 0), rows, start, channel, inside, x_stride, CHANNELS, NET.ring,
            )  # fmt: skip


@DirectLaunch
@triton.jit(do_not_specialize=["tiles", "rows", "table_stride"])
def _by_rows_kernel(
    qkv_ptr, gates_ptr, position_ptr, tile_ptr, table_ptr, x_ptr, row_scale_ptr, history_ptr, memory_ptr,
    o_ptr, kept_ptr, tiles, rows, table_stride, x_stride, weight_scale,
    NET: tl.constexpr, COLUMNS: tl.constexpr, ALL_ROWS: tl.constexpr, VERIFIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (columns, value head, sequence), or, where ALL_ROWS is not 0, (columns, value head, row of a step of
    decode), of which the first row of each sequence works (rows.py). VERIFIES: states stay as they are, o goes to o_ptr
    [rows, width], and what the histories lack to kept_ptr [rows, channels]."""
    wait_then_launch(PDL)
    D: tl.constexpr = NET.head_dim
    KEYS: tl.constexpr = NET.key_heads * D
    WIDTH: tl.constexpr = NET.value_heads * D
    CHANNELS: tl.constexpr = 2 * KEYS + WIDTH
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = sequence
    if ALL_ROWS == 0:
        first, count, start = chunk_of(tile_ptr, tiles, sequence)
    else:
        count, start = run_of(position_ptr, table_ptr, sequence, rows, table_stride, ALL_ROWS)
    if count > 0:
        slot = tl.load(table_ptr + sequence * table_stride)
        own_history = history_ptr + slot.to(tl.int64) * (NET.ring * CHANNELS)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        place = state_at(memory_ptr, slot, head, 0, D, column, NET)
        kept = slot != 0
        memory = tl.load(place, mask=kept & (start > 0), other=0.0)
        element = key_head_of(head, NET) * D + tl.arange(0, D)
        channel, inside = own_channels(CHANNELS, NET.value_heads, NET.head_dim // COLUMNS)
        if ALL_ROWS == 0:
            ends, blocks = checkpoints_of(table_ptr, sequence, table_stride, start)
            keep_checkpoints(
                x_ptr, row_scale_ptr, weight_scale, history_ptr, slot, ends, blocks, first, start, channel, inside,
                x_stride, CHANNELS, NET.ring,
            )  # fmt: skip
        for n in range(count):
            if ALL_ROWS == 0:
                row = first + n
            else:
                row = row_at(position_ptr, table_ptr, slot, start + n, rows, table_stride, ALL_ROWS)
            own = qkv_ptr + row.to(tl.int64) * CHANNELS
            q = tl.load(own + element)
            k = tl.load(own + KEYS + element)
            v_place = own + 2 * KEYS + head * D + column
            gate = gates_ptr + row * (2 * NET.value_heads) + head
            decay = tl.exp(tl.load(gate))
            beta = tl.load(gate + NET.value_heads)
            kq = tl.sum(q * k, 0)
            memory, o = delta_step(memory, q, k, kq, tl.load(v_place), decay, beta)
            if VERIFIES:
                tl.store(o_ptr + row.to(tl.int64) * WIDTH + head * D + column, o)
                x = tl.load(x_ptr + row.to(tl.int64) * x_stride + channel, mask=inside, other=0.0)
                x *= tl.load(row_scale_ptr + row) * weight_scale
                tl.store(kept_ptr + row.to(tl.int64) * CHANNELS + channel, x, mask=inside)
            else:
                tl.store(v_place, o)
                if (n + NET.ring >= count) & (slot != 0):
                    keep_history(
                        x_ptr, row_scale_ptr, weight_scale, own_history, row - n, n, n + 1, start, channel, inside,
                        x_stride, CHANNELS, NET.ring,
                    )  # fmt: skip
            if ALL_ROWS == 0:
                block = block_at(ends, blocks, n + 1)
                if block != 0:
                    tl.store(state_at(memory_ptr, block, head, 0, D, column, NET), memory)
        if not VERIFIES:
            tl.store(place, memory, mask=kept)


def carry_by_chunks(
    step: StateRows, qkv: Tensor, gates: Tensor, matrices: tuple[Tensor, Tensor], net: Net,
    history: Tensor, memory: Tensor, pdl: bool,
) -> None:  # fmt: skip
    """Writes o over the columns of v, and advances the states of a prompt's sequences. matrices: of
    `chunk_matrices`."""
    assert step.tiles is not None
    sequences = step.block_tables.shape[0]
    shape = chunk_shape(net, sequences, is_hopper(qkv.device))
    _by_chunks_kernel[(net.head_dim // shape.columns, net.value_heads, sequences)](
        qkv, gates, *matrices, step.tiles.tiles, step.block_tables, step.x, step.row_scale, history, memory,
        step.tiles.tiles.shape[0], step.block_tables.stride(0), step.x.stride(0), step.weight_scale,
        NET=net, C=chunk_rows(net.head_dim), SHAPE=shape, PDL=pdl,
        num_warps=shape.warps, num_stages=shape.stages, launch_pdl=pdl,
    )  # fmt: skip


def carry_by_rows(
    step: StateRows, qkv: Tensor, gates: Tensor, net: Net, history: Tensor, memory: Tensor, pdl: bool
) -> None:
    """As `carry_by_chunks`, but row by row, for any step whose sequences may have several rows."""
    _launch_by_rows(step, qkv, gates, net, history, memory, None, pdl)


def verify_by_rows(
    step: StateRows, qkv: Tensor, gates: Tensor, net: Net, history: Tensor, memory: Tensor, pdl: bool
) -> tuple[Tensor, Tensor]:
    """Returns o, fp32 [T, width], of a decode step, without changing its states; and the rows, fp32 [T, channels], that
    go to the histories once they are accepted."""
    o = torch.empty(len(step.x), net.width, dtype=torch.float32, device=qkv.device)
    kept = torch.empty(len(step.x), net.channels, dtype=torch.float32, device=qkv.device)
    _launch_by_rows(step, qkv, gates, net, history, memory, (o, kept), pdl)
    return o, kept


def _launch_by_rows(
    step: StateRows, qkv: Tensor, gates: Tensor, net: Net, history: Tensor, memory: Tensor,
    verified: tuple[Tensor, Tensor] | None, pdl: bool,
) -> None:  # fmt: skip
    columns = min(ROW_COLUMNS, net.head_dim)
    tiles = None if step.tiles is None else step.tiles.tiles
    sequences = len(step.x) if tiles is None else step.block_tables.shape[0]
    _by_rows_kernel[(net.head_dim // columns, net.value_heads, sequences)](
        qkv, gates, step.positions, tiles, step.block_tables, step.x, step.row_scale, history, memory,
        *(verified or (qkv, qkv)),
        0 if tiles is None else tiles.shape[0], len(step.x), step.block_tables.stride(0), step.x.stride(0),
        step.weight_scale,
        NET=net, COLUMNS=columns, ALL_ROWS=step.all_rows, VERIFIES=verified is not None, PDL=pdl,
        num_warps=row_warps(net, columns), launch_pdl=pdl,
    )  # fmt: skip


def row_warps(net: Net, columns: int) -> int:
    """Warps of a program that goes row by row."""
    return max(1, min(8, net.head_dim * columns // 1024))
