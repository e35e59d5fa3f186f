"""The kernels of prefill attention: the thread team runs `block_kernel`, which calls the others."""

from __future__ import annotations

import numpy as np

from quengine.kernels.cpu.attention.prefill_attention import (
    TILES,
    CachePanelArguments,
    PrefillArguments,
    WorkArguments,
    widest,
)
from quengine.kernels.cpu.gemm.amx import BLOCK
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.ir.attention_ir import block_run
from quengine.kernels.cpu.ir.cache_ir import hadamard_row
from quengine.kernels.cpu.ir.gate_ir import cap_floats
from quengine.kernels.cpu.ir.prefill_attention_ir import (
    cache_row,
    divide_row,
    fill_row,
    softmax_block,
)
from quengine.kernels.cpu.ir.row_ir import float_at, scale_row, store_f32
from quengine.kernels.cpu.ir.tile_ir import multiply_tile, stack_floats, transpose_rows
from quengine.kernels.cpu.runtime.argument_types import address_of, arguments_at
from quengine.kernels.cpu.runtime.arguments import size_of
from quengine.kernels.cpu.runtime.atomics import call_kernel
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.kv.cache_types import CacheType


def key_panel_kernel(cache_type: CacheType, wide: bool = False) -> bytes:
    """Unpacks keys into a panel [head_dim, positions]; task g writes its g-th vector of columns."""
    lanes, row_bytes = host_tile().lanes, 4 * widest(wide)
    floats = lanes * widest(wide)

    def key_panel(args: CachePanelArguments, task: int) -> None:
        rows = stack_floats(floats)
        for i in range(lanes):
            position = min(task * lanes + i, args.positions - 1)
            row = args.rows + position * args.row_stride
            scales = args.scales + position * args.scale_row_stride
            cache_row(cache_type, row, scales, 0, args.width, rows + row_bytes * i)
        transpose_rows(rows, row_bytes, args.width, args.panel + 4 * lanes * task)

    return compile_kernel(key_panel, CachePanelArguments)


def value_panel_kernel(cache_type: CacheType) -> bytes:
    """Unpacks values into a panel [positions, columns]; task s writes the s-th strip of the head's columns."""
    columns = host_tile().columns

    def value_panel(args: CachePanelArguments, task: int) -> None:
        first, last = task * columns, min((task + 1) * columns, args.width)
        for position in range(args.positions):
            row = args.rows + position * args.row_stride
            scales = args.scales + position * args.scale_row_stride
            cache_row(cache_type, row, scales, first, last, args.panel + position * 4 * columns)

    return compile_kernel(value_panel, CachePanelArguments)


def block_kernel(sinks: bool = False, wide: bool = False) -> bytes:
    """Task h * head_tasks + b: tile b of the query rows of key/value head h; its sinks, if any, start the softmax."""
    tile = host_tile()
    columns, most_rows, row_bytes = tile.columns, TILES * tile.rows, 4 * widest(wide)
    block_floats = -(-most_rows // BLOCK) * BLOCK * DEPTH  # AMX writes whole blocks of scores
    panel_floats, state_floats = columns * widest(wide), 2 * most_rows
    head_floats = most_rows * widest(wide)
    work_at, work_floats = arguments_at(WorkArguments), size_of(WorkArguments) // 4
    panel_argument_floats = size_of(CachePanelArguments) // 4
    zero, one, least = np.float32(0), np.float32(1), np.float32(-np.inf)

    def attend_block(args: PrefillArguments, task: int) -> None:
        group, width, values = args.group, args.width, args.values
        head, first_row = task // args.head_tasks, task % args.head_tasks * most_rows
        rows = min(most_rows, args.tokens * group - first_row)
        queries, scores = stack_floats(head_floats), stack_floats(block_floats)
        sums, state = stack_floats(head_floats), stack_floats(state_floats)
        work = work_at(stack_floats(work_floats))
        work.call = address_of(args)
        work.head = head
        work.first_row = first_row
        work.rows = rows
        work.queries = queries
        work.scores = scores
        work.sums = sums
        work.state = state
        work.panel = stack_floats(panel_floats)
        work.panel_arguments = stack_floats(panel_argument_floats)
        for r in range(most_rows):
            token, h = (first_row + min(r, rows - 1)) // group, (first_row + min(r, rows - 1)) % group
            source = args.q + token * args.q_stride + (head * group + h) * args.q_head_stride
            scale_row(source, args.scale, width, queries + r * row_bytes)
            fill_row(sums + r * row_bytes, 0, values, zero)
            if sinks:
                store_f32(float_at(args.sinks, head * group + h), state + 8 * r)
                store_f32(one, state + 8 * r + 4)
            else:
                store_f32(least, state + 8 * r)
                store_f32(zero, state + 8 * r + 4)
        first = args.start + first_row // group
        last = args.start + (first_row + rows - 1) // group
        for base in range(max(0, first + 1 - args.window) // DEPTH * DEPTH, last + 1, DEPTH):
            work.first = base
            work.positions = min(DEPTH, last + 1 - base)
            call_kernel(args.scores_kernel, work, 0)
            call_kernel(args.softmax_kernel, work, 0)
            call_kernel(args.sums_kernel, work, 0)
        for r in range(rows):
            token, h = (first_row + r) // group, (first_row + r) % group
            target = args.out + token * args.out_stride + (head * group + h) * args.out_head_stride
            divide_row(sums + r * row_bytes, float_at(state, 2 * r + 1), values, target)
            if args.hadamard:
                hadamard_row(target, values, args.hadamard)

    return compile_kernel(attend_block, PrefillArguments)


def scores_kernel(wide: bool = False) -> bytes:
    """Scores of a task's rows and positions; tiles whose rows all precede the strip's positions are skipped."""
    tile = host_tile()
    columns, tile_rows, vectors, row_bytes = tile.columns, tile.rows, tile.vectors, 4 * DEPTH
    head_bytes = 4 * widest(wide)
    args_at, panel_at = arguments_at(PrefillArguments), arguments_at(CachePanelArguments)
    zero = np.float32(0)

    def score_block(work: WorkArguments, _task: int) -> None:
        args, panel = args_at(work.call), panel_at(work.panel_arguments)
        keys, zeros = args.k, stack_floats(columns)
        fill_row(zeros, 0, columns, zero)
        panel.width = args.width
        panel.row_stride = keys.row_stride
        panel.scale_row_stride = keys.scale_row_stride
        panel.panel = work.panel
        # No row's window reaches positions before `unseen`: their blocks may have been freed or reused, and
        # softmax_kernel
        # overwrites their scores.
        unseen = max(0, args.start + work.first_row // args.group + 1 - args.window - work.first)
        for strip in range(unseen // columns * columns, work.positions, columns):
            position = work.first + strip
            # A strip begins at a multiple of its length and lies in one block.
            slot, run = block_run(args.table, position, columns)
            panel.rows = keys.rows + slot * keys.row_stride + work.head * keys.head_stride
            panel.scales = keys.scales + slot * keys.scale_row_stride + work.head * keys.scale_head_stride
            panel.positions = min(run, work.positions - strip)
            for vector in range(vectors):
                call_kernel(args.key_panel_kernel, panel, vector)
            for t in range(0, work.rows, tile_rows):
                row = work.first_row + min(t + tile_rows, work.rows) - 1
                if args.start + row // args.group >= position:
                    x, y = work.queries + t * head_bytes, work.scores + t * row_bytes + 4 * strip
                    multiply_tile(work.panel, args.width, x, head_bytes, zeros, 0, y, row_bytes)

    return compile_kernel(score_block, WorkArguments)


def softmax_kernel(wide: bool = False) -> bytes:
    """Turns a task's scores into softmax weights, zero where a row does not see a position."""
    lanes, row_bytes, head_bytes = host_tile().lanes, 4 * DEPTH, 4 * widest(wide)
    args_at = arguments_at(PrefillArguments)
    zero, least = np.float32(0), np.float32(-np.inf)

    def weigh_block(work: WorkArguments, _task: int) -> None:
        args, base, count = args_at(work.call), work.first, work.positions
        whole = (count + lanes - 1) // lanes * lanes
        for r in range(work.rows):
            position = args.start + (work.first_row + r) // args.group
            first, last = max(0, position + 1 - args.window - base), min(count, position + 1 - base)
            scores = work.scores + r * row_bytes
            if first >= last:
                fill_row(scores, 0, whole, zero)
                continue
            if args.cap > 0:
                cap_floats(scores, first, last, args.cap)
            fill_row(scores, 0, first, least)
            fill_row(scores, last, whole, least)
            softmax_block(scores, whole, work.state + 8 * r, work.sums + r * head_bytes, args.values)

    return compile_kernel(weigh_block, WorkArguments)


def sums_kernel(wide: bool = False) -> bytes:
    """Adds the weighted values of a task's positions to its sums."""
    tile = host_tile()
    columns, tile_rows, row_bytes, head_bytes = tile.columns, tile.rows, 4 * DEPTH, 4 * widest(wide)
    args_at, panel_at = arguments_at(PrefillArguments), arguments_at(CachePanelArguments)

    def add_values(work: WorkArguments, _task: int) -> None:
        args, panel = args_at(work.call), panel_at(work.panel_arguments)
        values, base = args.v, work.first
        rows, scales = (
            values.rows + work.head * values.head_stride,
            values.scales + work.head * values.scale_head_stride,
        )
        panel.width = args.values
        panel.row_stride = values.row_stride
        panel.scale_row_stride = values.scale_row_stride
        # No row's window reaches positions before `unseen`: their weights are zero and their blocks may have been
        # freed.
        unseen = max(0, args.start + work.first_row // args.group + 1 - args.window - base)
        for strip in range(0, args.values, columns):
            done = unseen  # positions so far; each turn handles a run within one block
            while done < work.positions:
                slot, run = block_run(args.table, base + done, work.positions - done)
                panel.rows = rows + slot * values.row_stride
                panel.scales = scales + slot * values.scale_row_stride
                panel.positions = run
                panel.panel = work.panel + done * 4 * columns
                call_kernel(args.value_panel_kernel, panel, strip // columns)
                done += run
            for t in range(0, work.rows, tile_rows):
                row = work.first_row + min(t + tile_rows, work.rows) - 1
                seen = min(work.positions, args.start + row // args.group + 1 - base)
                x, y = work.scores + t * row_bytes + 4 * unseen, work.sums + t * head_bytes + 4 * strip
                first = work.panel + unseen * 4 * columns
                multiply_tile(first, seen - unseen, x, row_bytes, y, head_bytes, y, head_bytes)

    return compile_kernel(add_values, WorkArguments)
