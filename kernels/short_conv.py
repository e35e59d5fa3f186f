"""The gated short convolution: the torch definition.

Position p has three vectors b, c and x of C channels. With u_p = b * x, each channel computes `y_p = c * sum over k of
w_k u_(p - taps + 1 + k)`, where u is 0 before the first position. A sequence's state keeps u of its last CONV_HISTORY
positions, position p in row p mod CONV_HISTORY, so that a step may begin at any of them, as one does after a draft was
rejected. Source: `Lfm2ShortConv` in the `transformers` library.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import CONV_HISTORY


@dataclass(frozen=True)
class ShortConvSpec:
    """The constants of a short convolution: `weight` [taps, C], oldest position first. `cache_group`: the
    layer's cache group, whose block tables name the sequences' slots (ForwardBatch.slots_of).
    """

    weight: Tensor
    cache_group: int

    @property
    def taps(self) -> int:
        return self.weight.shape[0]

    @property
    def channels(self) -> int:
        return self.weight.shape[1]


def short_conv(batch: ForwardBatch, bcx: Tensor, spec: ShortConvSpec, state: Tensor) -> Tensor:
    """y [T, C] of bcx [T, 3C]: b, c and x side by side. state [slots, CONV_HISTORY, C], written in place.

    Rows of one sequence are in order of position. Computed in bcx's dtype; the state is stored in its own.
    """
    sequences = batch.sequences(spec.cache_group, state)
    return torch.cat([_of_sequence(bcx[rows], at, spec, state[slot]) for rows, at, slot in sequences])


def _of_sequence(bcx: Tensor, start: int, spec: ShortConvSpec, state: Tensor) -> Tensor:
    """`short_conv` for the rows of one sequence from position `start` on; state [CONV_HISTORY, C]."""
    rows, before = len(bcx), spec.taps - 1
    b, c, x = bcx.chunk(3, dim=1)
    old = torch.arange(start - before, start)
    history = state[old % CONV_HISTORY].to(bcx.dtype) * (old >= 0).to(bcx.dtype)[:, None]
    u = torch.cat([history, b * x])
    y = sum(spec.weight[k].to(bcx.dtype) * u[k : k + rows] for k in range(spec.taps))
    new = torch.arange(max(start, start + rows - CONV_HISTORY), start + rows)
    state[new % CONV_HISTORY] = u[before + rows - len(new) :].to(state.dtype)
    return torch.as_tensor(c * y)
