"""The experts of a layer that a device holds while all are in host memory, and their replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quengine.kernels.cuda.moe.expert_weights import (
    ExpertWeights,
    pack_experts,
    pack_gate_up_experts,
    put_experts,
    with_headroom,
)
from quengine.kernels.moe.held_experts import HeldExperts, Replacement, places_of
from quengine.kernels.quant_tensor import QuantTensor


@dataclass(frozen=True)
class Matrices:
    """The matrices of all experts of a layer, as stored: gate and up, or down (`up`, without a gate). bias: fp32 [E,
    N]."""

    gate: Sequence[QuantTensor] | None
    up: Sequence[QuantTensor]
    bias: Tensor | None

    def of(self, experts: Sequence[int], zeros: bool = False) -> Matrices:
        """Those of some experts; with `zeros`, of one more, whose weights and biases are zeros."""
        return Matrices(
            None if self.gate is None else _of(self.gate, experts, zeros),
            _of(self.up, experts, zeros),
            None if self.bias is None else _biases_of(self.bias, experts, zeros),
        )

    def packed(self, device: torch.device) -> ExpertWeights:
        if self.gate is None:
            return pack_experts(self.up, device, self._bias_on(device))
        return pack_gate_up_experts(self.gate, self.up, device, self._bias_on(device))

    def _bias_on(self, device: torch.device) -> Tensor | None:
        return None if self.bias is None else self.bias.to(device)


class DeviceExperts:
    """The experts of a layer on a device: those of `experts[place]`, and behind them one of zeros, which stands for
    all others.

    held: what the device sees of it. gate_up, down: their weights. A replacement is begun, which copies weights, and
    ended once they are there; in between the place is empty.
    """

    def __init__(
        self,
        of_file: tuple[Matrices, Matrices],
        experts: list[int],
        weights: tuple[ExpertWeights, ExpertWeights],
        held: HeldExperts,
    ) -> None:
        self._of_file, self.experts, self.held = of_file, experts, held
        self.gate_up, self.down = weights

    @classmethod
    def load(cls, gate_up: Matrices, down: Matrices, experts: list[int], uses: Tensor) -> DeviceExperts:
        """With these experts at first. uses: int32 [E], on the device."""
        device, every = uses.device, len(down.up)
        made = [with_headroom(each.of(experts, zeros=True).packed(device)) for each in (gate_up, down)]
        held = HeldExperts(places_of(experts, every).to(device), uses, len(experts))
        return cls((gate_up, down), list(experts), (made[0], made[1]), held)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def weights_of_one(self) -> int:
        """The number of weights of an expert."""
        return sum(weights.expert_rows * weights.cols for weights in (self.gate_up, self.down))

    def begin(self, changes: Sequence[Replacement]) -> None:
        """Empties the places of `changes`: no step that is launched from now on reads them."""
        for change in changes:
            self.held.places[change.before] = self.held.count

    def copy(self, changes: Sequence[Replacement]) -> bool:
        """Copies the weights to their places. Returns whether steps captured before must be captured again
        (`put_experts`)."""
        places, experts = [each.place for each in changes], [each.expert for each in changes]
        before = self.gate_up, self.down
        device = self.held.places.device
        gate_up, down = (each.of(experts).packed(device) for each in self._of_file)
        self.gate_up = put_experts(self.gate_up, places, gate_up)
        self.down = put_experts(self.down, places, down)
        pairs = zip(before, (self.gate_up, self.down), strict=True)
        return any(a is not b for old, new in pairs for a, b in zip(old.parts, new.parts, strict=True))

    def end(self, changes: Sequence[Replacement]) -> None:
        """Steps that are launched from now on read the new experts."""
        for change in changes:
            self.held.places[change.expert] = change.place
            self.experts[change.place] = change.expert


def _of(matrices: Sequence[QuantTensor], experts: Sequence[int], zeros: bool) -> list[QuantTensor]:
    chosen = [matrices[expert] for expert in experts]
    return [*chosen, replace(matrices[0], data=torch.zeros_like(matrices[0].data))] if zeros else chosen


def _biases_of(bias: Tensor, experts: Sequence[int], zeros: bool) -> Tensor:
    chosen = bias[list(experts)]
    return torch.cat([chosen, torch.zeros_like(bias[:1])]) if zeros else chosen
