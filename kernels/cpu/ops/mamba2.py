"""Mamba2's state space layer in compiled code: the twin of kernels/mamba2.py.

There are three kernels. The first takes channels through the convolution and makes time steps of dt, in place. In the
second, a task goes through the positions with some rows of a head's matrix, as no row depends on the others. The third
gates and normalizes. A chunk advances the matrix position by position, as single tokens do, so a sequence's bits do not
depend on its chunks. Positions and slots are read from memory, so that a list of kernels made once serves every token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import (
    mamba2_convolution_kernel,
    mamba2_output_kernel,
    mamba2_scan_kernel,
)
from quengine.kernels.cpu.runtime.threads import Launch, get_threads
from quengine.kernels.mamba2 import Mamba2Spec

ROWS = 32
"""Rows of a head's matrix in a task: with 128 columns 16 KiB, which stay in a core's L1 cache."""

_LEAST = 64
"""Channels per task, at least: 256 bytes of each row."""


@dataclass
class Mamba2Arguments(Arguments):
    """x: fp32 rows of z, xBC and dt, `row_bytes` apart, overwritten but for z. out: fp32 [rows, heads, width].

    positions: int64, one per row. tables: int64, a row's slot first, `table_stride` bytes per row. history: fp32
    [slots, history_rows, channels]; memory: fp32 [slots, heads, width, state]. conv: fp32 [taps, channels], conv_bias:
    [channels]; decay, bias, skip: fp32 [heads]; norm: fp32 [heads * width]. low, high: limits of a step of time.
    """

    x: int
    row_bytes: int
    rows: int
    positions: int
    tables: int
    table_stride: int
    history: int
    history_rows: int
    memory: int
    out: int
    conv: int
    conv_bias: int
    taps: int
    decay: int
    bias: int
    skip: int
    norm: int
    heads: int
    width: int
    groups: int
    state: int
    channels: int
    task_channels: int
    low: Fp32
    high: Fp32
    eps: Fp32


def mamba2_launches(
    x: Tensor, spec: Mamba2Spec, layer: SlotLayer, positions: Tensor, tables: Tensor, out: Tensor
) -> tuple[Launch, Launch, Launch]:
    """out [T, heads * head_dim] of x [T, sum of spec.widths], which is overwritten; both fp32.

    positions: int64 [T]. tables: int64 [T, ...], whose first column has the slots. Both are read when the kernels run.
    The second and third kernels need the whole result of the one before. Raises ValueError for heads or states of other
    sizes, and a history without a row for the newest position.
    """
    history, memory = layer.parts
    constants = (spec.conv, spec.conv_bias, spec.decay, spec.bias, spec.skip, spec.norm)
    if spec.head_dim % 8 or spec.state_dim % 8 or history.shape[1] < spec.taps:
        sizes = f"heads of {spec.head_dim}, states of {spec.state_dim}"
        raise ValueError(f"{sizes} and a history of {history.shape[1]} rows for {spec.taps} taps")
    assert x.stride(1) == 1 and x.dtype == torch.float32 and x.shape[1] == sum(spec.widths)
    tensors = (*constants, history, memory, out)
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors)
    step = max(_LEAST, -(-spec.channels // (4 * get_threads())) // 8 * 8)
    arguments = Mamba2Arguments(
        x=x.data_ptr(),
        row_bytes=4 * x.stride(0),
        rows=len(x),
        positions=positions.data_ptr(),
        tables=tables.data_ptr(),
        table_stride=8 * tables.stride(0),
        history=history.data_ptr(),
        history_rows=history.shape[1],
        memory=memory.data_ptr(),
        out=out.data_ptr(),
        conv=spec.conv.data_ptr(),
        conv_bias=spec.conv_bias.data_ptr(),
        taps=spec.taps,
        decay=spec.decay.data_ptr(),
        bias=spec.bias.data_ptr(),
        skip=spec.skip.data_ptr(),
        norm=spec.norm.data_ptr(),
        heads=spec.heads,
        width=spec.head_dim,
        groups=spec.groups,
        state=spec.state_dim,
        channels=spec.channels,
        task_channels=step,
        low=spec.step_limits[0],
        high=spec.step_limits[1],
        eps=spec.eps,
    )
    keep = (x, spec, layer, positions, tables, out)
    spans = -(-spec.channels // step)
    wide = spec.head_dim % ROWS == 0
    tasks = spec.heads * (spec.head_dim // (ROWS if wide else 8))
    scan = mamba2_scan_kernel(wide, spec.state_dim % 16 == 0)
    return (
        Launch(mamba2_convolution_kernel(), arguments, spans + spec.heads, keep=keep),
        Launch(scan, arguments, tasks, keep=keep),
        Launch(mamba2_output_kernel(), arguments, len(x) * spec.groups, keep=keep),
    )
