"""The AMX kernels of prefill matmul: strips of weight rows times many activation rows. Layouts are in amx_ir.py."""

from __future__ import annotations

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm.amx import BLOCK, HALF_BYTES, MOST_BLOCKS, STEP, TILE_BYTES
from quengine.kernels.cpu.gemm.tiles import DEPTH, MatmulArguments, PackArguments, PanelArguments
from quengine.kernels.cpu.ir.amx_ir import (
    configure_tiles,
    finish_tile,
    multiply_amx_tiles,
    pack_tile,
    release_tiles,
    scale_and_split_row,
    split_row,
)
from quengine.kernels.cpu.ir.panel_ir import GROUPS, unpack_row
from quengine.kernels.cpu.ir.row_ir import dequantize_row
from quengine.kernels.cpu.ir.tile_ir import clear_floats, copy_floats, prefetch, stack_floats
from quengine.kernels.cpu.runtime.argument_types import arguments_at
from quengine.kernels.cpu.runtime.atomics import call_kernel
from quengine.kernels.cpu.runtime.compiled import compile_kernel

_HALF = BLOCK // 2  # rows of a tile


def amx_pack_kernel() -> bytes:
    """Packs fp32 rows into activation tiles. A task is DEPTH columns of 32 rows; the last row fills a last block.

    Tasks are ordered by column first: the first DEPTH columns of all blocks, then the next.
    """
    edge_floats = _HALF * STEP

    def amx_pack(args: PackArguments, task: int) -> None:
        stride, rows, cols = args.x_stride, args.rows, args.cols
        begin, edge = task // args.blocks * DEPTH, stack_floats(edge_floats)
        target = args.packed + task * 4 * DEPTH * BLOCK
        for k in range(begin, min(begin + DEPTH, cols), STEP):
            count = min(STEP, cols - k)
            for half in range(2):
                first = task % args.blocks * BLOCK + half * _HALF
                x = args.x + 4 * k
                if count == STEP and first + _HALF <= rows:
                    pack_tile(x + first * stride, stride, target)
                else:
                    clear_floats(edge, edge_floats)
                    for i in range(_HALF):
                        copy_floats(x + min(first + i, rows - 1) * stride, edge + 4 * STEP * i, count)
                    pack_tile(edge, 4 * STEP, target)
                target += 2 * TILE_BYTES

    return compile_kernel(amx_pack, PackArguments)


def amx_panel_kernel(format_name: str) -> bytes:
    """Unpacks weights into a panel of two-term tiles: task g writes its g-th half. Columns past the width are zeros."""
    if FORMATS[format_name].is_quantized:
        return _quantized_tiles_kernel(format_name)
    item = FORMATS[format_name].nbytes

    def float_tiles(args: PanelArguments, task: int) -> None:
        depth, row = args.depth, stack_floats(DEPTH)
        whole = (depth + STEP - 1) // STEP * STEP
        clear_floats(row + 4 * depth, whole - depth)
        for i in range(_HALF):
            w = args.weights + min(task * _HALF + i, args.rows - 1) * args.row_bytes
            dequantize_row(format_name, w, depth, row)
            for line in range(0, depth * item, 64):
                prefetch(w + depth * item + line)
            split_row(row, whole, args.panel + HALF_BYTES * task + 64 * i)

    return compile_kernel(float_tiles, PanelArguments)


def _quantized_tiles_kernel(format_name: str) -> bytes:
    block, block_bytes = FORMATS[format_name].block, FORMATS[format_name].nbytes
    code_floats = DEPTH // 4

    def quantized_tiles(args: PanelArguments, task: int) -> None:
        depth, codes = args.depth, stack_floats(code_floats)
        scales, mins = stack_floats(GROUPS), stack_floats(GROUPS)
        row_bytes = depth // block * block_bytes
        for i in range(_HALF):
            w = args.weights + min(task * _HALF + i, args.rows - 1) * args.row_bytes
            unpack_row(format_name, w, depth // block, codes, scales, mins)
            for line in range(0, row_bytes, 64):
                prefetch(w + row_bytes + line)
            target = args.panel + HALF_BYTES * task + 64 * i
            scale_and_split_row(format_name, codes, depth, scales, mins, target)

    return compile_kernel(quantized_tiles, PanelArguments)


def amx_matmul_kernel(one_term: bool = False) -> bytes:
    """A task is a few strips of 32 weight rows, at most MOST_BLOCKS blocks of sums with the activation rows.

    one_term: the second terms of weights are 0.
    """
    one, two, block_bytes, terms, line = 1, 2, 4 * DEPTH * BLOCK, 1 if one_term else 2, 64
    sum_floats, panel_floats, edge_floats = MOST_BLOCKS * BLOCK * BLOCK, BLOCK * DEPTH, TILE_BYTES // 4
    # request: as large as the tile configuration, which uses the same memory
    request_at, request_floats = arguments_at(PanelArguments), 16

    def amx_matmul(args: MatmulArguments, task: int) -> None:
        row_bytes, cols, x_rows = args.row_bytes, args.cols, args.x_rows
        begin = task * args.task_strips * BLOCK
        end = min(begin + args.task_strips * BLOCK, args.rows)
        blocks = (x_rows + BLOCK - 1) // BLOCK
        sums, tiles, edge = stack_floats(sum_floats), stack_floats(panel_floats), stack_floats(edge_floats)
        memory = stack_floats(request_floats)
        configure_tiles(memory)
        request = request_at(memory)
        request.row_bytes = row_bytes
        request.panel = tiles
        for k in range(0, cols, DEPTH):
            # The activations of these columns stay in the L2 cache for all strips.
            depth = min(DEPTH, cols - k)
            whole = (depth + STEP - 1) // STEP * STEP
            request.depth = depth
            packed, block = args.packed + 4 * k * blocks * BLOCK, sums
            for first in range(begin, end, BLOCK):
                request.weights = (
                    args.weights + first * row_bytes + k // args.block_weights * args.block_bytes
                )
                request.rows = min(BLOCK, end - first)
                for half in range(2):
                    call_kernel(args.panel_kernel, request, half)
                for b in range(blocks):
                    x, place = packed + block_bytes * b, block + 4 * TILE_BYTES * b
                    if x_rows - b * BLOCK > _HALF:
                        multiply_amx_tiles(two, terms, tiles, whole, x, place, line, int(k == 0))
                    else:
                        multiply_amx_tiles(one, terms, tiles, whole, x, place, line, int(k == 0))
                block += 4 * TILE_BYTES * blocks
        release_tiles()
        for i in range(0, x_rows, _HALF):
            valid = min(_HALF, x_rows - i)
            tile = sums + (i // _HALF + i // BLOCK * 2) * TILE_BYTES
            for j in range(begin, end, _HALF):
                count = min(_HALF, end - j)
                addend, stride = args.addend + 4 * j + i * args.addend_stride, args.addend_stride
                y, y_stride = args.y + 4 * j + i * args.y_stride, args.y_stride
                if valid == _HALF and count == _HALF:
                    finish_tile(tile, addend, stride, y, y_stride)
                else:
                    for n in range(_HALF):
                        copy_floats(addend + min(n, valid - 1) * stride, edge + 4 * _HALF * n, count)
                    finish_tile(tile, edge, 4 * _HALF, edge, 4 * _HALF)
                    for n in range(valid):
                        copy_floats(edge + 4 * _HALF * n, y + n * y_stride, count)
                # From the first half of a strip's weight rows to the second, then to the next strip.
                tile += 2 * TILE_BYTES if (j - begin) % BLOCK == 0 else (4 * blocks - 2) * TILE_BYTES

    return compile_kernel(amx_matmul, MatmulArguments)
