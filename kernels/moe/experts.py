"""The matmuls of a mixture of experts, each row with the experts selected for it. The torch definition.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer".
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from quengine.kernels.glu import Activation, glu
from quengine.kernels.moe.router import Routing

Linear: TypeAlias = Callable[[int, Tensor], Tensor]
"""(expert, rows [n, K]) -> [n, N], with the expert's bias."""


def experts_glu(x: Tensor, routing: Routing, gate_up: Linear, activation: Activation) -> Tensor:
    """activation(gate) * up of rows x [T, K], already normed, by each of their k experts: [T, k, F].

    `gate_up` returns [n, 2F], the first F columns being the gate. Experts without rows are not computed.
    """
    slots = routing.experts
    out: Tensor | None = None
    for expert in sorted(set(slots.flatten().tolist())):
        rows, slot = (slots == expert).nonzero(as_tuple=True)
        gated = glu(gate_up(expert, x[rows]), activation)
        if out is None:
            out = gated.new_zeros(*slots.shape, gated.shape[1])
        out[rows, slot] = gated
    assert out is not None, "no rows"
    return out


def experts_add(gated: Tensor, routing: Routing, down: Linear, residual: Tensor) -> Tensor:
    """residual [T, N] + the weighted sum over a row's experts of `down` of gated [T, k, F]: [T, N].

    A row's experts are added in ascending order, first to each other, then to the residual.
    """
    total = torch.zeros_like(residual)
    for slot in range(routing.experts.shape[1]):
        chosen = routing.experts[:, slot]
        product = torch.zeros_like(residual)
        for expert in sorted(set(chosen.tolist())):
            rows = chosen == expert
            product[rows] = down(expert, gated[rows, slot])
        total = total + routing.weights[:, slot, None] * product
    return total + residual
