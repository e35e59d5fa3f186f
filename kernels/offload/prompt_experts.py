"""Experts of long prompts: a layer's pass through the device, while the layer before is computed.

Many rows use all experts, and the CPU takes longer to multiply them than the bus takes to carry the weights. So a
layer's stored blocks are copied to the device, repacked there, and multiplied like a layer that is always there. The
device has room for one layer as stored and one repacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.offload.matrices import ExpertPlaces, LayerMatrices, copied
from quengine.kernels.offload.side_stream import SideStream

STREAMED_ROWS = 128
"""Rows of a step from which a prompt's experts pass through the device."""


class PromptExperts:
    """The experts of `layers`, by number, for prompts. All must have a table (`Matrices.tables`)."""

    def __init__(self, layers: Mapping[int, LayerMatrices], device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._order = sorted(layers)
        self._stored = torch.empty(
            max(layer.nbytes for layer in layers.values()), dtype=torch.uint8, device=device
        )
        self._places = dict[str, list[ExpertPlaces]]()
        room = _Room(device)
        # The largest first, so that the others find room in its memory.
        for layer in sorted(layers.values(), key=lambda each: -each.nbytes):
            if _kind(layer) not in self._places:
                room.begin()
                self._places[_kind(layer)] = [
                    ExpertPlaces(matrices, layer.count, device, bounds, room.take)
                    for matrices, bounds in layer.parts
                ]
        counts = {layer.count for layer in layers.values()}
        self._every = {count: torch.arange(count, dtype=torch.int32, device=device) for count in counts}
        self._stream = SideStream(device)
        self._coming: tuple[int, list[list[Tensor]], Any] | None = None

    def weights(self, layer: int) -> tuple[ExpertWeights, ExpertWeights]:
        """Gate and up, and down, of a layer, until the next layer's are requested."""
        if self._coming is None or self._coming[0] != layer:
            self._copy(layer)
        assert self._coming is not None
        _, stored, copied_event = self._coming
        self._stream.wait(copied_event)
        of_file = self._layers[layer]
        places, experts = self._places[_kind(of_file)], list(range(of_file.count))
        made = list[ExpertWeights]()
        for held, (matrices, bounds), rows in zip(places, of_file.parts, stored, strict=True):
            held.put(matrices, experts, self._every[of_file.count], rows)
            made.append(held.bounded(bounds))
        self._copy(self._order[(self._order.index(layer) + 1) % len(self._order)])
        return made[0], made[1]

    def _copy(self, layer: int) -> None:
        """Copies a layer's stored blocks, once those of the last one have been repacked."""
        of_file, first, stored = self._layers[layer], 0, list[list[Tensor]]()
        experts = list(range(of_file.count))
        with self._stream.after_current():
            for matrices, _ in of_file.parts:
                kinds = list[Tensor]()
                for kind in matrices.kinds:
                    size = len(experts) * kind[0].nbytes
                    kinds.append(copied(kind, experts, self._stored[first : first + size], self._device))
                    first += size
                stored.append(kinds)
        self._coming = layer, stored, self._stream.mark()


class _Room:
    """Device memory that layers of different kinds share for their parts, one kind at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._held, self._number = device, list[Tensor](), 0

    def begin(self) -> None:
        self._number = 0

    def take(self, size: int) -> Tensor:
        """uint8 [size]; the n-th since `begin` shares memory with the n-th of other kinds, if that has room."""
        if self._number == len(self._held):
            self._held.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        elif len(self._held[self._number]) < size:
            self._held[self._number] = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._number += 1
        return self._held[self._number - 1][:size]


def _kind(layer: LayerMatrices) -> str:
    """A string that is equal for layers that can use the same places."""
    parts = [
        (
            matrices.paired,
            matrices.bias is None,
            [(kind[0].format.name, kind[0].shape) for kind in matrices.kinds],
        )
        for matrices, _ in layer.parts
    ]
    return repr((layer.count, parts))
