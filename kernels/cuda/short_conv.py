"""The gated short convolution on CUDA: y = c * conv(b * x), and the newest b * x stored to the sequences' states.

Defined in kernels/short_conv.py. A program takes a row and some of its channels. In a step of single rows it also
stores the state. If rows of a step read each other's values, storing is a separate launch. In prompts it follows the
convolution, which reads the earlier state, and the step's own rows from the step itself. In decode steps with drafts it
precedes the convolution, which reads the state alone.
"""

import torch
import triton
import triton.language as tl

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.short_conv import ShortConvSpec

_BLOCK = 256


@DirectLaunch
@triton.jit
def _short_conv_kernel(
    bcx_ptr, weight_ptr, state_ptr, out_ptr, positions_ptr, tables_ptr, sequences_ptr, rows, table_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, HISTORY: tl.constexpr, BLOCK: tl.constexpr,
    COMPUTES: tl.constexpr, STORES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sequences_ptr: the sequence of each of a prompt's rows; None in decode, where each row has its own table."""
    wait_then_launch(PDL)
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    position = tl.load(positions_ptr + row)
    sequence = row
    if sequences_ptr is not None:
        sequence = tl.load(sequences_ptr + row)
    state = state_ptr + tl.load(tables_ptr + sequence * table_stride).to(tl.int64) * (HISTORY * CHANNELS)
    own = bcx_ptr + row.to(tl.int64) * (3 * CHANNELS) + channel
    newest = tl.load(own, mask=inside, other=0.0) * tl.load(own + 2 * CHANNELS, mask=inside, other=0.0)
    if COMPUTES:
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            if tap == TAPS - 1:
                u = newest
            else:
                read = position - back
                is_beside = False
                if sequences_ptr is not None:
                    other = tl.load(sequences_ptr + row - back, mask=row >= back, other=-1)
                    is_beside = other == sequence
                at = state + (read + HISTORY) % HISTORY * CHANNELS + channel
                u = tl.load(at, mask=inside & (read >= 0) & (not is_beside), other=0.0)
                if sequences_ptr is not None:
                    near = inside & is_beside
                    b = tl.load(own - back * 3 * CHANNELS, mask=near, other=0.0)
                    x = tl.load(own - back * 3 * CHANNELS + 2 * CHANNELS, mask=near, other=0.0)
                    u += b * x
            total += tl.load(weight_ptr + tap * CHANNELS + channel, mask=inside, other=0.0) * u
        total *= tl.load(own + CHANNELS, mask=inside, other=0.0)
        tl.store(out_ptr + row.to(tl.int64) * CHANNELS + channel, total, mask=inside)
    if STORES:
        stored = inside
        if sequences_ptr is not None:  # only a chunk's newest rows, no two of which share a place
            later = tl.load(sequences_ptr + row + HISTORY, mask=row + HISTORY < rows, other=-1)
            stored &= later != sequence
        tl.store(state + position % HISTORY * CHANNELS + channel, newest, mask=stored)


def short_conv(
    bcx: torch.Tensor,
    spec: ShortConvSpec,
    layer: SlotLayer,
    positions: torch.Tensor,
    tables: torch.Tensor,
    sequences: torch.Tensor | None = None,
    shares_sequences: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """y fp32 [T, C] of bcx fp32 [T, 3C], which holds b, c and x side by side. Stores the newest b * x to the states.

    positions: int32 [T]. tables: int32 [S, ...], the slots in the first column. sequences: int32 [T], the sequence of
    each of a prompt's rows; None: row t is sequence t. shares_sequences: rows of a decode step may belong to one
    sequence, at consecutive positions.
    """
    rows, channels, history = len(bcx), spec.channels, layer.parts[0]
    assert bcx.is_contiguous() and history.is_contiguous() and spec.weight.is_contiguous()
    out = torch.empty(rows, channels, dtype=torch.float32, device=bcx.device)

    def launch(computes: bool, stores: bool) -> None:
        _short_conv_kernel[(rows, triton.cdiv(channels, _BLOCK))](
            bcx, spec.weight, history, out, positions, tables, sequences, rows, tables.stride(0),
            CHANNELS=channels, TAPS=spec.taps, HISTORY=history.shape[1], BLOCK=_BLOCK,
            COMPUTES=computes, STORES=stores, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip

    if sequences is None and not shares_sequences:
        launch(computes=True, stores=True)
    elif sequences is None:
        launch(computes=False, stores=True)
        launch(computes=True, stores=False)
    else:
        launch(computes=True, stores=False)
        launch(computes=False, stores=True)
    return out
