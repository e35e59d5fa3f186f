"""Mamba2's layer of single tokens up to the gated norm, in one launch: convolution, step of time, scan.

A program takes some elements of a head of a row and their rows of its S, which are read once and written once. B and C
are computed by each program that reads them. A program stores its own channels of x in the history; the first program
of a group stores those of B and C. A position is stored in a row of the history that it does not read, so no program
waits for another.

A row of slot 0 is padding: nothing is read or kept of its state.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cuda.causal_conv import past_sum
from quengine.kernels.cuda.gated_delta.arithmetic import silu
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.mamba2.arithmetic import Mamba2Net, net_of, step_of_time
from quengine.kernels.mamba2 import Mamba2Spec


class TokenShape(NamedTuple):
    """Rows of S a program holds, and its warps."""

    rows: int
    warps: int


def decode_shape(net: Mamba2Net) -> TokenShape:
    """Up to 16 KiB of S, 32 registers a thread, so that a multiprocessor has several programs and the loads of some
    overlap the sums of others. Not measured."""
    rows = min(net.tile, max(1, 4096 // net.state_dim))
    return TokenShape(rows, max(1, min(8, rows * net.state_dim // 1024)))


@DirectLaunch
@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    x_ptr, conv_ptr, conv_bias_ptr, decay_ptr, bias_ptr, skip_ptr, position_ptr, table_ptr, history_ptr, memory_ptr,
    out_ptr, x_stride, table_stride, low, high,
    NET: tl.constexpr, SHAPE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (elements, head, row). AHEAD: the state is read before the launch in front has ended."""
    ROWS: tl.constexpr = SHAPE.rows
    N: tl.constexpr = NET.state_dim
    WIDTH: tl.constexpr = NET.heads * NET.head_dim
    CHANNELS: tl.constexpr = WIDTH + 2 * NET.groups * N
    RATIO: tl.constexpr = NET.heads // NET.groups
    if PDL and not AHEAD:
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    element = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, N)
    position = tl.load(position_ptr + row)
    slot = tl.load(table_ptr + row * table_stride).to(tl.int64)
    kept = slot != 0
    place = memory_ptr + (slot * NET.heads + head) * (NET.head_dim * N) + element[:, None] * N + n[None, :]
    memory = tl.load(place, mask=kept & (position > 0), other=0.0)
    history_ptr += slot * (NET.ring * CHANNELS)
    position_read = tl.where(kept, position, 0)
    x_channel = head * NET.head_dim + element
    b_channel = WIDTH + head // RATIO * N + n
    c_channel = b_channel + NET.groups * N
    x_past, x_weight = past_sum(history_ptr, conv_ptr, position_read, x_channel, CHANNELS, NET.taps, NET.ring)
    b_past, b_weight = past_sum(history_ptr, conv_ptr, position_read, b_channel, CHANNELS, NET.taps, NET.ring)
    c_past, c_weight = past_sum(history_ptr, conv_ptr, position_read, c_channel, CHANNELS, NET.taps, NET.ring)
    x_past += tl.load(conv_bias_ptr + x_channel)
    b_past += tl.load(conv_bias_ptr + b_channel)
    c_past += tl.load(conv_bias_ptr + c_channel)
    rate = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    if PDL and AHEAD:
        tl.extra.cuda.gdc_wait()

    x_ptr += row * x_stride + WIDTH
    x_new = tl.load(x_ptr + x_channel)
    b_new = tl.load(x_ptr + b_channel)
    c_new = tl.load(x_ptr + c_channel)
    step = step_of_time(tl.load(x_ptr + CHANNELS + head), bias, low, high)
    x = silu(x_past + x_weight * x_new)
    b = silu(b_past + b_weight * b_new)
    c = silu(c_past + c_weight * c_new)
    memory = memory * tl.exp(rate * step) + (step * x)[:, None] * b[None, :]
    y = tl.sum(memory * c[None, :], 1) + skip * x
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(place, memory, mask=kept)
    tl.store(out_ptr + row * WIDTH + x_channel, y)
    newest = history_ptr + position % NET.ring * CHANNELS
    tl.store(newest + x_channel, x_new, mask=kept)
    stores = kept & (head % RATIO == 0) & (tl.program_id(0) == 0)
    tl.store(newest + b_channel, b_new, mask=stores)
    tl.store(newest + c_channel, c_new, mask=stores)


def decode(
    x: Tensor,
    spec: Mamba2Spec,
    state: SlotLayer,
    positions: Tensor,
    block_tables: Tensor,
    out: Tensor,
    ahead: bool = False,
    pdl: bool = False,
) -> None:
    """Computes the newest token of each of B sequences from x, fp32 [B, sum of spec.widths], unit inner stride. Writes
    y, before the gated norm, to out, contiguous fp32 [B, width].

    positions: int32 [B]. block_tables: int32 [B, ...], whose first column has the slots; only slot 0 may repeat.
    With `pdl` the launch overlaps the one before it; `ahead`: the state, the positions and the tables were complete
    before that earlier launch began.
    """
    history, memory = state.parts
    net = net_of(spec, history.shape[1])
    assert x.stride(1) == 1 and x.shape[1] == sum(spec.widths) and history.shape[2] == spec.channels
    assert history.is_contiguous() and memory.is_contiguous() and out.is_contiguous()
    assert memory.shape[1:] == (net.heads, net.head_dim, net.state_dim)
    shape = decode_shape(net)
    _decode_kernel[(net.head_dim // shape.rows, net.heads, len(x))](
        x, spec.conv, spec.conv_bias, spec.decay, spec.bias, spec.skip, positions, block_tables, history, memory, out,
        x.stride(0), block_tables.stride(0), *spec.step_limits,
        NET=net, SHAPE=shape, AHEAD=ahead, PDL=pdl, num_warps=shape.warps, launch_pdl=pdl,
    )  # fmt: skip
