"""LayerNorm: the torch definition that every faster kernel is compared with."""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from quengine.kernels.rms_norm import RMSNorm, rms_norm


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """The weights and bias of a LayerNorm, [D] each on the device, and its epsilon, which is added to the variance.

    bias: None if there is none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


Norm: TypeAlias = RMSNorm | LayerNorm


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Layer normalisation over the last dimension: `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`.

    x: [..., D] of any float dtype; weight, bias: [D]; eps: added to the variance, the mean of the squared distances
    from the mean. Returns [..., D] in x's dtype. fp32 and fp64 are computed as given, fp16 and bf16 in fp32 and rounded
    once. Source: Ba, Kiros & Hinton 2016, "Layer Normalization".
    """
    compute = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    values = x.to(compute)
    centred = values - values.mean(dim=-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * weight.to(compute)
    return (y if bias is None else y + bias.to(compute)).to(x.dtype)


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """x [..., D] after a norm of either kind, or x itself."""
    if norm is None:
        return x
    if isinstance(norm, LayerNorm):
        return layer_norm(x, norm.weight, norm.bias, norm.eps)
    return rms_norm(x, norm.weight, norm.eps)
