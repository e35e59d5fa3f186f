"""Rounding of activations to 16-bit integers, one scale per 32: the torch definition.

Group g of a row x: t = max|x| / 32639, a = round(x / t), ties to even. The error is at most t/2, 2^-16 of the group's
largest value. 32639 is 127 * 256 + 127: such an integer is 256 times a signed byte plus a signed byte, and both can
share one product of a GPU's integer matrix units. Every backend computes this definition, with bit-identical `a` and
`t`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ACTIVATION_GROUP = 32
ACTIVATION_MAX = 32639


@dataclass(frozen=True)
class QuantizedActivations:
    """x is about a * t: `a` int16 [T, K], `t` fp32 [T, K/32].

    A group of zeros, or one so small that t underflows to zero, has t = 0 and a = 0. In a group with a NaN or an
    infinity t is not finite, nor is any result computed from it.
    """

    a: Tensor
    t: Tensor

    def sums(self, group: int) -> Tensor:
        """Exact sums of `a` over groups of `group` (16 or 32): int32 [T, K/group]."""
        return self.a.view(self.a.shape[0], -1, group).sum(-1, dtype=torch.int32)

    def values(self) -> Tensor:
        """The rounded activations a * t: fp64 [T, K]."""
        groups = self.a.view(*self.t.shape, ACTIVATION_GROUP).double()
        return (groups * self.t.double().unsqueeze(-1)).view(self.a.shape)


def quantize_activations(x: Tensor) -> QuantizedActivations:
    """Rounds fp32 [T, K] to integers. Raises ValueError if K is not a multiple of 32."""
    rows, cols = x.shape
    if cols % ACTIVATION_GROUP:
        raise ValueError(f"activations are rounded in groups of {ACTIVATION_GROUP}; {cols} is not a multiple")
    groups = x.float().view(rows, -1, ACTIVATION_GROUP)
    t = groups.abs().amax(-1) / ACTIVATION_MAX
    quotient = torch.where(t.unsqueeze(-1) > 0, groups / t.unsqueeze(-1), 0.0)
    # A denormal t has few bits, so the quotient can exceed the integers' range.
    a = torch.round(quotient).nan_to_num(0.0).clamp(-ACTIVATION_MAX, ACTIVATION_MAX)
    return QuantizedActivations(a.to(torch.int16).view(rows, cols), t)
