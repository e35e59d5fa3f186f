"""The matvec, embedding and quantization kernels: functions over tasks of rows, one variant per block format."""

from __future__ import annotations

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemv.matmul import DequantizeArguments, MatvecArguments, QuantizeArguments
from quengine.kernels.cpu.ir.row_dot_ir import (
    INTS_BYTES,
    SUMS_BYTES,
    dot_rows,
    dot_rows_with_many,
)
from quengine.kernels.cpu.ir.row_ir import (
    dequantize_row,
    dot_float_row,
    int64_at,
    quantize_row,
    scale_row,
    store_f32,
)
from quengine.kernels.cpu.ir.tile_ir import stack_floats
from quengine.kernels.cpu.runtime.compiled import compile_kernel

# activation rows per pass over a weight row: their sums, and short rows themselves, stay in the L1 cache
_RECORDS = 16


def matvec_kernel(format_name: str, many: bool) -> bytes:
    """A quantized weight times one row of quantized activations, or `many`. A task is a run of weight rows."""
    memory_floats = (INTS_BYTES + _RECORDS * SUMS_BYTES) // 4

    def matvec(args: MatvecArguments, task: int) -> None:
        w, row_bytes, rows, step = args.weights, args.row_bytes, args.rows, args.task_rows
        blocks, records, y = args.length, args.x, args.y
        end = min(rows, (task + 1) * step)
        for row in range(task * step, end, 2):
            apart = row_bytes if row + 1 < end else 0
            dot_rows(format_name, w + row * row_bytes, apart, blocks, records, y + 4 * row)

    def matvec_with_many(args: MatvecArguments, task: int) -> None:
        w, row_bytes, rows, step = args.weights, args.row_bytes, args.rows, args.task_rows
        blocks, stride, last, y_stride = args.length, args.x_stride, args.last_x, args.y_stride
        memory = stack_floats(memory_floats)
        for first in range(0, last + 1, _RECORDS):
            count = min(_RECORDS, last + 1 - first)
            records, y = args.x + first * stride, args.y + first * y_stride
            end = min(rows, (task + 1) * step)
            for row in range(task * step, end, 2):
                at, apart = w + row * row_bytes, row_bytes if row + 1 < end else 0
                dot_rows_with_many(
                    format_name, at, apart, blocks, records, stride, count, memory, y + 4 * row, y_stride
                )

    return compile_kernel(matvec_with_many if many else matvec, MatvecArguments)


def float_matvec_kernel(format_name: str) -> bytes:
    """An F32, F16 or BF16 weight times fp32 activations. A task is a run of weight rows."""
    access = "stream"

    def float_matvec(args: MatvecArguments, task: int) -> None:
        w, row_bytes, rows, step = args.weights, args.row_bytes, args.rows, args.task_rows
        cols, x, x_stride, last = args.length, args.x, args.x_stride, args.last_x
        y, y_stride = args.y, args.y_stride
        for first in range(0, last + 1, _RECORDS):
            for row in range(task * step, min(rows, (task + 1) * step)):
                for i in range(first, min(first + _RECORDS, last + 1)):
                    dot = dot_float_row(format_name, access, w + row * row_bytes, cols, x + i * x_stride)
                    store_f32(dot, y + 4 * row + i * y_stride)

    return compile_kernel(float_matvec, MatvecArguments)


def dequantize_kernel(format_name: str) -> bytes:
    """Selected rows of a weight as fp32, times a scale. Task i writes output row i."""
    block = FORMATS[format_name].block

    def dequantize(args: DequantizeArguments, task: int) -> None:
        row, out = int64_at(args.rows, task), args.out + task * args.out_stride
        dequantize_row(format_name, args.weights + row * args.row_bytes, args.blocks, out)
        if args.scale != 1.0:
            scale_row(out, args.scale, args.blocks * block, out)

    return compile_kernel(dequantize, DequantizeArguments)


def quantize_kernel() -> bytes:
    """Rounds fp32 rows to quantized activations. Task i is row i."""

    def round_rows(args: QuantizeArguments, task: int) -> None:
        x, record = args.x + task * args.x_stride, args.records + task * args.record_stride
        quantize_row(x, args.cols, 0, args.cols, record)

    return compile_kernel(round_rows, QuantizeArguments)
