"""Soft-capped logits on the CPU, compiled: `softcap` of kernels/attention.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import softcap_kernel
from quengine.kernels.cpu.runtime.threads import Launch, run

_TASK_COLUMNS = 4096


@dataclass
class SoftcapArguments(Arguments):
    """y: fp32 rows; stride in bytes."""

    y: int
    y_stride: int
    rows: int
    cols: int
    task_cols: int
    cap: Fp32


def softcap_launch(y: Tensor, cap: float, column: int, count: int, step: int) -> Launch:
    """cap * tanh(y / cap) of y[:, column : column + count], fp32 [T, N], contiguous, in place; a task takes `step`
    columns of all rows."""
    assert y.is_contiguous() and y.dtype == torch.float32
    rows, width = y.shape
    arguments = SoftcapArguments(y.data_ptr() + 4 * column, 4 * width, rows, count, step, cap)
    return Launch(softcap_kernel(), arguments, -(-count // step), keep=(y,))


def softcap(y: Tensor, cap: float) -> Tensor:
    """cap * tanh(y / cap) of fp32 [T, N], contiguous, in place; cap 0: y as it is."""
    if cap:
        run([softcap_launch(y, cap, 0, y.shape[1], _TASK_COLUMNS)])
    return y
