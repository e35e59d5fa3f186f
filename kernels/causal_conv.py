"""The depthwise causal convolution in front of recurrent layers: the torch definition.

`c_p = silu(bias + sum over t of weight_t x_(p - taps + 1 + t))`, where rows x of positions before the first are 0. A
sequence's history keeps the rows of its last positions, position p in row p mod the number of rows. Source: Gu and
Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", section 3.4.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu


def causal_conv(x: Tensor, start: int, weight: Tensor, history: Tensor, bias: Tensor | None = None) -> Tensor:
    """The convolution c [T, channels] of the rows x of one sequence from position `start` on, which are written to
    `history`.

    weight: [taps, channels], the oldest position's weights first. bias: [channels]. history: [at least taps - 1 rows,
    channels], written in place, in its own dtype. Computed in x's dtype.
    """
    rows, before, kept = len(x), len(weight) - 1, len(history)
    old = torch.arange(start - before, start)
    past = torch.where((old >= 0)[:, None], history[old % kept].to(x.dtype), 0.0)
    inputs = torch.cat([past, x])
    new = torch.arange(max(start, start + rows - kept), start + rows)
    history[new % kept] = x[rows - len(new) :].to(history.dtype)
    sums = torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x)
    for tap in range(len(weight)):
        sums = sums + weight[tap].to(x.dtype) * inputs[tap : tap + rows]
    return silu(sums)
