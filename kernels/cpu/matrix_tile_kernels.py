"""The kernels of a matmul on matrix tiles: compiled functions over strips of weight rows times many activation rows.

Each function here compiles a kernel for the thread team; its docstring lists the parameter slots.
Addresses and strides are bytes.

Does not know: tensors. tile_matmul.py fills the parameters.
"""

from __future__ import annotations

from quengine.kernels.cpu.atomics import call_kernel
from quengine.kernels.cpu.compiled import compile_kernel
from quengine.kernels.cpu.matrix_tile_ir import (
    configure_tiles,
    multiply_matrix_tile,
    release_tiles,
    split_panel,
    split_row,
)
from quengine.kernels.cpu.matrix_tiles import BLOCK, MOST_ROWS, STEP, TILE_BYTES
from quengine.kernels.cpu.row_ir import get, put
from quengine.kernels.cpu.tile_ir import clear_floats, copy_floats, stack_floats
from quengine.kernels.cpu.tiles import DEPTH

_HELD = 128  # columns of a panel in the L1 cache: 16 KiB of weights, as much of a block's activations


def matrix_pack_kernel() -> bytes:
    """fp32 rows as packed activations. A task is a block of 32 rows; a last block repeats the last row.

    0 x, 1 x stride, 2 rows, 3 columns, 4 packed, 5 blocks.
    """
    variant, block_rows, step, tile_bytes = "pack", BLOCK, STEP, TILE_BYTES

    def matrix_pack(context: int, task: int) -> None:
        x, stride, rows, cols = get(context, 0), get(context, 1), get(context, 2), get(context, 3)
        for i in range(block_rows):
            source = x + min(task * block_rows + i, rows - 1) * stride
            for k in range(0, cols, step):
                block = (k // DEPTH * get(context, 5) + task) * block_rows * 4 * DEPTH
                tile = 4 * (k % DEPTH // step) + 2 * (i // 16)
                target = get(context, 4) + block + tile * tile_bytes + i % 16 * 64
                split_row(variant, source + 4 * k, min(step, cols - k), target)

    return compile_kernel(matrix_pack)


def split_kernel() -> bytes:
    """An fp32 panel as tiles of two terms; missing lines of a last step are zeros. One task.

    3 depth, 4 panel, 5 tiles.
    """
    variant, columns, step = "split", BLOCK, STEP

    def split(context: int, task: int) -> None:  # noqa: ARG001 (kernels have one signature)
        depth, panel = get(context, 3), get(context, 4)
        whole = (depth + step - 1) // step * step
        if whole > depth:
            clear_floats(variant, panel + 4 * columns * depth, columns * (whole - depth))
        split_panel(variant, panel, whole, get(context, 5))

    return compile_kernel(split)


def matrix_matmul_kernel() -> bytes:
    """Strips of 32 weight rows times packed activations, plus an addend. A task is a strip.

    0 weights, 1 row bytes, 2 rows, 3 columns, 4 packed activations, 5 their rows, at most MOST_ROWS, 6 addend (fp32),
    7 its stride, 8 y (fp32), 9 its stride, 10 the kernel that makes half a panel, 11 weights per block, 12 bytes per
    block, 13 the kernel that makes tiles of a panel in fp32 (0: it is made as tiles). The addend may be y.
    """
    variant, one, two = "matrix", "1", "2"
    size, step, sum_floats, panel_floats, request_floats = BLOCK, STEP, MOST_ROWS * BLOCK, BLOCK * DEPTH, 16
    held, block_bytes, sum_bytes = _HELD, 4 * DEPTH * BLOCK, 4 * BLOCK * BLOCK

    def matrix_matmul(context: int, task: int) -> None:
        row_bytes, cols, x_rows = get(context, 1), get(context, 3), get(context, 5)
        first = task * size
        count = min(size, get(context, 2) - first)
        blocks = (x_rows + size - 1) // size
        sums, panel, tiles = stack_floats(sum_floats), stack_floats(panel_floats), stack_floats(panel_floats)
        request = stack_floats(request_floats)
        clear_floats(variant, sums, blocks * size * size)
        for i in range(x_rows):
            copy_floats(
                variant, get(context, 6) + 4 * first + i * get(context, 7), sums + 4 * size * i, count
            )
        configure_tiles(request)
        for k in range(0, cols, DEPTH):
            depth = min(DEPTH, cols - k)
            put(request, 0, get(context, 0) + first * row_bytes + k // get(context, 11) * get(context, 12))
            put(request, 1, row_bytes)
            put(request, 2, count)
            put(request, 3, depth)
            put(request, 4, panel if get(context, 13) else tiles)
            for half in range(2):
                call_kernel(get(context, 10), request, half)
            if get(context, 13):
                put(request, 5, tiles)
                call_kernel(get(context, 13), request, 0)
            whole = (depth + step - 1) // step * step
            # A part of the panel stays in the L1 cache while activations pass by.
            for part in range(0, whole, held):
                columns = min(held, whole - part)
                weights = tiles + part * 2 * TILE_BYTES // step
                x = get(context, 4) + k * 4 * blocks * size + part * 4 * TILE_BYTES // step
                for b in range(blocks):
                    place, following = sums + b * sum_bytes, x + block_bytes
                    if x_rows - b * size > size // 2:
                        multiply_matrix_tile(two, weights, columns, x, following, place)
                    else:
                        multiply_matrix_tile(one, weights, columns, x, following, place)
                    x = following
        release_tiles()
        for i in range(x_rows):
            y = get(context, 8) + 4 * first + i * get(context, 9)
            copy_floats(variant, sums + 4 * size * i, y, count)

    return compile_kernel(matrix_matmul)
