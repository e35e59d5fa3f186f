"""The gated delta net of single tokens in one launch: convolution, gates, recurrence and, of whole heads, gated norm.

A program takes a value head of a row and some columns of its S, which are read once and written once. Query and key are
computed by each program that reads them. A program stores its own channels of v in the history; the first head that
reads q and k stores theirs. A position is stored in a row of the history that it does not read, so no program waits for
another.

A row of slot 0 is padding: nothing is read or kept of its state.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cuda.causal_conv import past_sum
from quengine.kernels.cuda.gated_delta.arithmetic import (
    Net,
    inverse_length,
    is_first_reader,
    key_head_of,
    log_decay,
    net_of,
    silu,
)
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_group, store_quantized
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.gated_delta import GatedDeltaSpec

WHOLE_HEAD = 128
"""Largest head whose S one program holds: 64 KiB of registers."""


class DecodeShape(NamedTuple):
    """Columns of S that a program holds, and its warps. early: the next launch may start when these programs do, since
    they leave multiprocessors free."""

    columns: int
    warps: int
    early: bool


def decode_shape(net: Net, whole: bool) -> DecodeShape:
    """The shape of a program. whole: it must hold all columns of a head. Otherwise a multiprocessor has several
    programs, so that the loads of some overlap the sums of others."""
    if whole:
        return DecodeShape(net.head_dim, max(1, min(4, net.head_dim**2 // 2048)), True)
    columns = min(net.head_dim, 64)
    return DecodeShape(columns, max(1, min(8, net.head_dim * columns // 2048)), False)


def can_norm(net: Net) -> bool:
    """Whether the decode kernel can do the gated norm, quantized in groups of 32."""
    return 32 <= net.head_dim <= WHOLE_HEAD


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _step(memory, q, k, v, decay, beta):
    """`delta_step` of a query and a key [D] that are not yet divided by their lengths. Sums over S do not wait for the
    lengths, and sums are made together: all warps meet for each, and one token's step has nothing else to do then.
    """
    qq, kk, kq = tl.reduce((q * q, k * k, k * q), 0, _add_three)
    seen, read = tl.reduce((memory * k[:, None], memory * q[:, None]), 0, _add_two)
    of_q = inverse_length(qq) * q.shape[0] ** -0.5
    of_k = inverse_length(kk)
    delta = of_k * beta * (v - decay * (of_k * seen))
    return memory * decay + k[:, None] * delta[None, :], of_q * (decay * read + kq * delta)


@DirectLaunch
@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    x_ptr, conv_ptr, decay_ptr, bias_ptr, norm_ptr, position_ptr, table_ptr, history_ptr, memory_ptr,
    out_ptr, low_ptr, scale_ptr, sums_ptr, x_stride, table_stride, eps,
    NET: tl.constexpr, SHAPE: tl.constexpr, QUANTIZE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (columns, value head, row). QUANTIZE: the gated norm of the head, as quantized activations; else o fp32
    [rows, width]. AHEAD: the state is read before the launch in front has ended."""
    D: tl.constexpr = NET.head_dim
    COLUMNS: tl.constexpr = SHAPE.columns
    KEYS: tl.constexpr = NET.key_heads * D
    WIDTH: tl.constexpr = NET.value_heads * D
    CHANNELS: tl.constexpr = 2 * KEYS + WIDTH
    if PDL:
        if SHAPE.early:
            tl.extra.cuda.gdc_launch_dependents()
        if not AHEAD:
            tl.extra.cuda.gdc_wait()
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, D)
    position = tl.load(position_ptr + row)
    slot = tl.load(table_ptr + row * table_stride).to(tl.int64)
    kept = slot != 0
    place = memory_ptr + (slot * NET.value_heads + head) * (D * D) + element[:, None] * D + column[None, :]
    memory = tl.load(place, mask=kept & (position > 0), other=0.0)
    history_ptr += slot * (NET.ring * CHANNELS)
    position_read = tl.where(kept, position, 0)
    q_channel = key_head_of(head, NET) * D + element
    v_channel = 2 * KEYS + head * D + column
    q_past, q_weight = past_sum(history_ptr, conv_ptr, position_read, q_channel, CHANNELS, NET.taps, NET.ring)
    k_past, k_weight = past_sum(
        history_ptr, conv_ptr, position_read, q_channel + KEYS, CHANNELS, NET.taps, NET.ring
    )
    v_past, v_weight = past_sum(history_ptr, conv_ptr, position_read, v_channel, CHANNELS, NET.taps, NET.ring)
    rate = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    if QUANTIZE:
        norm = tl.load(norm_ptr + column)
    if PDL and AHEAD:
        tl.extra.cuda.gdc_wait()

    x_ptr += row * x_stride
    q_new = tl.load(x_ptr + q_channel)
    k_new = tl.load(x_ptr + q_channel + KEYS)
    v_new = tl.load(x_ptr + v_channel)
    b = tl.load(x_ptr + CHANNELS + WIDTH + head)
    a = tl.load(x_ptr + CHANNELS + WIDTH + NET.value_heads + head)
    if QUANTIZE:
        z = tl.load(x_ptr + CHANNELS + head * D + column)
    q = silu(q_past + q_weight * q_new)
    k = silu(k_past + k_weight * k_new)
    v = silu(v_past + v_weight * v_new)
    memory, o = _step(memory, q, k, v, tl.exp(log_decay(a, rate, bias)), tl.sigmoid(b))
    if PDL and not SHAPE.early:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(place, memory, mask=kept)
    newest = history_ptr + position % NET.ring * CHANNELS
    tl.store(newest + v_channel, v_new, mask=kept)
    stores = kept & is_first_reader(head, NET) & (tl.program_id(0) == 0)
    tl.store(newest + q_channel, q_new, mask=stores)
    tl.store(newest + q_channel + KEYS, k_new, mask=stores)
    if QUANTIZE:
        y = o * tl.rsqrt(tl.sum(o * o, 0) / D + eps) * norm * silu(z)
        high, low, scale, sums = quantize_group(tl.reshape(y, [D // 32, 32]))
        group = (row * WIDTH + head * D) // 32 + tl.arange(0, D // 32)
        store_quantized(out_ptr, low_ptr, scale_ptr, sums_ptr, group, group >= 0, high, low, scale, sums)
    else:
        tl.store(out_ptr + row * WIDTH + head * D + column, o)


def decode(
    x: Tensor,
    spec: GatedDeltaSpec,
    state: SlotLayer,
    positions: Tensor,
    block_tables: Tensor,
    out: Tensor | QuantizedActivations,
    ahead: bool = False,
    pdl: bool = False,
) -> None:
    """Computes the newest token of each of B sequences from x, fp32 [B, sum of spec.widths], unit inner stride.

    positions: int32 [B]. block_tables: int32 [B, ...], whose first column has the slots; only slot 0 may repeat.
    out: o fp32 [B, width], before the gated norm, or the result as quantized activations, for heads that `can_norm`
    accepts. With `pdl` the launch overlaps the one before it; `ahead`: the state, the positions and the tables were
    complete before that earlier launch began.
    """
    history, memory = state.parts
    net = net_of(spec, history.shape[1])
    assert x.stride(1) == 1 and x.shape[1] == sum(spec.widths) and history.shape[2] == spec.channels
    assert (
        history.is_contiguous()
        and memory.is_contiguous()
        and memory.shape[1:] == (net.value_heads, *[net.head_dim] * 2)
    )
    quantize = isinstance(out, QuantizedActivations)
    assert not quantize or can_norm(net)
    planes = (out.high, out.low, out.scale, out.sums) if isinstance(out, QuantizedActivations) else (out,) * 4
    shape = decode_shape(net, quantize)
    _decode_kernel[(net.head_dim // shape.columns, net.value_heads, len(x))](
        x, spec.conv, spec.decay, spec.bias, spec.norm, positions, block_tables, history, memory, *planes,
        x.stride(0), block_tables.stride(0), spec.eps,
        NET=net, SHAPE=shape, QUANTIZE=quantize, AHEAD=ahead, PDL=pdl, num_warps=shape.warps, launch_pdl=pdl,
    )  # fmt: skip
