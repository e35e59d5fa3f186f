"""Activations without a gate on the CPU, compiled, with the quantization of the result; see `kernels/pointwise.py`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import pointwise_kernel
from quengine.kernels.cpu.runtime.threads import Launch, get_threads, run
from quengine.kernels.pointwise import Pointwise

_COLUMNS, _TASKS = 64, 4  # columns per task are a multiple of _COLUMNS; _TASKS tasks per thread


@dataclass
class PointwiseArguments(Arguments):
    """x: fp32 [rows, cols], overwritten; records: quantized activations, or 0. Both are addresses."""

    x: int
    rows: int
    cols: int
    task_cols: int
    records: int
    record_stride: int


def pointwise_launch(x: Tensor, records: Tensor | None, step: int, activation: Pointwise) -> Launch:
    """The activation of x fp32 [T, F], contiguous, in place. A task is `step` columns of all rows.

    With `records`, uint8 [T, quantized_row_bytes(F)], contiguous, the rows are quantized into it as well; `step` and F
    must be multiples of 32.
    """
    rows, width = x.shape
    assert x.is_contiguous() and (records is None or (step % 32 == 0 and width % 32 == 0))
    arguments = PointwiseArguments(
        x=x.data_ptr(),
        rows=rows,
        cols=width,
        task_cols=step,
        records=0 if records is None else records.data_ptr(),
        record_stride=0 if records is None else records.stride(0),
    )
    return Launch(pointwise_kernel(activation), arguments, -(-width // step), keep=(x, records))


def pointwise(x: Tensor, activation: Pointwise = "relu2") -> Tensor:
    """The activation of x fp32 [T, F], in place: x itself, or where it is not contiguous a copy."""
    x = x.contiguous()
    step = -(-x.shape[1] // (_COLUMNS * _TASKS * get_threads())) * _COLUMNS
    run([pointwise_launch(x, None, step, activation)])
    return x
