"""The int16 kernels of prefill matmul: strips of weight rows times many activation rows.

Layouts are in vnni.py and vnni_ir.py.
"""

from __future__ import annotations

from numba import njit

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm.tiles import DEPTH, MatmulArguments, PackArguments
from quengine.kernels.cpu.gemm.vnni import (
    FEW_ROWS,
    MOST_SUMS,
    PANEL_ROWS,
    ROW_BYTES,
    TAIL,
    VnniPanelArguments,
    int16_tile,
)
from quengine.kernels.cpu.ir.panel_ir import GROUPS
from quengine.kernels.cpu.ir.tile_ir import clear_floats, copy_floats, prefetch, stack_floats
from quengine.kernels.cpu.ir.vnni_ir import (
    TRANSPOSED,
    find_largest,
    find_scale,
    interleave_pairs,
    multiply_int16,
    quantize_int16,
)
from quengine.kernels.cpu.ir.vnni_panel_ir import fill_int16_panel
from quengine.kernels.cpu.runtime.argument_types import arguments_at
from quengine.kernels.cpu.runtime.arguments import size_of
from quengine.kernels.cpu.runtime.atomics import call_kernel, read_lines
from quengine.kernels.cpu.runtime.compiled import compile_kernel

_COLUMNS, _ROWS = int16_tile().columns, int16_tile().rows


def vnni_pack_kernel() -> bytes:
    """Packs fp32 activation rows. A task is a block of rows; the last row fills a last block.

    The number of columns is a multiple of DEPTH.
    """
    pair_bytes, block_bytes = 2 * DEPTH * _ROWS, ROW_BYTES * _ROWS
    pair_floats = 2 * DEPTH * TRANSPOSED // 4

    def vnni_pack(args: PackArguments, task: int) -> None:
        x, stride, rows = args.x, args.x_stride, args.rows
        pairs, inverses = stack_floats(pair_floats), stack_floats(_ROWS)
        for k in range(0, args.cols, DEPTH):
            block = args.packed + (k // DEPTH * args.blocks + task) * block_bytes
            # Each of the three steps is a chain of dependent instructions: rows side by side overlap.
            for i in range(_ROWS):
                source = x + min(task * _ROWS + i, rows - 1) * stride + 4 * k
                find_largest(source, inverses + 4 * i)
            for i in range(_ROWS):
                source = x + min(task * _ROWS + i, rows - 1) * stride + 4 * k
                find_scale(source, inverses + 4 * i, block + pair_bytes + TAIL * i)
            for i in range(_ROWS):
                source = x + min(task * _ROWS + i, rows - 1) * stride + 4 * k
                tail, row = block + pair_bytes + TAIL * i, pairs + 2 * DEPTH * i
                quantize_int16(source, inverses + 4 * i, row, tail)
            interleave_pairs(pairs, block)

    return compile_kernel(vnni_pack, PackArguments)


def vnni_panel_kernel(format_name: str) -> bytes:
    """Unpacks weights into an int16 panel; task g writes its g-th PANEL_ROWS columns."""
    d_bytes, min_bytes = 4 * PANEL_ROWS, 4 * PANEL_ROWS * GROUPS

    def vnni_panel(args: VnniPanelArguments, task: int) -> None:
        w, row_bytes, last = args.weights, args.row_bytes, args.rows - 1
        panel, d = args.panel + d_bytes * task, args.d + d_bytes * task
        mins, first = args.mins + min_bytes * task, task * PANEL_ROWS
        fill_int16_panel(format_name, w, row_bytes, first, last, panel, d, mins)

    return compile_kernel(vnni_panel, VnniPanelArguments)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy_strips(
    source: int, source_row: int, source_strip: int, target: int, row: int, strip: int, rows: int, count: int
) -> None:
    """Copies `count` fp32 of each row, a strip of columns at a time; strides: bytes between rows, between strips."""
    for i in range(rows):
        for k in range((count + _COLUMNS - 1) // _COLUMNS):
            copy_floats(
                source + i * source_row + k * source_strip,
                target + i * row + k * strip,
                min(_COLUMNS, count - k * _COLUMNS),
            )


@njit(inline="always")  # type: ignore[untyped-decorator]
def _prefetch_panel(
    args: MatmulArguments, begin: int, first: int, end: int, k: int, share: int, shares: int
) -> None:
    """Prefetches a share of the panel that is multiplied next, while columns k of the strip at row `first` are.

    That is the next strip's panel of the same columns, or after the last strip the next columns of the strip at row
    `begin`.
    """
    row, column = first + _COLUMNS, k // DEPTH
    if row >= end:
        row, column = begin, column + 1
    panel = args.weights + row * args.row_bytes + column * args.block_bytes
    for i in range(_COLUMNS * share // shares, _COLUMNS * (share + 1) // shares):
        for line in range(0, args.block_bytes, 64):
            prefetch(panel + i * args.row_bytes + line)


def vnni_matmul_kernel(format_name: str) -> bytes:
    """A task is a few strips of weight rows; with the activation rows they make at most MOST_SUMS sums.

    With few activation rows a strip is multiplied over all columns: its weights are one run of bytes, and the next
    strip is prefetched meanwhile. With many, the activations of DEPTH columns stay in the L2 cache for all strips.
    """
    unpacked, x_bytes, panel_bytes = (
        _COLUMNS // PANEL_ROWS,
        ROW_BYTES * _ROWS,
        _COLUMNS * FORMATS[format_name].nbytes,
    )
    panel_floats, tile_floats, min_floats = _COLUMNS * DEPTH // 2, _COLUMNS * _ROWS, _COLUMNS * GROUPS
    request_at, request_floats = arguments_at(VnniPanelArguments), size_of(VnniPanelArguments) // 4

    def vnni_matmul(args: MatmulArguments, task: int) -> None:
        weights, row_bytes, cols, x_rows = args.weights, args.row_bytes, args.cols, args.x_rows
        begin = task * args.task_strips * _COLUMNS
        end = min(begin + args.task_strips * _COLUMNS, args.rows)
        blocks, few = (x_rows + _ROWS - 1) // _ROWS, x_rows <= FEW_ROWS
        panel, d, mins = stack_floats(panel_floats), stack_floats(_COLUMNS), stack_floats(min_floats)
        totals, request = stack_floats(MOST_SUMS), request_at(stack_floats(request_floats))
        clear_floats(totals, (end - begin + _COLUMNS - 1) // _COLUMNS * blocks * tile_floats)
        addend, addend_stride = args.addend + 4 * begin, args.addend_stride
        row, strip = 4 * _COLUMNS, 4 * tile_floats * blocks
        _copy_strips(addend, addend_stride, row, totals, row, strip, x_rows, end - begin)
        request.row_bytes = row_bytes
        request.panel = panel
        request.d = d
        request.mins = mins
        if few:
            read_lines(weights + begin * row_bytes, min(_COLUMNS, end - begin) * row_bytes)
        for start in range(0, cols, cols if few else DEPTH):
            total = totals
            for first in range(begin, end, _COLUMNS):
                request.rows = min(_COLUMNS, end - first)
                ahead, asked = weights + (first + _COLUMNS) * row_bytes, 0
                if few and first + _COLUMNS < end:
                    asked = panel_bytes // (DEPTH * blocks) + 1
                for k in range(start, cols if few else start + DEPTH, DEPTH):
                    request.weights = weights + first * row_bytes + k // DEPTH * args.block_bytes
                    for group in range(unpacked):
                        call_kernel(args.panel_kernel, request, group)
                    x = args.packed + k // DEPTH * blocks * x_bytes
                    for b in range(blocks):
                        # Spread over the blocks: a burst of prefetches would stall on the memory.
                        if not few:
                            _prefetch_panel(args, begin, first, end, k, b, blocks)
                        rows, place = min(_ROWS, x_rows - b * _ROWS), total + 4 * tile_floats * b
                        multiply_int16(
                            format_name, rows, panel, d, mins, x + x_bytes * b, place, ahead, asked
                        )
                        ahead += DEPTH * asked
                total += strip
        _copy_strips(totals, row, strip, args.y + 4 * begin, args.y_stride, row, x_rows, end - begin)

    return compile_kernel(vnni_matmul, MatmulArguments)
