"""Adding a residual or a bias to matvec results in compiled code, in the tasks of the matvec itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import add_kernel
from quengine.kernels.cpu.runtime.threads import Launch


@dataclass
class AddArguments(Arguments):
    """Of fp32 at addresses; strides in bytes."""

    y: int
    y_stride: int
    addend: int
    addend_stride: int
    rows: int
    cols: int
    task_cols: int


def add_launch(y: Tensor, addend: Tensor, column: int, count: int, step: int) -> Launch:
    """y[:, column : column + count] += the same part of addend; a task takes `step` columns of all rows.

    y is fp32 [T, N], addend fp32 [T, N] or of N elements, which all rows get; both contiguous.
    """
    rows, width = y.shape
    assert addend.numel() in (width, rows * width)
    arguments = AddArguments(
        y=y.data_ptr() + 4 * column,
        y_stride=4 * width,
        addend=addend.data_ptr() + 4 * column,
        addend_stride=4 * width if addend.numel() == rows * width else 0,
        rows=rows,
        cols=count,
        task_cols=step,
    )
    return Launch(add_kernel(), arguments, -(-count // step), keep=(y, addend))
