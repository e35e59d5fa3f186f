"""The kernel of decode's products of several activation rows on AMX tiles. Layouts are in amx_rows.py."""

from __future__ import annotations

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm.amx import TILE_BYTES
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.gemv.amx_rows import MOST_GROUPS, MOST_ROWS, PANEL_BYTES, ROWS
from quengine.kernels.cpu.gemv.matmul import MatvecArguments
from quengine.kernels.cpu.ir.amx_ir import release_tiles
from quengine.kernels.cpu.ir.amx_rows_ir import (
    add_groups,
    configure_groups,
    fill_group_tiles,
    total_lanes,
)
from quengine.kernels.cpu.ir.tile_ir import clear_floats, copy_floats, prefetch, stack_floats
from quengine.kernels.cpu.runtime.atomics import read_lines
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def amx_matvec_kernel(format_name: str) -> bytes:
    """A quantized weight times several rows of quantized activations. A task is a run of weight rows."""
    block_bytes = FORMATS[format_name].nbytes
    panel_floats, sum_floats = PANEL_BYTES // 4, TILE_BYTES
    lane_floats, line_floats = MOST_GROUPS * MOST_ROWS * ROWS, ROWS

    def amx_matvec(args: MatvecArguments, task: int) -> None:
        row_bytes, blocks, stride = args.row_bytes, args.length, args.x_stride
        begin = task * args.task_rows
        end = min(args.rows, begin + args.task_rows)
        panel, sums = stack_floats(panel_floats), stack_floats(sum_floats)
        lanes, line = stack_floats(lane_floats), stack_floats(line_floats)
        read_lines(args.weights + begin * row_bytes, min(ROWS, end - begin) * row_bytes)
        for first_x in range(0, args.last_x + 1, MOST_ROWS):
            count, records = min(MOST_ROWS, args.last_x + 1 - first_x), args.x + first_x * stride
            configure_groups(format_name, line, count)
            for first in range(begin, end, ROWS):
                weights, valid = args.weights + first * row_bytes, min(ROWS, end - first)
                clear_floats(lanes, lane_floats)
                for block in range(blocks):
                    # The next rows' bytes, in their order; those after the task's are of the thread's next one.
                    ahead = weights + ROWS * (row_bytes + block * block_bytes)
                    for at in range(0, ROWS * block_bytes, 64):
                        prefetch(ahead + at)
                    fill_group_tiles(format_name, weights + block * block_bytes, row_bytes, valid - 1, panel)
                    add_groups(
                        format_name,
                        records,
                        stride,
                        blocks * DEPTH,
                        block * DEPTH,
                        count,
                        panel,
                        sums,
                        lanes,
                    )
                y = args.y + 4 * first + first_x * args.y_stride
                for i in range(count):
                    total_lanes(format_name, lanes + i * 4 * ROWS, line)
                    copy_floats(line, y + i * args.y_stride, valid)
        release_tiles()

    return compile_kernel(amx_matvec, MatvecArguments)
