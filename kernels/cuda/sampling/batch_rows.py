"""The end of a decode step on CUDA: stores the sampled tokens for the host, and makes the next step's input valid.

Sampling has advanced every row, those without a sequence too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.pdl import wait_then_launch

_BLOCK = 512
"""Rows per iteration, for any number of rows: one kernel for all steps."""


class ChosenTokens(NamedTuple):
    """A ring of the tokens of the latest steps. tokens: int64 [turns, rows], pinned host memory on CUDA, so
    that a step needs no copy after it. turn: int32 [1] on the device, the turn of the next step.
    """

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
    """Copies `tokens` int64 [B] to the current turn of `chosen`, and advances the turn; resets rows where `live` int32
    [B] is 0 to token 0 at position 0.

    positions: int32 [B]. A live row without a valid token continues with token 0. `pdl`: the launch may start before
    its predecessor has ended (sm_90 and later).
    """
    rows = tokens.shape[0]
    turns, width = chosen.tokens.shape
    assert positions.shape == live.shape == (rows,) and rows <= width
    _settle_kernel[(1,)](
        tokens, positions, live, chosen.tokens, chosen.turn, rows, width,
        TURNS=turns, BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
