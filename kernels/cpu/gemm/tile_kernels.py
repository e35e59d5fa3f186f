"""The fp32 kernels of prefill matmul: strips of weight rows times many activation rows. Layouts are in tiles.py."""

from __future__ import annotations

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm.tiles import DEPTH, MatmulArguments, PackArguments, PanelArguments
from quengine.kernels.cpu.ir.panel_ir import GROUPS, fill_panel, transpose_groups, unpack_row
from quengine.kernels.cpu.ir.row_ir import dequantize_row
from quengine.kernels.cpu.ir.tile_ir import copy_floats, multiply_few, prefetch, stack_floats, transpose_rows
from quengine.kernels.cpu.runtime.argument_types import arguments_at
from quengine.kernels.cpu.runtime.arguments import size_of
from quengine.kernels.cpu.runtime.atomics import call_kernel
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.cpu.runtime.target import host_tile


def pack_kernel() -> bytes:
    """Packs fp32 activation rows. A task is a block of rows; the last row fills a last block."""
    block_rows = host_tile().rows

    def pack_block(args: PackArguments, task: int) -> None:
        x, stride, rows, cols = args.x, args.x_stride, args.rows, args.cols
        for i in range(block_rows):
            source = x + min(task * block_rows + i, rows - 1) * stride
            for k in range(0, cols, DEPTH):
                place = (k // DEPTH * args.blocks + task) * block_rows + i
                copy_floats(source + 4 * k, args.packed + place * 4 * DEPTH, min(DEPTH, cols - k))

    return compile_kernel(pack_block, PackArguments)


def panel_kernel(format_name: str) -> bytes:
    """Unpacks weights into an fp32 panel; task g writes its g-th vector of columns."""
    if FORMATS[format_name].is_quantized:
        return _quantized_panel_kernel(format_name)
    lanes, item = host_tile().lanes, FORMATS[format_name].nbytes
    floats = lanes * DEPTH

    def float_panel(args: PanelArguments, task: int) -> None:
        depth, rows = args.depth, stack_floats(floats)
        for i in range(lanes):
            w = args.weights + min(task * lanes + i, args.rows - 1) * args.row_bytes
            dequantize_row(format_name, w, depth, rows + 4 * DEPTH * i)
            for line in range(0, depth * item, 64):
                prefetch(w + depth * item + line)
        transpose_rows(rows, 4 * DEPTH, depth, args.panel + 4 * lanes * task)

    return compile_kernel(float_panel, PanelArguments)


def _quantized_panel_kernel(format_name: str) -> bytes:
    fmt, lanes = FORMATS[format_name], host_tile().lanes
    block, block_bytes, has_min = fmt.block, fmt.nbytes, fmt.has_min
    code_floats, group_floats = lanes * DEPTH // 4, lanes * GROUPS

    def quantized_panel(args: PanelArguments, task: int) -> None:
        depth, codes = args.depth, stack_floats(code_floats)
        scales, scale_lines = stack_floats(group_floats), stack_floats(group_floats)
        mins, min_lines = stack_floats(group_floats), stack_floats(group_floats)
        row_bytes = depth // block * block_bytes
        for i in range(lanes):
            w = args.weights + min(task * lanes + i, args.rows - 1) * args.row_bytes
            groups = 4 * GROUPS * i
            unpack_row(format_name, w, depth // block, codes + DEPTH * i, scales + groups, mins + groups)
            for line in range(0, row_bytes, 64):
                prefetch(w + row_bytes + line)
        transpose_groups(scales, scale_lines)
        if has_min:
            transpose_groups(mins, min_lines)
        fill_panel(format_name, codes, depth, scale_lines, min_lines, args.panel + 4 * lanes * task)

    return compile_kernel(quantized_panel, PanelArguments)


def tile_matmul_kernel() -> bytes:
    """Multiplies; a task is a strip of weight rows."""
    tile = host_tile()
    columns, tile_rows, vectors = tile.columns, tile.rows, tile.vectors
    panel_floats, edge_floats = columns * DEPTH, columns * tile_rows
    request_at, request_floats = arguments_at(PanelArguments), size_of(PanelArguments) // 4

    def tile_matmul(args: MatmulArguments, task: int) -> None:
        row_bytes, cols, x_rows, first = args.row_bytes, args.cols, args.x_rows, task * columns
        count = min(columns, args.rows - first)
        blocks = (x_rows + tile_rows - 1) // tile_rows
        panel, edge = stack_floats(panel_floats), stack_floats(edge_floats)
        request = request_at(stack_floats(request_floats))
        start, start_stride = args.addend + 4 * first, args.addend_stride
        y, y_stride = args.y + 4 * first, args.y_stride
        for k in range(0, cols, DEPTH):
            depth = min(DEPTH, cols - k)
            request.weights = args.weights + first * row_bytes + k // args.block_weights * args.block_bytes
            request.row_bytes = row_bytes
            request.rows = count
            request.depth = depth
            request.panel = panel
            for group in range(vectors):
                call_kernel(args.panel_kernel, request, group)
            x = args.packed + k * 4 * blocks * tile_rows
            for b in range(blocks):
                rows = min(tile_rows, x_rows - b * tile_rows)
                source, source_stride = start + b * tile_rows * start_stride, start_stride
                target, target_stride = y + b * tile_rows * y_stride, y_stride
                if count < columns:  # through an edge tile
                    for i in range(rows):
                        copy_floats(source + i * start_stride, edge + 4 * columns * i, count)
                    source, source_stride, target, target_stride = edge, 4 * columns, edge, 4 * columns
                multiply_few(rows, panel, depth, x, 4 * DEPTH, source, source_stride, target, target_stride)
                if count < columns:
                    for i in range(rows):
                        copy_floats(edge + 4 * columns * i, y + (b * tile_rows + i) * y_stride, count)
                x += 4 * DEPTH * tile_rows
            start, start_stride = y, y_stride

    return compile_kernel(tile_matmul, MatmulArguments)
