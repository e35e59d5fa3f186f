"""The states of a step's sequences, carried over their rows: chunk by chunk, or row by row.

In a chunk of rows with B, C, x and steps of time t, where G is the running sum of the logs of decays,

    y_i = exp(G_i) S C_i + sum over j <= i of exp(G_i - G_j) (C_i B_j) t_j x_j
    S' = exp(G_last) S + sum over j of exp(G_last - G_j) t_j x_j B_j^T

A program takes a sequence, a head and some of its elements: rows of S on which no other elements depend. The newest
rows of xBC are stored in the sequence's history here, after the launch that reads the rows they replace. y is written
over x.

Row by row, a result does not depend on where a prompt is cut: `batch_invariant` selects this form, and so does a decode
step in which sequences have several rows. Source: Dao and Gu 2024, section 6 (the block decomposition of the
semiseparable matrix).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gated_delta.chunks import PRECISION
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
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.mamba2.arithmetic import Mamba2Net
from quengine.kernels.cuda.mamba2.decode import decode_shape
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.mamba2 import Mamba2Spec

_PRECISION = tl.constexpr(PRECISION.value)


class ScanShape(NamedTuple):
    """Rows of a chunk, elements of a head in a program, elements of B and C multiplied at once, warps, chunks in
    flight."""

    rows: int
    columns: int
    block: int
    warps: int
    stages: int


def chunk_shape(net: Mamba2Net) -> ScanShape:
    """A shape that compiles without spills; not measured. With chunks of 64 rows, which Hopper's matrix instruction
    takes, the products of three terms spill."""
    return ScanShape(32, min(net.tile, 32), min(net.state_dim, 32), 8, 1)


@triton.jit
def _state(memory_ptr, slot, head, first, BLOCK: tl.constexpr, element, NET: tl.constexpr):
    """Pointers to columns first .. first + BLOCK - 1 and rows [M] of the S of a head, transposed: [BLOCK, M]."""
    N: tl.constexpr = NET.state_dim
    memory_ptr += (slot.to(tl.int64) * NET.heads + head) * (NET.head_dim * N)
    return memory_ptr + element[None, :] * N + (first + tl.arange(0, BLOCK))[:, None]


@DirectLaunch
@triton.jit(do_not_specialize=["tiles", "table_stride"])
def _by_chunks_kernel(
    xbc_ptr, gates_ptr, skip_ptr, tile_ptr, table_ptr, x_ptr, row_scale_ptr, history_ptr, memory_ptr,
    tiles, table_stride, x_stride, weight_scale,
    NET: tl.constexpr, SHAPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (elements, head, sequence). S is held transposed, in blocks, so that a product has few registers."""
    wait_then_launch(PDL)
    C: tl.constexpr = SHAPE.rows
    COLUMNS: tl.constexpr = SHAPE.columns
    BLOCK: tl.constexpr = SHAPE.block
    N: tl.constexpr = NET.state_dim
    PARTS: tl.constexpr = N // BLOCK
    WIDTH: tl.constexpr = NET.heads * NET.head_dim
    CHANNELS: tl.constexpr = WIDTH + 2 * NET.groups * N
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first, rows, start = chunk_of(tile_ptr, tiles, sequence)
    if rows > 0:
        slot = tl.load(table_ptr + sequence * table_stride)
        kept = slot != 0
        ends, blocks = checkpoints_of(table_ptr, sequence, table_stride, start)
        element = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        skip = tl.load(skip_ptr + head)
        memory = ()
        for part in tl.static_range(PARTS):
            place = _state(memory_ptr, slot, head, part * BLOCK, BLOCK, element, NET)
            memory = memory + (tl.load(place, mask=kept & (start > 0), other=0.0),)
        i = tl.arange(0, C)
        behind = i[:, None] >= i[None, :]
        n = WIDTH + head // (NET.heads // NET.groups) * N + tl.arange(0, BLOCK)[None, :]
        begin = 0
        for _ in range(pieces_of(rows, ends, C)):
            end = piece_end(begin, rows, ends, C)
            at = begin // C * C + i
            live = (at >= begin) & (at < end)
            row = (first + at).to(tl.int64)
            gate = gates_ptr + row * (2 * NET.heads) + head
            kept_log = tl.load(gate, mask=live, other=0.0)
            step = tl.load(gate + NET.heads, mask=live, other=0.0)
            sums = tl.cumsum(kept_log, 0)
            whole = tl.sum(kept_log, 0)
            own = xbc_ptr + row[:, None] * CHANNELS
            near = tl.zeros([C, C], tl.float32)
            y = tl.zeros([C, COLUMNS], tl.float32)
            for part in tl.static_range(PARTS):
                b = tl.load(own + (part * BLOCK + n), mask=live[:, None], other=0.0)
                c = tl.load(own + (NET.groups * N + part * BLOCK + n), mask=live[:, None], other=0.0)
                near = tl.dot(c, tl.trans(b), near, input_precision=_PRECISION)
                y = tl.dot(c, memory[part], y, input_precision=_PRECISION)
            x_place = own + (head * NET.head_dim + element)[None, :]
            x = tl.load(x_place, mask=live[:, None], other=0.0)
            reach = tl.exp(tl.where(behind, sums[:, None] - sums[None, :], float("-inf"))) * near
            given = step[:, None] * x
            y = tl.dot(reach, given, tl.exp(sums)[:, None] * y, input_precision=_PRECISION)
            tl.store(x_place, y + skip * x, mask=live[:, None])
            left = given * tl.exp(whole - sums)[:, None]
            after = ()
            for part in tl.static_range(PARTS):
                b = tl.load(own + (part * BLOCK + n), mask=live[:, None], other=0.0)
                kept_part = memory[part] * tl.exp(whole)
                after = after + (tl.dot(tl.trans(b), left, kept_part, input_precision=_PRECISION),)
            memory = after
            block = block_at(ends, blocks, end)
            if block != 0:
                for part in tl.static_range(PARTS):
                    place = _state(memory_ptr, block, head, part * BLOCK, BLOCK, element, NET)
                    tl.store(place, memory[part])
            begin = end
        for part in tl.static_range(PARTS):
            place = _state(memory_ptr, slot, head, part * BLOCK, BLOCK, element, NET)
            tl.store(place, memory[part], mask=kept)
        if slot != 0:
            channel, inside = own_channels(CHANNELS, NET.heads, NET.head_dim // COLUMNS)
            keep_checkpoints(
                x_ptr + WIDTH, row_scale_ptr, weight_scale, history_ptr, slot, ends, blocks, first, start, channel,
                inside, x_stride, CHANNELS, NET.ring,
            )  # fmt: skip
            keep_history(
                x_ptr + WIDTH, row_scale_ptr, weight_scale,
                history_ptr + slot.to(tl.int64) * (NET.ring * CHANNELS), first, tl.maximum(rows - NET.ring, 0), rows,
                start, channel, inside, x_stride, CHANNELS, NET.ring,
            )  # fmt: skip


@DirectLaunch
@triton.jit(do_not_specialize=["tiles", "rows", "table_stride"])
def _by_rows_kernel(
    xbc_ptr, gates_ptr, skip_ptr, position_ptr, tile_ptr, table_ptr, x_ptr, row_scale_ptr, history_ptr, memory_ptr,
    tiles, rows, table_stride, x_stride, weight_scale,
    NET: tl.constexpr, COLUMNS: tl.constexpr, ALL_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (elements, head, sequence), or, where ALL_ROWS is not 0, (elements, head, row of a step of decode), of
    which the first row of each sequence works (gated_delta/rows.py)."""
    wait_then_launch(PDL)
    N: tl.constexpr = NET.state_dim
    WIDTH: tl.constexpr = NET.heads * NET.head_dim
    CHANNELS: tl.constexpr = WIDTH + 2 * NET.groups * N
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
        element = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        n = tl.arange(0, N)
        whole = NET.head_dim * N
        of_head = memory_ptr + head * whole + element[:, None] * N + n[None, :]
        place = of_head + slot.to(tl.int64) * (NET.heads * whole)
        kept = slot != 0
        memory = tl.load(place, mask=kept & (start > 0), other=0.0)
        skip = tl.load(skip_ptr + head)
        of_b = WIDTH + head // (NET.heads // NET.groups) * N + n
        channel, inside = own_channels(CHANNELS, NET.heads, NET.head_dim // COLUMNS)
        if ALL_ROWS == 0:
            ends, blocks = checkpoints_of(table_ptr, sequence, table_stride, start)
            keep_checkpoints(
                x_ptr + WIDTH, row_scale_ptr, weight_scale, history_ptr, slot, ends, blocks, first, start, channel,
                inside, x_stride, CHANNELS, NET.ring,
            )  # fmt: skip
        for at in range(count):
            if ALL_ROWS == 0:
                row = first + at
            else:
                row = row_at(position_ptr, table_ptr, slot, start + at, rows, table_stride, ALL_ROWS)
            own = xbc_ptr + row.to(tl.int64) * CHANNELS
            b = tl.load(own + of_b)
            c = tl.load(own + NET.groups * N + of_b)
            gate = gates_ptr + row * (2 * NET.heads) + head
            decay = tl.exp(tl.load(gate))
            step = tl.load(gate + NET.heads)
            x_place = own + head * NET.head_dim + element
            x = tl.load(x_place)
            memory = memory * decay + (step * x)[:, None] * b[None, :]
            tl.store(x_place, tl.sum(memory * c[None, :], 1) + skip * x)
            if ALL_ROWS == 0:
                block = block_at(ends, blocks, at + 1)
                if block != 0:
                    tl.store(of_head + block.to(tl.int64) * (NET.heads * whole), memory)
            if (at + NET.ring >= count) & (slot != 0):
                keep_history(
                    x_ptr + WIDTH, row_scale_ptr, weight_scale, own_history, row - at, at, at + 1, start, channel,
                    inside, x_stride, CHANNELS, NET.ring,
                )  # fmt: skip
        tl.store(place, memory, mask=kept)


def scan_by_chunks(
    step: StateRows,
    spec: Mamba2Spec,
    xbc: Tensor,
    gates: Tensor,
    net: Mamba2Net,
    history: Tensor,
    memory: Tensor,
    pdl: bool,
) -> None:
    """Writes y over the columns of x, and advances the states of a prompt's sequences."""
    assert step.tiles is not None
    shape = chunk_shape(net)
    _by_chunks_kernel[(net.head_dim // shape.columns, net.heads, step.block_tables.shape[0])](
        xbc, gates, spec.skip, step.tiles.tiles, step.block_tables, step.x, step.row_scale, history, memory,
        step.tiles.tiles.shape[0], step.block_tables.stride(0), step.x.stride(0), step.weight_scale,
        NET=net, SHAPE=shape, PDL=pdl, num_warps=shape.warps, num_stages=shape.stages, launch_pdl=pdl,
    )  # fmt: skip


def scan_by_rows(
    step: StateRows,
    spec: Mamba2Spec,
    xbc: Tensor,
    gates: Tensor,
    net: Mamba2Net,
    history: Tensor,
    memory: Tensor,
    pdl: bool,
) -> None:
    """As `scan_by_chunks`, but row by row, for any step whose sequences may have several rows."""
    shape = decode_shape(net)
    tiles = None if step.tiles is None else step.tiles.tiles
    sequences = len(step.x) if tiles is None else step.block_tables.shape[0]
    _by_rows_kernel[(net.head_dim // shape.rows, net.heads, sequences)](
        xbc, gates, spec.skip, step.positions, tiles, step.block_tables, step.x, step.row_scale, history, memory,
        0 if tiles is None else tiles.shape[0], len(step.x), step.block_tables.stride(0), step.x.stride(0),
        step.weight_scale,
        NET=net, COLUMNS=shape.rows, ALL_ROWS=step.all_rows, PDL=pdl, num_warps=shape.warps, launch_pdl=pdl,
    )  # fmt: skip
