"""The kernels of a matmul on 16-bit integers: compiled functions over strips of weight rows times many activation rows.

Each function here compiles a kernel for the thread team; its docstring lists the parameter slots.
Addresses and strides are bytes. word_tiles.py and word_tile_ir.py say how operands lie.

Does not know: tensors. tile_matmul.py fills the parameters.
"""

from __future__ import annotations

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.atomics import call_kernel
from quengine.kernels.cpu.compiled import compile_kernel
from quengine.kernels.cpu.panel_ir import GROUPS
from quengine.kernels.cpu.row_ir import get, put
from quengine.kernels.cpu.tile_ir import clear_floats, copy_floats, prefetch, stack_floats
from quengine.kernels.cpu.tiles import DEPTH
from quengine.kernels.cpu.word_panel_ir import fill_words
from quengine.kernels.cpu.word_tile_ir import multiply_words, round_words
from quengine.kernels.cpu.word_tiles import MOST_ROWS, ROW_BYTES, TAIL, TILE


def word_pack_kernel() -> bytes:
    """fp32 rows as packed activations. A task is a block of rows; a last block repeats the last row.

    0 x, 1 x stride, 2 rows, 3 columns (a multiple of DEPTH), 4 packed, 5 blocks.
    """
    variant, block_rows, tail = "pack", TILE.rows, TAIL
    word_bytes, block_bytes = 2 * DEPTH * TILE.rows, ROW_BYTES * TILE.rows

    def pack_words(context: int, task: int) -> None:
        x, stride, rows, cols = get(context, 0), get(context, 1), get(context, 2), get(context, 3)
        for i in range(block_rows):
            source = x + min(task * block_rows + i, rows - 1) * stride
            for k in range(0, cols, DEPTH):
                block = get(context, 4) + (k // DEPTH * get(context, 5) + task) * block_bytes
                round_words(variant, source + 4 * k, block + 4 * i, block + word_bytes + tail * i)

    return compile_kernel(pack_words)


def word_panel_kernel(format_name: str) -> bytes:
    """DEPTH columns of rows of a weight as a panel. Task g writes its g-th vector of columns.

    0 weights, from the first of the columns on; 1 row bytes, 2 rows (the last one is repeated), 3 panel, 4 d, 5
    minimums.
    """
    variant, lanes, block_bytes = format_name, TILE.lanes, FORMATS[format_name].nbytes
    group_floats = lanes * GROUPS

    def word_panel(context: int, task: int) -> None:
        w, row_bytes, last = get(context, 0), get(context, 1), get(context, 2) - 1
        panel, d = get(context, 3) + 4 * lanes * task, get(context, 4) + 4 * lanes * task
        mins, first = get(context, 5) + 4 * group_floats * task, task * lanes
        fill_words(variant, w, row_bytes, first, last, panel, d, mins)
        for i in range(lanes):
            ahead = w + min(first + i, last) * row_bytes + block_bytes
            for line in range(0, block_bytes, 64):
                prefetch(ahead + line)

    return compile_kernel(word_panel)


def word_matmul_kernel(format_name: str) -> bytes:
    """Strips of weight rows times packed activations, plus an addend. A task is a strip.

    0 weights, 1 row bytes, 2 rows, 3 columns, 4 packed activations, 5 their rows, 6 addend (fp32), 7 its stride, 8 y
    (fp32), 9 its stride, 10 the panel kernel. The addend may be y.
    """
    variant, tile, block_bytes = format_name, TILE, FORMATS[format_name].nbytes
    columns, tile_rows, vectors, x_bytes = tile.columns, tile.rows, tile.vectors, ROW_BYTES * tile.rows
    panel_floats, tile_floats, request_floats = columns * DEPTH // 2, columns * tile_rows, 16
    d_floats, min_floats, total_floats = columns, columns * GROUPS, columns * (MOST_ROWS + tile_rows)

    def word_matmul(context: int, task: int) -> None:
        row_bytes, cols, x_rows = get(context, 1), get(context, 3), get(context, 5)
        first = task * columns
        count = min(columns, get(context, 2) - first)
        blocks = (x_rows + tile_rows - 1) // tile_rows
        panel, d, mins = stack_floats(panel_floats), stack_floats(d_floats), stack_floats(min_floats)
        totals, request = stack_floats(total_floats), stack_floats(request_floats)
        clear_floats(variant, totals, blocks * tile_floats)
        for i in range(x_rows):
            addend = get(context, 6) + 4 * first + i * get(context, 7)
            copy_floats(variant, addend, totals + 4 * columns * i, count)
        put(request, 1, row_bytes)
        put(request, 2, count)
        put(request, 3, panel)
        put(request, 4, d)
        put(request, 5, mins)
        x = get(context, 4)
        for k in range(0, cols, DEPTH):
            put(request, 0, get(context, 0) + first * row_bytes + k // DEPTH * block_bytes)
            for group in range(vectors):
                call_kernel(get(context, 10), request, group)
            for b in range(blocks):
                multiply_words(variant, panel, d, mins, x, totals + 4 * tile_floats * b)
                x += x_bytes
        for i in range(x_rows):
            y = get(context, 8) + 4 * first + i * get(context, 9)
            copy_floats(variant, totals + 4 * columns * i, y, count)

    return compile_kernel(word_matmul)
