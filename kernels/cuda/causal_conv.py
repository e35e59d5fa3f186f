"""Sums of a causal depthwise convolution, for kernels of recurrent layers: of single tokens, whose past is in their
histories, and of consecutive rows, whose past is in the step itself as far as the step holds it.

Definition: kernels/causal_conv.py. All of it is fp32.
"""

import triton
import triton.language as tl


@triton.jit
def past_sum(
    history_ptr, conv_ptr, position, channel, CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr
):
    """The sum over earlier positions than `position`, of channels [N]; and the newest tap's weight.

    history_ptr: of a slot, RING rows of CHANNELS."""
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(1, TAPS):
        at = (position - back + RING) % RING * CHANNELS + channel
        weight = tl.load(conv_ptr + (TAPS - 1 - back) * CHANNELS + channel)
        total += weight * tl.load(history_ptr + at, mask=position >= back, other=0.0)
    return total, tl.load(conv_ptr + (TAPS - 1) * CHANNELS + channel)


@triton.jit
def _rows_before(
    row,
    back,
    position,
    slot,
    position_ptr,
    table_ptr,
    sequence_ptr,
    rows,
    table_stride,
    ALL_ROWS: tl.constexpr,
):
    """The rows of the step `back` positions before rows `row` [R], and which of them exist: [R] each.

    Rows of a prompt follow each other. Where ALL_ROWS is not 0, a power of two at least the step's rows, each row has a
    table of its own, and those of one slot are in any order.
    """
    if ALL_ROWS == 0:
        before = row - back
        sequence = tl.load(sequence_ptr + row, mask=row < rows, other=-1)
        of_it = tl.load(sequence_ptr + before, mask=(before >= 0) & (row < rows), other=-1)
        beside = (of_it == sequence) & (row < rows)
    else:
        other = tl.arange(0, ALL_ROWS)
        its_slot = tl.load(table_ptr + other * table_stride, mask=other < rows, other=0)
        its_position = tl.load(position_ptr + other, mask=other < rows, other=-1)
        same = (its_slot[None, :] == slot[:, None]) & (its_position[None, :] == position[:, None] - back)
        before = tl.max(tl.where(same & (slot != 0)[:, None], other[None, :], -1), 1)
        beside = before >= 0
    return before, beside


@triton.jit
def rows_sum(
    x_ptr, row_scale_ptr, weight_scale, conv_ptr, position_ptr, table_ptr, sequence_ptr, history_ptr,
    row, channel, rows, x_stride, table_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """The convolution of channels [N] at rows `row` [R] of a step of `rows` rows: sums [R, N], and row scales [R].

    x_ptr: of the step's first row, where its channels begin; scales, positions and tables as in StepRows.
    """
    live = row < rows
    position = tl.load(position_ptr + row, mask=live, other=0)
    sequence = row
    if sequence_ptr is not None:
        sequence = tl.load(sequence_ptr + row, mask=live, other=0)
    slot = tl.load(table_ptr + sequence * table_stride, mask=live, other=0)
    history = history_ptr + slot.to(tl.int64) * (RING * CHANNELS)
    scale = tl.load(row_scale_ptr + row, mask=live, other=0.0) * weight_scale
    own = x_ptr + row.to(tl.int64) * x_stride
    newest = tl.load(own[:, None] + channel[None, :], mask=live[:, None], other=0.0) * scale[:, None]
    total = tl.load(conv_ptr + (TAPS - 1) * CHANNELS + channel)[None, :] * newest
    for back in tl.static_range(1, TAPS):
        before, beside = _rows_before(
            row, back, position, slot, position_ptr, table_ptr, sequence_ptr, rows, table_stride, ALL_ROWS
        )
        near = x_ptr + before.to(tl.int64)[:, None] * x_stride + channel[None, :]
        u = tl.load(near, mask=beside[:, None], other=0.0)
        u *= (tl.load(row_scale_ptr + before, mask=beside, other=0.0) * weight_scale)[:, None]
        stored = live & (slot != 0) & (position >= back) & (beside == 0)
        at = (position - back + RING) % RING * CHANNELS
        u += tl.load(history[:, None] + at[:, None] + channel[None, :], mask=stored[:, None], other=0.0)
        total += tl.load(conv_ptr + (TAPS - 1 - back) * CHANNELS + channel)[None, :] * u
    return total, scale
