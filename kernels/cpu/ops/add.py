"""Kernels that add a residual or bias to matvec results, or scale their rows, in tasks that match the matvec's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import add_kernel, scale_kernel
from quengine.kernels.cpu.runtime.threads import Launch, run


@dataclass
class AddArguments(Arguments):
    """fp32 arrays at addresses; strides in bytes. scale: multiplies the addend."""

    y: int
    y_stride: int
    addend: int
    addend_stride: int
    rows: int
    cols: int
    task_cols: int
    scale: Fp32


def add_launch(y: Tensor, addend: Tensor, column: int, count: int, step: int, scale: float = 1.0) -> Launch:
    """y[:, column : column + count] += scale * the same columns of addend; a task takes `step` columns of all rows.

    y is fp32 [T, N]; addend is fp32 [T, N], or N elements added to every row. Both are contiguous.
    """
    rows, width = y.shape
    assert addend.numel() in (width, rows * width)
    stride = 4 * width if addend.numel() == rows * width else 0
    arguments = AddArguments(
        *(y.data_ptr() + 4 * column, 4 * width, addend.data_ptr() + 4 * column, stride),
        *(rows, count, step, scale),
    )
    return Launch(add_kernel(), arguments, -(-count // step), keep=(y, addend))


def add_rows_launch(y: Tensor, addend: Tensor, scale: float = 1.0) -> Launch:
    """y += scale * addend, both fp32 [rows, width], contiguous: as one long row, so that a task is a row."""
    flat = y.view(1, -1)
    return add_launch(flat, addend.view(1, -1), 0, flat.shape[1], y.shape[1], scale)


def add_rows(y: Tensor, addend: Tensor, scale: float = 1.0) -> Tensor:
    """`add_rows_launch`, run at once; returns y. torch's own threads would spin beside the team's after every sum."""
    run([add_rows_launch(y, addend.contiguous(), scale)])
    return y


@dataclass
class ScaleArguments(Arguments):
    """fp32 arrays at addresses; `scales` has one element per row; strides in bytes."""

    y: int
    y_stride: int
    scales: int
    rows: int
    cols: int
    task_cols: int


def scale_launch(y: Tensor, scales: Tensor, column: int, count: int, step: int) -> Launch:
    """y[:, column : column + count] *= scales, fp32 of T elements, one per row; otherwise as `add_launch`."""
    rows, width = y.shape
    assert scales.numel() == rows and scales.is_contiguous() and scales.dtype == torch.float32
    arguments = ScaleArguments(y.data_ptr() + 4 * column, 4 * width, scales.data_ptr(), rows, count, step)
    return Launch(scale_kernel(), arguments, -(-count // step), keep=(y, scales))
