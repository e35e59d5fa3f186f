"""The kernels of prefill matmul on AMX tiles of bytes. Layouts are in amx_bytes.py."""

from __future__ import annotations

from numba import njit

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm.amx_bytes import (
    COLUMNS,
    FEW_ROWS,
    HALF_BYTES,
    MOST_SUMS,
    ROW_BYTES,
    ROWS,
    SCALE,
    TILE_BYTES,
    BytePanelArguments,
)
from quengine.kernels.cpu.gemm.tiles import DEPTH, MatmulArguments, PackArguments
from quengine.kernels.cpu.ir.amx_bytes_ir import (
    add_floats,
    add_scaled,
    configure_rows,
    fill_byte_panel,
    multiply_and_add,
    multiply_byte_tiles,
    quantize_two_bytes,
)
from quengine.kernels.cpu.ir.amx_ir import release_tiles
from quengine.kernels.cpu.ir.tile_ir import clear_floats, prefetch, stack_floats
from quengine.kernels.cpu.ir.vnni_ir import find_largest
from quengine.kernels.cpu.runtime.argument_types import arguments_at
from quengine.kernels.cpu.runtime.atomics import call_kernel, read_lines
from quengine.kernels.cpu.runtime.compiled import compile_kernel

_HALF = COLUMNS // 2


def amx_bytes_pack_kernel() -> bytes:
    """Packs fp32 activation rows. A task is DEPTH columns of a block; rows past the last one are left as they are.

    Tasks are ordered by column first: the first DEPTH columns of all blocks, then the next.
    """
    block_bytes = ROWS * ROW_BYTES

    def amx_bytes_pack(args: PackArguments, task: int) -> None:
        first, target = task % args.blocks * ROWS, args.packed + task * block_bytes
        x, stride = args.x + 4 * DEPTH * (task // args.blocks) + first * args.x_stride, args.x_stride
        rows, largest = min(ROWS, args.rows - first), stack_floats(ROWS)
        # Both steps are chains of dependent instructions: rows side by side overlap.
        for i in range(rows):
            find_largest(x + i * stride, largest + 4 * i)
        for i in range(rows):
            quantize_two_bytes(x + i * stride, largest + 4 * i, target, i)

    return compile_kernel(amx_bytes_pack, PackArguments)


def amx_bytes_panel_kernel(format_name: str) -> bytes:
    """Unpacks weights into a panel; task g writes its g-th half."""

    def amx_bytes_panel(args: BytePanelArguments, task: int) -> None:
        half = args.panel + HALF_BYTES * task
        fill_byte_panel(format_name, args.weights, args.row_bytes, task * _HALF, args.rows - 1, half)

    return compile_kernel(amx_bytes_panel, BytePanelArguments)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _prefetch_share(
    args: MatmulArguments, first: int, end: int, column: int, share: int, shares: int
) -> None:
    """Prefetches a share of super-block `column` of the strip at row `first`, of its rows before `end`, if any."""
    place, count = (
        args.weights + first * args.row_bytes + column * args.block_bytes,
        min(COLUMNS, end - first),
    )
    for i in range(count * share // shares, count * (share + 1) // shares):
        for line in range(0, args.block_bytes, 64):
            prefetch(place + i * args.row_bytes + line)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _prefetch_run(address: int, count: int, share: int, shares: int) -> None:
    """Prefetches a share of `count` bytes, none at address 0."""
    if address:
        for line in range(count * share // shares, count * (share + 1) // shares, 64):
            prefetch(address + line)


def amx_bytes_matmul_kernel(format_name: str) -> bytes:
    """A task is a few strips of COLUMNS weight rows; with the activation rows they make at most MOST_SUMS sums.

    With few activation rows a strip is multiplied over all columns: its weights are one run of bytes, and the next
    strip is prefetched meanwhile. With many, the activations of DEPTH columns stay in the L2 cache for all strips.
    """
    x_bytes, block_bytes = ROWS * ROW_BYTES, FORMATS[format_name].nbytes
    panel_floats, tile_bytes, sum_floats = 2 * HALF_BYTES // 4, 4 * ROWS * COLUMNS, 6 * TILE_BYTES // 4
    strip_bytes = (
        COLUMNS * block_bytes
    )  # of the next strip's run, prefetched while a super-block is multiplied
    request_at, request_floats = arguments_at(BytePanelArguments), 16  # as large as the tile configuration

    def amx_bytes_matmul(args: MatmulArguments, task: int) -> None:
        weights, row_bytes, cols, x_rows = args.weights, args.row_bytes, args.cols, args.x_rows
        begin = task * args.task_strips * COLUMNS
        end = min(begin + args.task_strips * COLUMNS, args.rows)
        blocks, few = (x_rows + ROWS - 1) // ROWS, x_rows <= FEW_ROWS
        panel, sums = stack_floats(panel_floats), stack_floats(sum_floats)
        totals, memory = stack_floats(MOST_SUMS), stack_floats(request_floats)
        clear_floats(totals, (end - begin + COLUMNS - 1) // COLUMNS * blocks * tile_bytes // 4)
        configure_rows(memory, min(ROWS, x_rows))
        request = request_at(memory)
        request.row_bytes = row_bytes
        request.panel = panel
        if few:
            read_lines(weights + begin * row_bytes, min(COLUMNS, end - begin) * row_bytes)
        run = cols if few else DEPTH
        for start in range(0, cols, run):
            total = totals
            for first in range(begin, end, COLUMNS):
                request.rows = min(COLUMNS, end - first)
                for k in range(start, start + run, DEPTH):
                    request.weights = weights + first * row_bytes + k // DEPTH * block_bytes
                    ahead, shares = 0, blocks + 2
                    if few and first + COLUMNS < end:
                        ahead = weights + (first + COLUMNS) * row_bytes + k // DEPTH * strip_bytes
                    for half in range(2):
                        _prefetch_run(ahead, strip_bytes, half, shares)
                        call_kernel(args.panel_kernel, request, half)
                    x = args.packed + k // DEPTH * blocks * x_bytes
                    for b in range(blocks):
                        place = total + b * tile_bytes
                        if b:
                            before = x - x_bytes + SCALE
                            multiply_and_add(format_name, x, panel, sums, before, place - tile_bytes)
                        else:
                            multiply_byte_tiles(format_name, x, panel, sums)
                        # What is unpacked next, spread over the work: a burst would stall on the memory.
                        if few:
                            _prefetch_run(ahead, strip_bytes, 2 + b, shares)
                        elif first + COLUMNS < end:
                            _prefetch_share(args, first + COLUMNS, end, k // DEPTH, b, blocks)
                        elif k + DEPTH < cols:
                            _prefetch_share(args, begin, end, k // DEPTH + 1, b, blocks)
                        x += x_bytes
                    rows, place = x_rows - (blocks - 1) * ROWS, total + (blocks - 1) * tile_bytes
                    add_scaled(format_name, rows, sums, x - x_bytes + SCALE, panel, place)
                total += tile_bytes * blocks
        release_tiles()
        for first in range(begin, end, COLUMNS):
            count, total = min(COLUMNS, end - first), totals + 4 * (first - begin) * blocks * ROWS
            for i in range(x_rows):
                added, y = args.addend + i * args.addend_stride, args.y + i * args.y_stride
                add_floats(total + 4 * COLUMNS * i, added + 4 * first, y + 4 * first, count)

    return compile_kernel(amx_bytes_matmul, MatmulArguments)
