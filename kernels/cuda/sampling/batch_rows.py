"""What ends a batched decode step on CUDA: the chosen tokens are set aside, and the next step's input is made safe.

Sampling has moved every row on, those without a sequence too.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 32
"""Rows a program, whatever their number: one kernel for all steps."""


@triton.jit(do_not_specialize=["rows"])
def _settle_kernel(token_ptr, position_ptr, live_ptr, chosen_ptr, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    token = tl.load(token_ptr + row, mask=inside, other=0)
    live = tl.load(live_ptr + row, mask=inside, other=0) != 0
    tl.store(chosen_ptr + row, token, mask=inside)
    tl.store(token_ptr + row, tl.where(live & (token >= 0), token, 0), mask=inside)
    position = tl.load(position_ptr + row, mask=inside, other=0)
    tl.store(position_ptr + row, tl.where(live, position, 0), mask=inside)


def settle_rows(
    tokens: torch.Tensor, positions: torch.Tensor, live: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Copy `tokens` int64 [B] to `chosen`; then make rows where `live` int32 [B] is 0 token 0 at position 0 again.

    positions: int32 [B]. A live row for which no token could be chosen goes on with token 0.
    """
    rows = tokens.shape[0]
    assert positions.shape == live.shape == chosen.shape == (rows,)
    _settle_kernel[(triton.cdiv(rows, _BLOCK),)](
        tokens, positions, live, chosen, rows, BLOCK=_BLOCK, num_warps=1
    )
