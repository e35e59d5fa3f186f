"""The gated delta net's inputs of steps in which rows follow each other: convolution, SiLU, unit lengths, gates.

A program takes some rows of one head of q, k or v. The rows before a position come from the step itself where it has
them, else from the history, which the recurrence's launch writes afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.causal_conv import rows_sum
from quengine.kernels.cuda.gated_delta.arithmetic import Net, inverse_length, log_decay, silu
from quengine.kernels.cuda.gated_delta.rows import StateRows
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.gated_delta import GatedDeltaSpec

BLOCK_ROWS = 16


@DirectLaunch
@triton.jit(do_not_specialize=["rows", "table_stride"])
def _convolve_kernel(
    x_ptr, row_scale_ptr, conv_ptr, decay_ptr, bias_ptr, position_ptr, table_ptr, sequence_ptr, history_ptr,
    out_ptr, gates_ptr, rows, x_stride, table_stride, weight_scale,
    NET: tl.constexpr, ROWS: tl.constexpr, ALL_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (ROWS rows, head of q, k or v)."""
    wait_then_launch(PDL)
    D: tl.constexpr = NET.head_dim
    WIDTH: tl.constexpr = NET.value_heads * D
    CHANNELS: tl.constexpr = 2 * NET.key_heads * D + WIDTH
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    channel = head * D + tl.arange(0, D)
    total, scale = rows_sum(
        x_ptr, row_scale_ptr, weight_scale, conv_ptr, position_ptr, table_ptr, sequence_ptr, history_ptr,
        row, channel, rows, x_stride, table_stride, CHANNELS, NET.taps, NET.ring, ALL_ROWS,
    )  # fmt: skip
    own = x_ptr + row.to(tl.int64) * x_stride
    y = silu(total)
    if head < 2 * NET.key_heads:
        y *= inverse_length(tl.sum(y * y, 1))[:, None] * tl.where(head < NET.key_heads, D**-0.5, 1.0)
    else:
        of = head - 2 * NET.key_heads
        b = tl.load(own + CHANNELS + WIDTH + of, mask=live, other=0.0) * scale
        a = tl.load(own + CHANNELS + WIDTH + NET.value_heads + of, mask=live, other=0.0) * scale
        gate = gates_ptr + row * (2 * NET.value_heads) + of
        tl.store(gate, log_decay(a, tl.load(decay_ptr + of), tl.load(bias_ptr + of)), mask=live)
        tl.store(gate + NET.value_heads, tl.sigmoid(b), mask=live)
    out = out_ptr + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out, y, mask=live[:, None])


def convolve(
    step: StateRows, spec: GatedDeltaSpec, net: Net, history: Tensor, pdl: bool
) -> tuple[Tensor, Tensor]:
    """Returns q, k and v, fp32 [T, channels], of a step's rows, with queries and keys of unit length and queries
    scaled; and gates, fp32 [T, 2, value_heads]: the log of what a state keeps, and how much of a position's error it
    takes."""
    rows = len(step.x)
    qkv = torch.empty(rows, net.channels, dtype=torch.float32, device=step.x.device)
    gates = torch.empty(rows, 2, net.value_heads, dtype=torch.float32, device=step.x.device)
    block = min(BLOCK_ROWS, max(1, 4096 // net.head_dim))
    _convolve_kernel[(triton.cdiv(rows, block), 2 * net.key_heads + net.value_heads)](
        step.x, step.row_scale, spec.conv, spec.decay, spec.bias, step.positions, step.block_tables,
        step.sequences, history, qkv, gates, rows, step.x.stride(0), step.block_tables.stride(0), step.weight_scale,
        NET=net, ROWS=block, ALL_ROWS=step.all_rows, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return qkv, gates
