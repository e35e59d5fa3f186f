"""The operations of layers with alternating updates, made of a backend's other operations and the definition
(kernels/altup.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import gelu

from quengine.kernels import altup
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import Norm
from quengine.kernels.rms_norm import RMSNorm

Hidden: TypeAlias = Any
"""Rows in a backend's own form."""


@dataclass(frozen=True)
class AltUpSpec:
    """The constants of a layer, fp32. norm: the norm before the router. router: [N, W]. predict: [N * N, N]. correct:
    [N, N]. scale: [W], multiplies the corrected first row, the input of the layer's per-layer embedding."""

    norm: RMSNorm
    router: Tensor
    predict: Tensor
    correct: Tensor
    scale: Tensor


class AltUpOperations:
    """The operations on x [N, T, W]: N rows of each of T tokens, of which layers compute the first.

    backend: the `Backend` that has the matrices. The CPU backend, which compiles decode steps, has a class of its own
    (kernels/cpu/altup.py).
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def opened(self, batch: ForwardBatch, x: Hidden, project: Any) -> Tensor:
        """The N rows of embedded tokens [T, W]: the embedding, and its products with `project` [(N - 1) * W, W], each
        scaled to the root mean square of the first."""
        projected = self._backend.linear(batch, x, project).view(len(x), -1, x.shape[1]).transpose(0, 1)
        return torch.cat([x[None], altup.of_size(projected, x[None])])

    def closed(self, batch: ForwardBatch, x: Tensor, unembed: Sequence[Any]) -> Tensor:
        """The mean [T, W] of each token's first row and the products of its other rows with `unembed`, each product
        scaled to the first row's root mean square."""
        total = x[0].clone()
        for row, weight in zip(x[1:], unembed, strict=True):
            total += altup.of_size(self._backend.linear(batch, row.contiguous(), weight), x[0])
        return total / len(x)

    def predicted(self, _batch: ForwardBatch, x: Tensor, spec: AltUpSpec) -> tuple[Tensor, Tensor]:
        """The predicted rows after a layer, [N, T, W], and a copy of the first of them, [T, W], over which a mixer may
        write its result."""
        of_router = self._modalities(x[0], spec)
        found = altup.predict(x.transpose(0, 1), of_router, spec.predict).transpose(0, 1).contiguous()
        return found, found[0].clone()

    def beside(
        self, batch: ForwardBatch, x: Tensor, norm: Norm, left: Any, right: Any, post: RMSNorm
    ) -> Hidden:
        """`norm` of x [T, W], plus the `post` norm of its product with the matrices `left` and `right`: [T, W]."""
        normed = self._backend.normed(x, norm)
        low = self._backend.linear(batch, normed, left)
        return self._backend.linear_add(batch, low, right, normed, None, post)

    def joined(self, _batch: ForwardBatch, y: Hidden, beside: Hidden) -> Tensor:
        """The sum of attention's rows and those beside it, divided by the root of 2: [T, W]."""
        found: Tensor = (y + beside) / sqrt(2.0)
        return found

    def gated(
        self, batch: ForwardBatch, x: Hidden, norm: Norm | None, gate_up: Any, deviations: float
    ) -> Tensor:
        """gelu(`altup.above_cutoff` of the gates) * up: [T, F]."""
        rows = x if norm is None else self._backend.normed(x, norm)
        gate, up = self._backend.linear(batch, rows, gate_up).chunk(2, dim=1)
        found: Tensor = gelu(altup.above_cutoff(gate, deviations), approximate="tanh") * up
        return found

    def corrected(self, _batch: ForwardBatch, x: Tensor, y: Hidden, spec: AltUpSpec) -> tuple[Tensor, Tensor]:
        """Predictions x [N, T, W], corrected by what the layer has computed, y [T, W]; and the first of them times
        `spec.scale`: [T, W]."""
        of_router = self._modalities(y, spec)
        found = altup.correct(x.transpose(0, 1), y, of_router, spec.correct).transpose(0, 1).contiguous()
        return found, found[0] * spec.scale

    def added(self, _batch: ForwardBatch, x: Tensor, rows: Hidden) -> Tensor:
        """x [N, T, W] with `rows` [T, W] added to all but the first, in place."""
        x[1:] += rows
        return x

    def _modalities(self, x: Tensor, spec: AltUpSpec) -> Tensor:
        return altup.modalities(self._backend.normed(x.contiguous(), spec.norm), spec.router)
