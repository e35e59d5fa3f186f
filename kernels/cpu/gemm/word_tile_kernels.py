"""The kernels of a matmul on 16-bit integers: compiled functions over strips of weight rows times many activation rows.

Each function here compiles a kernel for the thread team; its docstring lists the parameter slots.
Addresses and strides are bytes. word_tiles.py and word_tile_ir.py say how operands lie.

Does not know: tensors. tile_matmul.py fills the parameters.
"""

from __future__ import annotations

from numba import njit

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.gemm.word_tiles import MOST_SUMS, ROW_BYTES, TAIL, TILE
from quengine.kernels.cpu.ir.panel_ir import GROUPS
from quengine.kernels.cpu.ir.row_ir import get, put
from quengine.kernels.cpu.ir.tile_ir import clear_floats, copy_floats, prefetch, stack_floats
from quengine.kernels.cpu.ir.word_panel_ir import fill_words
from quengine.kernels.cpu.ir.word_tile_ir import (
    find_largest,
    find_scale,
    interleave_words,
    multiply_words,
    round_words,
)
from quengine.kernels.cpu.runtime.atomics import call_kernel
from quengine.kernels.cpu.runtime.compiled import compile_kernel

_COLUMNS = TILE.columns


def word_pack_kernel() -> bytes:
    """fp32 rows as packed activations. A task is a block of rows; a last block repeats the last row.

    0 x, 1 x stride, 2 rows, 3 columns (a multiple of DEPTH), 4 packed, 5 blocks.
    """
    variant, block_rows, tail_bytes, depth = "pack", TILE.rows, TAIL, DEPTH
    word_bytes, block_bytes = 2 * DEPTH * TILE.rows, ROW_BYTES * TILE.rows
    word_floats = word_bytes // 4

    def pack_words(context: int, task: int) -> None:
        x, stride, rows, cols = get(context, 0), get(context, 1), get(context, 2), get(context, 3)
        words, inverses = stack_floats(word_floats), stack_floats(block_rows)
        for k in range(0, cols, depth):
            block = get(context, 4) + (k // depth * get(context, 5) + task) * block_bytes
            # Rows together, as each of the three is a chain of instructions that wait for one another.
            for i in range(block_rows):
                source = x + min(task * block_rows + i, rows - 1) * stride + 4 * k
                find_largest(variant, source, inverses + 4 * i)
            for i in range(block_rows):
                source = x + min(task * block_rows + i, rows - 1) * stride + 4 * k
                find_scale(variant, source, inverses + 4 * i, block + word_bytes + tail_bytes * i)
            for i in range(block_rows):
                source = x + min(task * block_rows + i, rows - 1) * stride + 4 * k
                tail, row = block + word_bytes + tail_bytes * i, words + 2 * depth * i
                round_words(variant, source, inverses + 4 * i, row, tail)
            interleave_words(variant, words, block)

    return compile_kernel(pack_words)


def word_panel_kernel(format_name: str) -> bytes:
    """DEPTH columns of rows of a weight as a panel. Task g writes its g-th vector of columns.

    0 weights, from the first of the columns on; 1 row bytes, 2 rows (the last one is repeated), 3 panel, 4 d, 5
    minimums.
    """
    variant, lanes = format_name, TILE.lanes
    group_floats = lanes * GROUPS

    def word_panel(context: int, task: int) -> None:
        w, row_bytes, last = get(context, 0), get(context, 1), get(context, 2) - 1
        panel, d = get(context, 3) + 4 * lanes * task, get(context, 4) + 4 * lanes * task
        mins, first = get(context, 5) + 4 * group_floats * task, task * lanes
        fill_words(variant, w, row_bytes, first, last, panel, d, mins)

    return compile_kernel(word_panel)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy_strips(
    source: int, source_row: int, source_strip: int, target: int, row: int, strip: int, rows: int, count: int
) -> None:
    """`count` fp32 of each row, a strip's columns at a time; bytes from a row, and from a strip, to the next."""
    for i in range(rows):
        for k in range((count + _COLUMNS - 1) // _COLUMNS):
            copy_floats(
                "strips",
                source + i * source_row + k * source_strip,
                target + i * row + k * strip,
                min(_COLUMNS, count - k * _COLUMNS),
            )


def word_matmul_kernel(format_name: str) -> bytes:
    """Strips of weight rows times packed activations, plus an addend. A task is some strips.

    0 weights, 1 row bytes, 2 rows, 3 columns, 4 packed activations, 5 their rows, 6 addend (fp32), 7 its stride, 8 y
    (fp32), 9 its stride, 10 the panel kernel, 11 strips of a task: with so many rows at most MOST_SUMS. The addend may
    be y.
    """
    variant, tile, block_bytes, few = format_name, TILE, FORMATS[format_name].nbytes, TILE.rows // 2
    whole, part = f"{format_name}/{TILE.rows}", f"{format_name}/{few}"
    columns, tile_rows, vectors, x_bytes = tile.columns, tile.rows, tile.vectors, ROW_BYTES * tile.rows
    panel_floats, tile_floats, request_floats = columns * DEPTH // 2, columns * tile_rows, 16
    d_floats, min_floats, total_floats = columns, columns * GROUPS, MOST_SUMS

    def word_matmul(context: int, task: int) -> None:
        row_bytes, cols, x_rows = get(context, 1), get(context, 3), get(context, 5)
        begin = task * get(context, 11) * columns
        end = min(begin + get(context, 11) * columns, get(context, 2))
        blocks = (x_rows + tile_rows - 1) // tile_rows
        panel, d, mins = stack_floats(panel_floats), stack_floats(d_floats), stack_floats(min_floats)
        totals, request = stack_floats(total_floats), stack_floats(request_floats)
        clear_floats(variant, totals, (end - begin + columns - 1) // columns * blocks * tile_floats)
        addend, addend_stride = get(context, 6) + 4 * begin, get(context, 7)
        row, strip = 4 * columns, 4 * tile_floats * blocks
        _copy_strips(addend, addend_stride, row, totals, row, strip, x_rows, end - begin)
        put(request, 1, row_bytes)
        put(request, 3, panel)
        put(request, 4, d)
        put(request, 5, mins)
        for k in range(0, cols, DEPTH):
            # The activations of these columns stay in the L2 cache for all strips.
            x, total = get(context, 4) + k // DEPTH * blocks * x_bytes, totals
            for first in range(begin, end, columns):
                put(request, 0, get(context, 0) + first * row_bytes + k // DEPTH * block_bytes)
                put(request, 2, min(columns, end - first))
                for group in range(vectors):
                    call_kernel(get(context, 10), request, group)
                ahead = get(request, 0) + columns * row_bytes
                if first + columns >= end:
                    ahead = get(context, 0) + begin * row_bytes + (k // DEPTH + 1) * block_bytes
                for b in range(blocks):
                    # A few at a time: a burst would have to wait for the memory.
                    for i in range(columns * b // blocks, columns * (b + 1) // blocks):
                        for line in range(0, block_bytes, 64):
                            prefetch(ahead + i * row_bytes + line)
                    if x_rows - b * tile_rows > few:
                        multiply_words(whole, panel, d, mins, x + x_bytes * b, total)
                    else:
                        multiply_words(part, panel, d, mins, x + x_bytes * b, total)
                    total += 4 * tile_floats
        _copy_strips(
            totals, row, strip, get(context, 8) + 4 * begin, get(context, 9), row, x_rows, end - begin
        )

    return compile_kernel(word_matmul)
