"""The tile kernels: compiled functions over strips of weight rows times many activation rows.

Each function here compiles a kernel for the thread team; its docstring lists the parameter slots.
Addresses and strides are bytes. See kernel_table.py. tiles.py says how operands lie.

Does not know: tensors. tile_matmul.py fills the parameters.
"""

from __future__ import annotations

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.ir.panel_ir import GROUPS, fill_panel, transpose_groups, unpack_row
from quengine.kernels.cpu.ir.row_ir import dequantize_row, get, put
from quengine.kernels.cpu.ir.tile_ir import copy_floats, multiply_tile, prefetch, stack_floats, transpose_rows
from quengine.kernels.cpu.runtime.atomics import call_kernel
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.cpu.runtime.target import host_tile


def pack_kernel() -> bytes:
    """fp32 rows as packed activations. A task is a block of rows; a last block repeats the last row.

    0 x, 1 x stride, 2 rows, 3 columns, 4 packed, 5 blocks.
    """
    variant, block_rows = "pack", host_tile().rows

    def pack_block(context: int, task: int) -> None:
        x, stride, rows, cols = get(context, 0), get(context, 1), get(context, 2), get(context, 3)
        for i in range(block_rows):
            source = x + min(task * block_rows + i, rows - 1) * stride
            for k in range(0, cols, DEPTH):
                place = (k // DEPTH * get(context, 5) + task) * block_rows + i
                target = get(context, 4) + place * 4 * DEPTH
                copy_floats(variant, source + 4 * k, target, min(DEPTH, cols - k))

    return compile_kernel(pack_block)


def panel_kernel(format_name: str) -> bytes:
    """Rows of a weight, `depth` columns of them, as a panel. Task g writes its g-th vector of columns.

    0 weights, from the first of the columns on; 1 row bytes, 2 rows (the last one is repeated), 3 depth, 4 panel.
    """
    if FORMATS[format_name].is_quantized:
        return _quantized_panel_kernel(format_name)
    variant, lanes = format_name, host_tile().lanes
    floats, item = lanes * DEPTH, FORMATS[format_name].nbytes

    def float_panel(context: int, task: int) -> None:
        depth, rows = get(context, 3), stack_floats(floats)
        for i in range(lanes):
            w = get(context, 0) + min(task * lanes + i, get(context, 2) - 1) * get(context, 1)
            dequantize_row(variant, w, depth, rows + 4 * DEPTH * i)
            for line in range(0, depth * item, 64):
                prefetch(w + depth * item + line)
        transpose_rows(variant, rows, 4 * DEPTH, depth, get(context, 4) + 4 * lanes * task)

    return compile_kernel(float_panel)


def _quantized_panel_kernel(format_name: str) -> bytes:
    variant, tile = format_name, host_tile()
    block, block_bytes = FORMATS[format_name].block, FORMATS[format_name].nbytes
    lanes, code_floats, group_floats = tile.lanes, tile.lanes * DEPTH // 4, tile.lanes * GROUPS
    has_min = FORMATS[format_name].has_min

    def quantized_panel(context: int, task: int) -> None:
        depth, codes = get(context, 3), stack_floats(code_floats)
        scales, scale_lines = stack_floats(group_floats), stack_floats(group_floats)
        mins, min_lines = stack_floats(group_floats), stack_floats(group_floats)
        row_bytes = depth // block * block_bytes
        for i in range(lanes):
            w = get(context, 0) + min(task * lanes + i, get(context, 2) - 1) * get(context, 1)
            groups = 4 * GROUPS * i
            unpack_row(variant, w, depth // block, codes + DEPTH * i, scales + groups, mins + groups)
            for line in range(0, row_bytes, 64):
                prefetch(w + row_bytes + line)
        transpose_groups(variant, scales, scale_lines)
        if has_min:
            transpose_groups(variant, mins, min_lines)
        fill_panel(variant, codes, depth, scale_lines, min_lines, get(context, 4) + 4 * lanes * task)

    return compile_kernel(quantized_panel)


def tile_matmul_kernel() -> bytes:
    """Strips of weight rows times packed activations, plus an addend. A task is a strip.

    0 weights, 1 row bytes, 2 rows, 3 columns, 4 packed activations, 5 their rows, 6 addend (fp32), 7 its stride, 8 y
    (fp32), 9 its stride, 10 the panel kernel, 11 weights per block, 12 bytes per block. The addend may be y.
    """
    variant, tile = "tile", host_tile()
    columns, tile_rows, vectors = tile.columns, tile.rows, tile.vectors
    panel_floats, edge_floats, request_floats = columns * DEPTH, columns * tile_rows, 16

    def tile_matmul(context: int, task: int) -> None:
        row_bytes, cols, x_rows = get(context, 1), get(context, 3), get(context, 5)
        first = task * columns
        count = min(columns, get(context, 2) - first)
        blocks = (x_rows + tile_rows - 1) // tile_rows
        panel, edge, request = (
            stack_floats(panel_floats),
            stack_floats(edge_floats),
            stack_floats(request_floats),
        )
        start, start_stride = get(context, 6) + 4 * first, get(context, 7)
        y, y_stride = get(context, 8) + 4 * first, get(context, 9)
        for k in range(0, cols, DEPTH):
            depth = min(DEPTH, cols - k)
            put(request, 0, get(context, 0) + first * row_bytes + k // get(context, 11) * get(context, 12))
            put(request, 1, row_bytes)
            put(request, 2, count)
            put(request, 3, depth)
            put(request, 4, panel)
            for group in range(vectors):
                call_kernel(get(context, 10), request, group)
            x = get(context, 4) + k * 4 * blocks * tile_rows
            for b in range(blocks):
                valid = min(tile_rows, x_rows - b * tile_rows)
                source, source_stride = start + b * tile_rows * start_stride, start_stride
                target, target_stride = y + b * tile_rows * y_stride, y_stride
                whole = valid == tile_rows and count == columns
                if (
                    not whole
                ):  # through a tile of its own, all of it filled: chance values may be slow to add to
                    for i in range(tile_rows):
                        row = source + min(i, valid - 1) * start_stride
                        copy_floats(variant, row, edge + 4 * columns * i, count)
                    source, source_stride, target, target_stride = edge, 4 * columns, edge, 4 * columns
                multiply_tile(
                    variant, panel, depth, x, 4 * DEPTH, source, source_stride, target, target_stride
                )
                if not whole:
                    for i in range(valid):
                        target = y + (b * tile_rows + i) * y_stride
                        copy_floats(variant, edge + 4 * columns * i, target, count)
                x += 4 * DEPTH * tile_rows
            start, start_stride = y, y_stride

    return compile_kernel(tile_matmul)
