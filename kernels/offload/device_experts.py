"""The experts of a layer that a device holds while all are in host memory, and their replacement."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.held_experts import HeldExperts, Replacement, places_of
from quengine.kernels.offload.matrices import ExpertPlaces, LayerMatrices


class DeviceExperts:
    """The experts of a layer on a device: place p holds expert `experts[p]`. uses: int32 [E], on the device.

    held: the device's table of them. gate_up, down: their weights. A replacement has three steps: it begins by emptying
    a place, copies weights, and ends once they have arrived.
    """

    def __init__(self, of_file: LayerMatrices, experts: Sequence[int], uses: Tensor) -> None:
        device, count = uses.device, len(experts)
        self._of_file, self.experts = of_file, list(experts)
        self._places = [
            ExpertPlaces(
                matrices, count, device, bounds, lambda size: _zeros(size, device), ExpertShare(0, count)
            )
            for matrices, bounds in of_file.parts
        ]
        self.held = HeldExperts(places_of(experts, of_file.count).to(device), uses, count)
        self._load(self.experts, list(range(count)))

    @property
    def gate_up(self) -> ExpertWeights:
        return self._places[0].weights

    @property
    def down(self) -> ExpertWeights:
        return self._places[1].weights

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def begin(self, changes: Sequence[Replacement]) -> None:
        """Empties the places of `changes`: no step that is launched from now on reads them."""
        for change in changes:
            self.held.places[change.before] = self.held.count

    def copy(self, changes: Sequence[Replacement]) -> None:
        """Copies the weights to their places."""
        self._load([each.expert for each in changes], [each.place for each in changes])

    def end(self, changes: Sequence[Replacement]) -> None:
        """Lets steps that are launched from now on read the new experts."""
        for change in changes:
            self.held.places[change.expert] = change.place
            self.experts[change.place] = change.expert

    def _load(self, experts: Sequence[int], places: Sequence[int]) -> None:
        for held, (matrices, _) in zip(self._places, self._of_file.parts, strict=True):
            held.load(matrices, experts, places)


def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
