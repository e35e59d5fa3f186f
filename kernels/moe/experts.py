"""The matmuls of a mixture of experts, each row with the experts selected for it. The torch definition.

A device may have some of a layer's experts (`ExpertShare`). A row's other experts are computed elsewhere: here they are
skipped, and add nothing.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quengine.kernels.glu import Activation, glu
from quengine.kernels.moe.router import Routing

Linear: TypeAlias = Callable[[int, Tensor], Tensor]
"""(expert, rows [n, K]) -> [n, N], with the expert's bias. Experts are numbered as in a routing."""


@dataclass(frozen=True)
class ExpertShare:
    """The experts of a layer that a device has: those numbered from `first` on in a routing, whose slots are spread
    over `among` experts."""

    first: int
    among: int

    def numbers(self, count: int) -> range:
        """The numbers, in a routing, of `count` experts."""
        return range(self.first, self.first + count)


def experts_glu(
    x: Tensor, routing: Routing, gate_up: Linear, activation: Activation, held: range | None = None
) -> Tensor:
    """activation(gate) * up of rows x [T, K], already normed, by each of their k experts: [T, k, F].

    `gate_up` returns [n, 2F], the first F columns being the gate. Experts without rows are not computed. held: the
    experts that are here; None: all. The results of other experts are zeros.
    """
    slots = routing.experts
    chosen = _computed(slots, held)
    assert chosen or held, "no rows"
    out: Tensor | None = None
    for expert in chosen or held[:1]:  # type: ignore[index]
        rows, slot = (slots == expert).nonzero(as_tuple=True)
        gated = glu(gate_up(expert, x[rows]), activation)
        if out is None:
            out = gated.new_zeros(*slots.shape, gated.shape[1])
        out[rows, slot] = gated
    assert out is not None
    return out


def experts_add(
    gated: Tensor, routing: Routing, down: Linear, residual: Tensor, held: range | None = None
) -> Tensor:
    """residual [T, N] + the weighted sum over a row's experts of `down` of gated [T, k, F]: [T, N].

    A row's experts are added in ascending order, first to each other, then to the residual. held: see `experts_glu`.
    """
    total = torch.zeros_like(residual)
    for slot in range(routing.experts.shape[1]):
        chosen = routing.experts[:, slot]
        product = torch.zeros_like(residual)
        for expert in _computed(chosen, held):
            rows = chosen == expert
            product[rows] = down(expert, gated[rows, slot])
        total = total + routing.weights[:, slot, None] * product
    return total + residual


def _computed(experts: Tensor, held: range | None) -> list[int]:
    """The distinct numbers in `experts` that are `held`, ascending."""
    return sorted(expert for expert in set(experts.flatten().tolist()) if held is None or expert in held)
