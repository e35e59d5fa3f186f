"""The gated short convolution on the CPU, compiled; defined in kernels/short_conv.py.

Positions and slots are read from memory when the kernel runs, so that a compiled list of kernels serves every token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import short_conv_kernel
from quengine.kernels.cpu.runtime.threads import Launch, get_threads
from quengine.kernels.short_conv import ShortConvSpec

_LEAST = 64
"""Channels per task, at least: 256 bytes of each row."""


@dataclass
class ShortConvArguments(Arguments):
    """bcx, weight, state, out: fp32 at addresses. positions: int64, one per row.

    tables: int64 rows, `table_stride` bytes apart, that begin with a row's slot. channels, taps, history: the
    convolution's sizes. task_channels: channels per task.
    """

    bcx: int
    weight: int
    state: int
    out: int
    positions: int
    tables: int
    table_stride: int
    rows: int
    channels: int
    taps: int
    history: int
    task_channels: int


def short_conv_launch(
    bcx: Tensor, spec: ShortConvSpec, layer: SlotLayer, positions: Tensor, tables: Tensor, out: Tensor
) -> Launch:
    """out [T, C] of bcx [T, 3C], both fp32 and contiguous. A task takes a few channels of all rows, in order.

    positions: int64 [T]. tables: int64 [T, ...], the slots in the first column. Both are read when the kernel runs.
    """
    assert bcx.is_contiguous() and out.is_contiguous() and spec.weight.is_contiguous()
    history = layer.parts[0]
    assert history.is_contiguous() and history.dtype == torch.float32
    step = max(_LEAST, -(-spec.channels // (4 * get_threads())) // 8 * 8)
    arguments = ShortConvArguments(
        bcx=bcx.data_ptr(),
        weight=spec.weight.data_ptr(),
        state=history.data_ptr(),
        out=out.data_ptr(),
        positions=positions.data_ptr(),
        tables=tables.data_ptr(),
        table_stride=8 * tables.stride(0),
        rows=len(bcx),
        channels=spec.channels,
        taps=spec.taps,
        history=history.shape[1],
        task_channels=step,
    )
    keep = (bcx, spec.weight, history, out, positions, tables)
    return Launch(short_conv_kernel(), arguments, -(-spec.channels // step), keep=keep)
