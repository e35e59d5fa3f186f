"""RMSNorm: the torch definition that every faster kernel is compared with."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """The weights of a norm, [D] on the device, and its epsilon, which is added to the mean square.

    experts: the number of experts per row that read the result, if only they and their router do; 0: others read it
    too. residual_scale: multiplies the residual that the norm's result is added to.
    """

    weight: torch.Tensor
    eps: float
    experts: int = 0
    residual_scale: float = 1.0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation over the last dimension: `x / sqrt(mean(x^2) + eps) * weight`.

    x: [..., D] of any float dtype; weight: [D]; eps: added to the mean square.
    Returns [..., D] in x's dtype. fp32 and fp64 are computed as given, fp16 and bf16 in fp32 and rounded
    once. Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    compute = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    values = x.to(compute)
    inverse_rms = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * inverse_rms * weight.to(compute)).to(x.dtype)
