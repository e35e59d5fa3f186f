"""What ends a decode step on CUDA: the chosen tokens are left for the host, and the next step's input is made safe.

Sampling has moved every row on, those without a sequence too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.pdl import wait_then_launch

_BLOCK = 512
"""Rows at a time, whatever their number: one kernel for all steps."""


class ChosenTokens(NamedTuple):
    """Where steps leave their tokens, in turns. tokens: int64 [turns, rows], which may be pinned memory of the host: a
    step then needs no copy behind it. turn: int32 [1] on the device, the turn of the next step."""

    tokens: torch.Tensor
    turn: torch.Tensor

    @classmethod
    def allocate(cls, turns: int, rows: int, device: torch.device) -> "ChosenTokens":
        tokens = torch.zeros(turns, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        return cls(tokens, torch.zeros(1, dtype=torch.int32, device=device))


@triton.jit(do_not_specialize=["rows", "stride"])
def _settle_kernel(
    token_ptr, position_ptr, live_ptr, chosen_ptr, turn_ptr, rows, stride,
    TURNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    turn = tl.load(turn_ptr)
    chosen_ptr += turn * stride
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < rows
        token = tl.load(token_ptr + row, mask=inside, other=0)
        live = tl.load(live_ptr + row, mask=inside, other=0) != 0
        position = tl.load(position_ptr + row, mask=inside, other=0)
        tl.store(chosen_ptr + row, token, mask=inside)
        tl.store(token_ptr + row, tl.where(live & (token >= 0), token, 0), mask=inside)
        tl.store(position_ptr + row, tl.where(live, position, 0), mask=inside)
    tl.store(turn_ptr, (turn + 1) % TURNS)


def settle_rows(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    live: torch.Tensor,
    chosen: ChosenTokens,
    pdl: bool = False,
) -> None:
    """Copy `tokens` int64 [B] to the turn of `chosen`, whose next one it then is; make rows where `live` int32 [B] is 0
    token 0 at position 0 again.

    positions: int32 [B]. A live row for which no token could be chosen goes on with token 0. `pdl`: may be launched
    before its predecessor has ended (sm_90 and later).
    """
    rows = tokens.shape[0]
    turns, width = chosen.tokens.shape
    assert positions.shape == live.shape == (rows,) and rows <= width
    _settle_kernel[(1,)](
        tokens, positions, live, chosen.tokens, chosen.turn, rows, width,
        TURNS=turns, BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
