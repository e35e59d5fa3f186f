"""Activations of feed-forwards without a gate: the torch definition."""

from typing import Literal, TypeAlias

import torch

Pointwise: TypeAlias = Literal["relu2"]
"""The square of ReLU, `max(x, 0)^2`."""


def pointwise(x: torch.Tensor, activation: Pointwise = "relu2") -> torch.Tensor:
    """The activation of each element of x [..., F], in the same dtype; fp16 and bf16 in fp32, rounded once.

    Source: So et al. 2021, "Primer: Searching for Efficient Transformers" (squared ReLU).
    """
    assert activation == "relu2"
    compute = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    return torch.relu(x.to(compute)).square().to(x.dtype)
