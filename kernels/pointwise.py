"""Activations of feed-forwards without a gate: the torch definition."""

from typing import Literal, TypeAlias

import torch

Pointwise: TypeAlias = Literal["relu2", "gelu"]
"""The square of ReLU, `max(x, 0)^2`, or GELU, `x P(X <= x)` for a standard normal X."""


def pointwise(x: torch.Tensor, activation: Pointwise = "relu2") -> torch.Tensor:
    """The activation of each element of x [..., F], in the same dtype; fp16 and bf16 in fp32, rounded once.

    Sources: So et al. 2021, "Primer: Searching for Efficient Transformers" (squared ReLU); Hendrycks & Gimpel 2016,
    "Gaussian Error Linear Units".
    """
    compute = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    if activation == "gelu":
        return torch.nn.functional.gelu(x.to(compute)).to(x.dtype)
    return torch.relu(x.to(compute)).square().to(x.dtype)
