"""Alternating updates (AltUp) and sparse activations of Gemma 3n: torch, the definition and what all devices run.

The residual stream has N rows per token, [T, N, W], and a layer computes only the first of them. All rows after the
layer are predicted from the rows before it, then corrected by how the computed row differs from its prediction. A
router makes the weights of both from the row itself. Every sum is over one row, in an order that depends on its width
alone. Sources: Baykal et al. 2023, "Alternating Updates for Efficient Transformers"; `Gemma3nTextAltUp`,
`Gemma3nTextModel` and `Gemma3nTextMLP` in the `transformers` library.
"""

import torch
from torch import Tensor

LEAST = 1e-5
"""Lower limit of the mean square by whose root a projected row is divided."""


def modalities(x: Tensor, router: Tensor) -> Tensor:
    """tanh of the products of normed rows x [T, W] with `router` [N, W]: [T, N]."""
    return torch.stack([(x * row).sum(-1) for row in router], 1).tanh()


def predict(streams: Tensor, of_router: Tensor, coefficients: Tensor) -> Tensor:
    """Each row plus a weighted sum of all rows of its token: [T, N, W]. of_router: [T, N], from which `coefficients` [N
    * N, N] make the weights."""
    count = streams.shape[1]
    sums = (of_router[:, None, :] * coefficients).sum(-1).view(-1, count, count)
    found = streams.clone()
    for other in range(count):
        found += sums[:, :, other, None] * streams[:, other, None, :]
    return found


def correct(predictions: Tensor, computed: Tensor, of_router: Tensor, coefficients: Tensor) -> Tensor:
    """Predictions [T, N, W], each plus a factor times the difference of the `computed` row [T, W] and the first
    prediction. The factors follow from `coefficients` [N, N] and the router."""
    sums = (of_router[:, None, :] * coefficients).sum(-1) + 1.0
    return predictions + sums[:, :, None] * (computed - predictions[:, 0])[:, None, :]


def of_size(x: Tensor, like: Tensor) -> Tensor:
    """Rows x [..., W], each scaled to the root mean square of the same row of `like` [..., W]."""
    wanted = like.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()


def above_cutoff(gate: Tensor, deviations: float) -> Tensor:
    """max(0, x - mean - deviations * standard deviation) of each row of x [T, F]."""
    mean = gate.mean(-1, keepdim=True)
    deviation = (gate - mean).square().mean(-1, keepdim=True).sqrt()
    return (gate - (mean + deviation * deviations)).relu()
