"""The operations between the matmuls of a vision encoder's layer: the torch definitions.

Rows between them are fp32 (fp64 in tests). With fp16 matrices, the inputs and results of the matmuls are fp16.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

PatchActivation: TypeAlias = Literal["gelu", "gelu_tanh", "gelu_quick", "silu"]
"""GELU, exact or in its tanh form (Hendrycks & Gimpel 2016), x * sigmoid(1.702 x), or SiLU."""


def activated(x: Tensor, activation: PatchActivation) -> Tensor:
    """The activation of each value, in x's dtype."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return x * torch.sigmoid(1.702 * x) if activation == "gelu_quick" else F.silu(x)


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm, or RMSNorm where `centred` is False. weight, bias: [D] or None."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D], in x's dtype."""
        if self.centred:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


@dataclass(frozen=True, eq=False)
class PatchRotation:
    """Rotates queries and keys by the positions of their rows.

    cos, sin: [rows, head_dim] fp32. A head is cut in parts of `part` values, and each value is rotated with the one
    half a part before or after it; part 2 rotates neighbours. `sin` has the sign of the partner's term.
    """

    cos: Tensor
    sin: Tensor
    part: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, heads, rows, head_dim] -> the same, in fp32 or x's wider dtype."""
        partner = x.reshape(*x.shape[:-1], -1, 2, self.part // 2).flip(-2).reshape(x.shape)
        return x * self.cos + partner * self.sin


def scaled_below_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by a power of two, so that all values are below 1, and these powers [..., 1]."""
    _, exponent = torch.frexp(x.abs().amax(-1, keepdim=True))
    scale = torch.ldexp(torch.ones_like(x[..., :1]), exponent)
    return x / scale, scale


def expanded_blocks(codes: Tensor, scales: Tensor, kind: torch.dtype) -> Tensor:
    """A matrix of Q8_0 as floats of type `kind`, each rounded once: [N, K].

    codes: int8 [N, K / 32, 32]; scales: fp16 [N, K / 32, 1].
    """
    return torch.mul(codes, scales.to(kind)).flatten(1)
