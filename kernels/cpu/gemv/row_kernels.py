"""The row kernels: compiled functions over tasks of weight rows, one variant per block format.

Each function here compiles a kernel for the thread team; its docstring lists the parameter slots.
Addresses and strides are bytes. See kernel_table.py.

Does not know: tensors. matmul.py fills the parameters.
"""

from __future__ import annotations

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.ir.row_dot_ir import (
    INTS_BYTES,
    SUMS_BYTES,
    dot_rows,
    dot_rows_with_many,
    rows_at_once,
)
from quengine.kernels.cpu.ir.row_ir import dequantize_row, dot_float_row, get, round_row, scale_row, store_f32
from quengine.kernels.cpu.ir.tile_ir import stack_floats
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.cpu.runtime.threads import fp32_bits

_RECORDS = 16  # multiplied with one row at a time: their sums, and of short rows they themselves, stay in the L1 cache


def matvec_kernel(format_name: str, many: bool) -> bytes:
    """Rows of a quantized weight times one activation record, or `many`. A task is a run of rows.

    0 weights, 1 row bytes, 2 rows, 3 rows per task, 4 blocks per row, 5 records, 6 record stride, 7 number of the
    last record, 8 y (fp32), 9 y stride from record to record.
    """
    variant = format_name
    at_once = rows_at_once(FORMATS[format_name])
    memory_floats = (INTS_BYTES + _RECORDS * SUMS_BYTES) // 4

    def matvec(context: int, task: int) -> None:
        w, row_bytes, rows, step = get(context, 0), get(context, 1), get(context, 2), get(context, 3)
        blocks, records, y = get(context, 4), get(context, 5), get(context, 8)
        end = min(rows, (task + 1) * step)
        for row in range(task * step, end, at_once):
            apart = row_bytes if row + 1 < end else 0
            dot_rows(variant, w + row * row_bytes, apart, blocks, records, y + 4 * row)

    def matvec_with_many(context: int, task: int) -> None:
        w, row_bytes, rows, step = get(context, 0), get(context, 1), get(context, 2), get(context, 3)
        blocks, stride, last, y_stride = get(context, 4), get(context, 6), get(context, 7), get(context, 9)
        memory = stack_floats(memory_floats)
        for first in range(0, last + 1, _RECORDS):
            count = min(_RECORDS, last + 1 - first)
            records, y = get(context, 5) + first * stride, get(context, 8) + first * y_stride
            end = min(rows, (task + 1) * step)
            for row in range(task * step, end, 2):
                at, apart = w + row * row_bytes, row_bytes if row + 1 < end else 0
                dot_rows_with_many(
                    variant, at, apart, blocks, records, stride, count, memory, y + 4 * row, y_stride
                )

    return compile_kernel(matvec_with_many if many else matvec)


def float_matvec_kernel(format_name: str) -> bytes:
    """Rows of an F32, F16 or BF16 weight times fp32 activations. A task is a run of rows.

    0 weights, 1 row bytes, 2 rows, 3 rows per task, 4 columns, 5 x (fp32), 6 x stride, 7 number of the last x row,
    8 y (fp32), 9 y stride.
    """
    variant = f"{format_name}/stream"

    def float_matvec(context: int, task: int) -> None:
        w, row_bytes, rows, step = get(context, 0), get(context, 1), get(context, 2), get(context, 3)
        cols, x, x_stride, last = get(context, 4), get(context, 5), get(context, 6), get(context, 7)
        y, y_stride = get(context, 8), get(context, 9)
        for row in range(task * step, min(rows, (task + 1) * step)):
            for i in range(last + 1):
                dot = dot_float_row(variant, w + row * row_bytes, cols, x + i * x_stride)
                store_f32(dot, y + 4 * row + i * y_stride)

    return compile_kernel(float_matvec)


def dequantize_kernel(format_name: str) -> bytes:
    """Chosen rows of a weight as fp32, times a scale. Task i writes output row i.

    0 weights, 1 row bytes, 2 blocks per row, 3 row numbers (int64), 4 output (fp32), 5 output stride, 6 scale (the bits
    of an fp32).
    """
    variant, cols = format_name, FORMATS[format_name].block
    one = fp32_bits(1.0)

    def dequantize(context: int, task: int) -> None:
        w, row_bytes, blocks = get(context, 0), get(context, 1), get(context, 2)
        row = get(get(context, 3), task)
        out = get(context, 4) + task * get(context, 5)
        dequantize_row(variant, w + row * row_bytes, blocks, out)
        if get(context, 6) != one:
            scale_row(variant, out, context + 8 * 6, blocks * cols, out)

    return compile_kernel(dequantize)


def round_kernel() -> bytes:
    """fp32 rows to activation records (row_ir.py). Task i is row i.

    0 x (fp32), 1 x stride, 2 columns, 3 records, 4 record stride.
    """
    variant = "round"

    def round_rows(context: int, task: int) -> None:
        x, x_stride, cols = get(context, 0), get(context, 1), get(context, 2)
        round_row(variant, x + task * x_stride, cols, 0, cols, get(context, 3) + task * get(context, 4))

    return compile_kernel(round_rows)
