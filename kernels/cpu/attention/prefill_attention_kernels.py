"""The kernels of a prompt's attention: compiled functions over blocks of query rows.

Each function here compiles a kernel; its docstring lists the parameter slots. Addresses and strides are
bytes. `block_kernel` is the one that the thread team runs; it calls the others, whose addresses it is given.

Does not know: tensors. prefill_attention.py fills the parameters and says what is computed.
"""

from __future__ import annotations

import numpy as np

from quengine.kernels.cpu.attention.prefill_attention import TILES
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.ir.attention_ir import block_run
from quengine.kernels.cpu.ir.prefill_attention_ir import (
    cache_row,
    divide_row,
    fill_row,
    softmax_block,
)
from quengine.kernels.cpu.ir.row_ir import get, put, scale_row, store_f32
from quengine.kernels.cpu.ir.tile_ir import multiply_tile, stack_floats, transpose_rows
from quengine.kernels.cpu.runtime.atomics import call_kernel
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.kv.cache_types import CacheType


def key_panel_kernel(cache_type: CacheType) -> bytes:
    """Keys of adjacent positions as a panel [head_dim, positions]; task g writes its g-th vector of columns.

    0 keys, 1 bytes from position to position, 2 positions (the last one is repeated), 3 head_dim, 4 panel; 5 scales,
    6 bytes from position to position.
    """
    variant, lanes = cache_type, host_tile().lanes
    floats = lanes * DEPTH

    def key_panel(context: int, task: int) -> None:
        width, rows = get(context, 3), stack_floats(floats)
        for i in range(lanes):
            position = min(task * lanes + i, get(context, 2) - 1)
            row = get(context, 0) + position * get(context, 1)
            scales = get(context, 5) + position * get(context, 6)
            cache_row(variant, row, scales, 0, width, rows + 4 * DEPTH * i)
        transpose_rows(variant, rows, 4 * DEPTH, width, get(context, 4) + 4 * lanes * task)

    return compile_kernel(key_panel)


def value_panel_kernel(cache_type: CacheType) -> bytes:
    """Values of adjacent positions as a panel [positions, columns]; task s is strip s of the head's columns.

    As `key_panel_kernel`.
    """
    variant, columns = cache_type, host_tile().columns

    def value_panel(context: int, task: int) -> None:
        first, last = task * columns, min((task + 1) * columns, get(context, 3))
        for position in range(get(context, 2)):
            row = get(context, 0) + position * get(context, 1)
            scales = get(context, 5) + position * get(context, 6)
            cache_row(variant, row, scales, first, last, get(context, 4) + position * 4 * columns)

    return compile_kernel(value_panel)


def block_kernel() -> bytes:
    """Task h * n + b: block b of the query rows of key/value head h.

    0 queries, 1 bytes from token to token, 2 from head to head, 3 tokens, 4 query heads per key/value head, 5 head_dim,
    6 tasks n per head, 7 position of the first token, 8 positions a token sees at most, 9 scale (the bits of an fp32);
    output: 10 address, 11, 12 as 1, 2; keys: 13 address, 14 bytes from position to position, 15 from head to head;
    16-18 values, 19-21 scales of keys, 22-24 of values; kernels: 25 scores, 26 softmax, 27 sums, 28 panels of keys,
    29 of values; 30 address of a block table (int64; 0: position p is row p).

    The other kernels get a workspace of int64: 0 this context, 1 h, 2 first row, 3 rows; positions: 4 first, 5 how
    many; 6 queries, 7 scores, 8 sums (each [rows, DEPTH] fp32), 9 running softmax [rows, 2], 10 panel, 11 its
    kernel's parameters.
    """
    variant, tile = "prefill", host_tile()
    columns, most_rows, row_bytes = tile.columns, TILES * tile.rows, 4 * DEPTH
    block_floats, panel_floats, state_floats = most_rows * DEPTH, columns * DEPTH, 2 * most_rows
    zero, least = np.float32(0), np.float32(-np.inf)

    def attend_block(context: int, task: int) -> None:
        group, width, n = get(context, 4), get(context, 5), get(context, 6)
        head, first_row = task // n, task % n * most_rows
        rows = min(most_rows, get(context, 3) * group - first_row)
        queries, scores, sums = (
            stack_floats(block_floats),
            stack_floats(block_floats),
            stack_floats(block_floats),
        )
        state, work = stack_floats(state_floats), stack_floats(24)
        put(work, 0, context)
        put(work, 1, head)
        put(work, 2, first_row)
        put(work, 3, rows)
        put(work, 6, queries)
        put(work, 7, scores)
        put(work, 8, sums)
        put(work, 9, state)
        put(work, 10, stack_floats(panel_floats))
        put(work, 11, stack_floats(16))
        for r in range(most_rows):
            token, h = (first_row + min(r, rows - 1)) // group, (first_row + min(r, rows - 1)) % group
            source = get(context, 0) + token * get(context, 1) + (head * group + h) * get(context, 2)
            scale_row(variant, source, context + 8 * 9, width, queries + r * row_bytes)
            fill_row(variant, sums + r * row_bytes, 0, width, zero)
            store_f32(least, state + 8 * r)
            store_f32(zero, state + 8 * r + 4)
        first = get(context, 7) + first_row // group
        last = get(context, 7) + (first_row + rows - 1) // group
        for base in range(max(0, first + 1 - get(context, 8)) // DEPTH * DEPTH, last + 1, DEPTH):
            put(work, 4, base)
            put(work, 5, min(DEPTH, last + 1 - base))
            for kernel in range(25, 28):
                call_kernel(get(context, kernel), work, 0)
        for r in range(rows):
            token, h = (first_row + r) // group, (first_row + r) % group
            target = get(context, 10) + token * get(context, 11) + (head * group + h) * get(context, 12)
            divide_row(variant, sums + r * row_bytes, state + 8 * r + 4, width, target)

    return compile_kernel(attend_block)


def scores_kernel() -> bytes:
    """Scores of a workspace's rows and positions, but for tiles of which no row sees a position of the strip."""
    variant, tile = "scores", host_tile()
    columns, tile_rows, vectors, row_bytes = tile.columns, tile.rows, tile.vectors, 4 * DEPTH
    zero = np.float32(0)

    def score_block(work: int, _task: int) -> None:
        context, head, rows, base, panel = (
            get(work, 0),
            get(work, 1),
            get(work, 3),
            get(work, 4),
            get(work, 10),
        )
        width, request, zeros = get(context, 5), get(work, 11), stack_floats(columns)
        fill_row(variant, zeros, 0, columns, zero)
        put(request, 1, get(context, 14))
        put(request, 3, width)
        put(request, 4, panel)
        put(request, 6, get(context, 20))
        for strip in range(0, get(work, 5), columns):
            position = base + strip
            slot, run = position, columns
            if get(context, 30):  # a strip begins at a multiple of its length and lies in one block
                slot, run = block_run(get(context, 30), position, columns)
            put(request, 0, get(context, 13) + slot * get(context, 14) + head * get(context, 15))
            put(request, 2, min(run, get(work, 5) - strip))
            put(request, 5, get(context, 19) + slot * get(context, 20) + head * get(context, 21))
            for vector in range(vectors):
                call_kernel(get(context, 28), request, vector)
            for t in range(0, rows, tile_rows):
                row = get(work, 2) + min(t + tile_rows, rows) - 1
                if get(context, 7) + row // get(context, 4) >= position:
                    x, y = get(work, 6) + t * row_bytes, get(work, 7) + t * row_bytes + 4 * strip
                    multiply_tile(variant, panel, width, x, row_bytes, zeros, 0, y, row_bytes)

    return compile_kernel(score_block)


def softmax_kernel() -> bytes:
    """Scores of a workspace become weights, zero where a row does not see a position."""
    variant, lanes, row_bytes = "softmax", host_tile().lanes, 4 * DEPTH
    zero, least = np.float32(0), np.float32(-np.inf)

    def weigh_block(work: int, _task: int) -> None:
        context, rows, base, count = get(work, 0), get(work, 3), get(work, 4), get(work, 5)
        whole = (count + lanes - 1) // lanes * lanes
        for r in range(rows):
            position = get(context, 7) + (get(work, 2) + r) // get(context, 4)
            first, last = max(0, position + 1 - get(context, 8) - base), min(count, position + 1 - base)
            scores = get(work, 7) + r * row_bytes
            if first >= last:
                fill_row(variant, scores, 0, whole, zero)
                continue
            fill_row(variant, scores, 0, first, least)
            fill_row(variant, scores, last, whole, least)
            state, sums = get(work, 9) + 8 * r, get(work, 8) + r * row_bytes
            softmax_block(variant, scores, whole, state, sums, get(context, 5))

    return compile_kernel(weigh_block)


def sums_kernel() -> bytes:
    """Adds the values of a workspace's positions, weighted, to its sums."""
    variant, tile = "sums", host_tile()
    columns, tile_rows, row_bytes = tile.columns, tile.rows, 4 * DEPTH

    def mix_block(work: int, _task: int) -> None:
        context, head, rows, base, panel = (
            get(work, 0),
            get(work, 1),
            get(work, 3),
            get(work, 4),
            get(work, 10),
        )
        width, request = get(context, 5), get(work, 11)
        values, scales = (
            get(context, 16) + head * get(context, 18),
            get(context, 22) + head * get(context, 24),
        )
        put(request, 1, get(context, 17))
        put(request, 3, width)
        put(request, 6, get(context, 23))
        for strip in range(0, width, columns):
            # Positions in adjacent rows: all of them, or those of one block after the other.
            done, slot, run = 0, base, get(work, 5)
            while done < get(work, 5):
                if get(context, 30):
                    slot, run = block_run(get(context, 30), base + done, get(work, 5) - done)
                put(request, 0, values + slot * get(context, 17))
                put(request, 2, run)
                put(request, 4, panel + done * 4 * columns)
                put(request, 5, scales + slot * get(context, 23))
                call_kernel(get(context, 29), request, strip // columns)
                done += run
            for t in range(0, rows, tile_rows):
                row = get(work, 2) + min(t + tile_rows, rows) - 1
                seen = min(get(work, 5), get(context, 7) + row // get(context, 4) + 1 - base)
                x, y = get(work, 7) + t * row_bytes, get(work, 8) + t * row_bytes + 4 * strip
                multiply_tile(variant, panel, seen, x, row_bytes, y, row_bytes, y, row_bytes)

    return compile_kernel(mix_block)
