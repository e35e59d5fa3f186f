"""Alternating updates (AltUp) and sparse activations of Gemma 3n: torch, the definition and what all devices run.

The residual stream is N rows of a token side by side, [T, N, W], of which a layer computes the first one alone: all
rows after the layer are predicted from those before it, and corrected by how the computed one differs from its
prediction. The numbers of both follow from the row itself, by a router. Every sum is of one row in an order that its
width alone fixes. Sources: Baykal et al. 2023, "Alternating Updates for Efficient Transformers"; `Gemma3nTextAltUp`,
`Gemma3nTextModel` and `Gemma3nTextMLP` in the `transformers` library.
"""

import torch
from torch import Tensor

LEAST = 1e-5
"""Least mean square of a projected row, by whose root it is divided."""


def modalities(x: Tensor, router: Tensor) -> Tensor:
    """tanh of the products of normed rows x [T, W] with `router` [N, W]: [T, N]."""
    return torch.stack([(x * row).sum(-1) for row in router], 1).tanh()


def predict(streams: Tensor, of_router: Tensor, coefficients: Tensor) -> Tensor:
    """Each row plus a sum of all rows of its token: [T, N, W]. of_router: [T, N]; coefficients: [N * N, N]."""
    count = streams.shape[1]
    sums = (of_router[:, None, :] * coefficients).sum(-1).view(-1, count, count)
    found = streams.clone()
    for other in range(count):
        found += sums[:, :, other, None] * streams[:, other, None, :]
    return found


def correct(predictions: Tensor, computed: Tensor, of_router: Tensor, coefficients: Tensor) -> Tensor:
    """Predictions [T, N, W] plus, each by a number of its own, what the `computed` row [T, W] differs from the first.
    coefficients: [N, N]."""
    sums = (of_router[:, None, :] * coefficients).sum(-1) + 1.0
    return predictions + sums[:, :, None] * (computed - predictions[:, 0])[:, None, :]


def of_size(x: Tensor, like: Tensor) -> Tensor:
    """Rows x [..., W], each scaled to the root mean square of the same row of `like` [..., W]."""
    wanted = like.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()


def above_cutoff(gate: Tensor, deviations: float) -> Tensor:
    """How far elements of a row [T, F] exceed its mean plus `deviations` standard deviations; 0 for those below."""
    mean = gate.mean(-1, keepdim=True)
    deviation = (gate - mean).square().mean(-1, keepdim=True).sqrt()
    return (gate - (mean + deviation * deviations)).relu()
