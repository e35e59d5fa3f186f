"""The gated short convolution: the torch definition.

A position p has three vectors b, c and x of C channels. u_p = b * x; of each channel by itself
`y_p = c * sum over k of w_k u_(p - taps + 1 + k)`, where u of positions before the first is 0. The state of a sequence
keeps u of its last CONV_HISTORY positions, position p in row p mod CONV_HISTORY, so that a step that begins anywhere
among them, as one after a draft that was not accepted does, finds what it reads. Source: `Lfm2ShortConv` in the
`transformers` library.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import CONV_HISTORY


@dataclass(frozen=True)
class ShortConvSpec:
    """What stays the same from step to step: `weight` [taps, C], the oldest position's first. `cache_group`: of the
    layer, whose block tables name the sequences' slots (ForwardBatch.slots_of)."""

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

    Rows of one sequence are in the order of their positions. In bcx's dtype; the state is read and written in its own.
    """
    sequences = batch.sequences(spec.cache_group)
    return torch.cat([_of_sequence(bcx[rows], at, spec, state[slot]) for rows, at, slot in sequences])


def _of_sequence(bcx: Tensor, start: int, spec: ShortConvSpec, state: Tensor) -> Tensor:
    """The same of the rows of one sequence from position `start` on; state [CONV_HISTORY, C]."""
    rows, before = len(bcx), spec.taps - 1
    b, c, x = bcx.chunk(3, dim=1)
    old = torch.arange(start - before, start)
    history = state[old % CONV_HISTORY].to(bcx.dtype) * (old >= 0).to(bcx.dtype)[:, None]
    u = torch.cat([history, b * x])
    y = sum(spec.weight[k].to(bcx.dtype) * u[k : k + rows] for k in range(spec.taps))
    new = torch.arange(max(start, start + rows - CONV_HISTORY), start + rows)
    state[new % CONV_HISTORY] = u[before + rows - len(new) :].to(state.dtype)
    return torch.as_tensor(c * y)
