"""The kernels of a matmul on matrix tiles: compiled functions over strips of weight rows times many activation rows.

Each function here compiles a kernel for the thread team; its docstring lists the parameter slots.
Addresses and strides are bytes. matrix_tile_ir.py says how operands lie.

Does not know: tensors. tile_matmul.py fills the parameters.
"""

from __future__ import annotations

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm.matrix_tiles import BLOCK, HALF_BYTES, MOST_BLOCKS, STEP, TILE_BYTES
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.ir.matrix_tile_ir import (
    configure_tiles,
    finish_tile,
    multiply_matrix_tile,
    pack_tile,
    release_tiles,
    scale_row,
    split_row,
)
from quengine.kernels.cpu.ir.panel_ir import GROUPS, unpack_row
from quengine.kernels.cpu.ir.row_ir import dequantize_row, get, put
from quengine.kernels.cpu.ir.tile_ir import clear_floats, copy_floats, prefetch, stack_floats
from quengine.kernels.cpu.runtime.atomics import call_kernel
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def matrix_pack_kernel() -> bytes:
    """fp32 rows as packed activations. A task is DEPTH columns of a block of 32 rows; a last one repeats the last row.

    0 x, 1 x stride, 2 rows, 3 columns, 4 packed, 5 blocks. Task: first columns of all blocks, then the next ones.
    """
    variant, size, half_rows, step, tile_bytes = "pack", BLOCK, BLOCK // 2, STEP, TILE_BYTES
    edge_floats = half_rows * step

    def matrix_pack(context: int, task: int) -> None:
        stride, rows, cols = get(context, 1), get(context, 2), get(context, 3)
        begin, edge = task // get(context, 5) * DEPTH, stack_floats(edge_floats)
        target = get(context, 4) + task * 4 * DEPTH * size
        for k in range(begin, min(begin + DEPTH, cols), step):
            count = min(step, cols - k)
            for half in range(2):
                first = task % get(context, 5) * size + half * half_rows
                x = get(context, 0) + 4 * k
                if count == step and first + half_rows <= rows:
                    pack_tile(variant, x + first * stride, stride, target)
                else:
                    clear_floats(variant, edge, edge_floats)
                    for i in range(half_rows):
                        row = x + min(first + i, rows - 1) * stride
                        copy_floats(variant, row, edge + 4 * step * i, count)
                    pack_tile(variant, edge, 4 * step, target)
                target += 2 * tile_bytes

    return compile_kernel(matrix_pack)


def weight_tiles_kernel(format_name: str) -> bytes:
    """Rows of a weight, `depth` columns of them, as tiles of two terms. Task g writes the g-th half of a panel.

    0 weights, from the first of the columns on; 1 row bytes, 2 rows (the last one is repeated), 3 depth, 4 tiles.
    Missing columns of a last step are zeros.
    """
    if FORMATS[format_name].is_quantized:
        return _quantized_tiles_kernel(format_name)
    variant, half_rows, step = format_name, BLOCK // 2, STEP
    item, half_bytes, depth_floats = FORMATS[format_name].nbytes, HALF_BYTES, DEPTH

    def float_tiles(context: int, task: int) -> None:
        depth, row = get(context, 3), stack_floats(depth_floats)
        whole = (depth + step - 1) // step * step
        clear_floats(variant, row + 4 * depth, whole - depth)
        for i in range(half_rows):
            w = get(context, 0) + min(task * half_rows + i, get(context, 2) - 1) * get(context, 1)
            dequantize_row(variant, w, depth, row)
            for line in range(0, depth * item, 64):
                prefetch(w + depth * item + line)
            split_row(variant, row, whole, get(context, 4) + half_bytes * task + 64 * i)

    return compile_kernel(float_tiles)


def _quantized_tiles_kernel(format_name: str) -> bytes:
    variant, half_rows = format_name, BLOCK // 2
    block, block_bytes = FORMATS[format_name].block, FORMATS[format_name].nbytes
    half_bytes, code_floats, group_floats = HALF_BYTES, DEPTH // 4, GROUPS

    def quantized_tiles(context: int, task: int) -> None:
        depth, codes = get(context, 3), stack_floats(code_floats)
        scales, mins = stack_floats(group_floats), stack_floats(group_floats)
        row_bytes = depth // block * block_bytes
        for i in range(half_rows):
            w = get(context, 0) + min(task * half_rows + i, get(context, 2) - 1) * get(context, 1)
            unpack_row(variant, w, depth // block, codes, scales, mins)
            for line in range(0, row_bytes, 64):
                prefetch(w + row_bytes + line)
            scale_row(variant, codes, depth, scales, mins, get(context, 4) + half_bytes * task + 64 * i)

    return compile_kernel(quantized_tiles)


def matrix_matmul_kernel() -> bytes:
    """Strips of 32 weight rows times packed activations, plus an addend. A task is some strips.

    0 weights, 1 row bytes, 2 rows, 3 columns, 4 packed activations, 5 their rows, 6 addend (fp32), 7 its stride, 8 y
    (fp32), 9 its stride, 10 the kernel that makes half a panel's tiles, 11 weights per block, 12 bytes per block, 13
    strips of a task: with so many rows at most MOST_BLOCKS blocks of sums. The addend may be y.
    """
    variant, one, two = "matrix", "1", "2"
    size, half_rows, step, tile_bytes, block_bytes = BLOCK, BLOCK // 2, STEP, TILE_BYTES, 4 * DEPTH * BLOCK
    sum_floats, panel_floats = MOST_BLOCKS * BLOCK * BLOCK, BLOCK * DEPTH
    edge_floats, request_floats = TILE_BYTES // 4, 16

    def matrix_matmul(context: int, task: int) -> None:
        row_bytes, cols, x_rows = get(context, 1), get(context, 3), get(context, 5)
        begin = task * get(context, 13) * size
        end = min(begin + get(context, 13) * size, get(context, 2))
        blocks = (x_rows + size - 1) // size
        sums, tiles, edge = stack_floats(sum_floats), stack_floats(panel_floats), stack_floats(edge_floats)
        request = stack_floats(request_floats)
        configure_tiles(request)
        put(request, 1, row_bytes)
        put(request, 4, tiles)
        for k in range(0, cols, DEPTH):
            # The activations of these columns stay in the L2 cache for all strips.
            depth = min(DEPTH, cols - k)
            whole = (depth + step - 1) // step * step
            put(request, 3, depth)
            packed, block = get(context, 4) + 4 * k * blocks * size, sums
            for first in range(begin, end, size):
                w = get(context, 0) + first * row_bytes + k // get(context, 11) * get(context, 12)
                put(request, 0, w)
                put(request, 2, min(size, end - first))
                for half in range(2):
                    call_kernel(get(context, 10), request, half)
                for b in range(blocks):
                    x, place = packed + block_bytes * b, block + 4 * tile_bytes * b
                    if x_rows - b * size > half_rows:
                        multiply_matrix_tile(two, tiles, whole, x, place, int(k == 0))
                    else:
                        multiply_matrix_tile(one, tiles, whole, x, place, int(k == 0))
                block += 4 * tile_bytes * blocks
        release_tiles()
        for i in range(0, x_rows, half_rows):
            valid = min(half_rows, x_rows - i)
            tile = sums + (i // half_rows + i // size * 2) * tile_bytes
            for j in range(begin, end, half_rows):
                count = min(half_rows, end - j)
                addend, stride = get(context, 6) + 4 * j + i * get(context, 7), get(context, 7)
                y, y_stride = get(context, 8) + 4 * j + i * get(context, 9), get(context, 9)
                if valid == half_rows and count == half_rows:
                    finish_tile(variant, tile, addend, stride, y, y_stride)
                else:
                    for n in range(half_rows):
                        row = edge + 4 * half_rows * n
                        copy_floats(variant, addend + min(n, valid - 1) * stride, row, count)
                    finish_tile(variant, tile, edge, 4 * half_rows, edge, 4 * half_rows)
                    for n in range(valid):
                        copy_floats(variant, edge + 4 * half_rows * n, y + n * y_stride, count)
                # The other half of the weight rows, then the next strip.
                tile += 2 * tile_bytes if (j - begin) % size == 0 else (4 * blocks - 2) * tile_bytes

    return compile_kernel(matrix_matmul)
