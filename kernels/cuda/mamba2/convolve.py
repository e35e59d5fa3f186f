"""Mamba2's inputs of steps in which rows follow each other: convolution, SiLU, steps of time.

A program takes some rows of some channels, or, the last ones, of dt of all heads. The rows before a position come from
the step itself where it has them, else from the history, which the scan's launch writes afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.causal_conv import rows_sum
from quengine.kernels.cuda.gated_delta.arithmetic import silu
from quengine.kernels.cuda.gated_delta.rows import StateRows
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.mamba2.arithmetic import Mamba2Net, step_of_time
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.mamba2 import Mamba2Spec

BLOCK_ROWS, MOST_CHANNELS = 16, 128


@DirectLaunch
@triton.jit(do_not_specialize=["rows", "table_stride"])
def _convolve_kernel(
    x_ptr, row_scale_ptr, conv_ptr, conv_bias_ptr, decay_ptr, bias_ptr, position_ptr, table_ptr, sequence_ptr,
    history_ptr, out_ptr, gates_ptr, rows, x_stride, table_stride, weight_scale, low, high,
    NET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALL_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (ROWS rows, COLUMNS channels or dt)."""
    wait_then_launch(PDL)
    WIDTH: tl.constexpr = NET.heads * NET.head_dim
    CHANNELS: tl.constexpr = WIDTH + 2 * NET.groups * NET.state_dim
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    if part < CHANNELS // COLUMNS:
        channel = part * COLUMNS + tl.arange(0, COLUMNS)
        total, _ = rows_sum(
            x_ptr + WIDTH, row_scale_ptr, weight_scale, conv_ptr, position_ptr, table_ptr, sequence_ptr, history_ptr,
            row, channel, rows, x_stride, table_stride, CHANNELS, NET.taps, NET.ring, ALL_ROWS,
        )  # fmt: skip
        y = silu(total + tl.load(conv_bias_ptr + channel)[None, :])
        out = out_ptr + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        tl.store(out, y, mask=live[:, None])
    else:
        head = tl.arange(0, triton.next_power_of_2(NET.heads))
        inside = head < NET.heads
        both = live[:, None] & inside[None, :]
        scale = tl.load(row_scale_ptr + row, mask=live, other=0.0) * weight_scale
        dt_ptr = x_ptr + row.to(tl.int64)[:, None] * x_stride + (WIDTH + CHANNELS) + head[None, :]
        dt = tl.load(dt_ptr, mask=both, other=0.0) * scale[:, None]
        bias = tl.load(bias_ptr + head, mask=inside, other=0.0)
        step = step_of_time(dt, bias[None, :], low, high)
        rate = tl.load(decay_ptr + head, mask=inside, other=0.0)
        gate = gates_ptr + row.to(tl.int64)[:, None] * (2 * NET.heads) + head[None, :]
        tl.store(gate, rate[None, :] * step, mask=both)
        tl.store(gate + NET.heads, step, mask=both)


def convolve(
    step: StateRows, spec: Mamba2Spec, net: Mamba2Net, history: Tensor, pdl: bool
) -> tuple[Tensor, Tensor]:
    """Returns x, B and C, fp32 [T, channels], of a step's rows, and gates, fp32 [T, 2, heads]: the log of what a state
    keeps, and the step of time."""
    rows = len(step.x)
    xbc = torch.empty(rows, net.channels, dtype=torch.float32, device=step.x.device)
    gates = torch.empty(rows, 2, net.heads, dtype=torch.float32, device=step.x.device)
    columns = min(MOST_CHANNELS, net.channels & -net.channels)
    _convolve_kernel[(triton.cdiv(rows, BLOCK_ROWS), net.channels // columns + 1)](
        step.x, step.row_scale, spec.conv, spec.conv_bias, spec.decay, spec.bias, step.positions, step.block_tables,
        step.sequences, history, xbc, gates, rows, step.x.stride(0), step.block_tables.stride(0), step.weight_scale,
        *spec.step_limits,
        NET=net, ROWS=BLOCK_ROWS, COLUMNS=columns, ALL_ROWS=step.all_rows, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return xbc, gates
