"""The matrices of a layer's experts in host memory, and places for some of them on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quengine.kernels.block_formats import unpack_scales
from quengine.kernels.cuda.moe.expert_weights import (
    ExpertWeights,
    pack_experts,
    pack_gate_up_experts,
    pairs_experts,
    put_experts,
)
from quengine.kernels.cuda.weights.bounds import PartBounds, WeightBounds
from quengine.kernels.cuda.weights.layout import TILE_ROWS
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart, empty_part, rows_at_a_time
from quengine.kernels.cuda.weights.repack import repack
from quengine.kernels.cuda.weights.repack_table import RepackTable, repack_table
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.quant_tensor import QuantTensor

_BYTES_AT_A_TIME = 64 << 20
"""The most stored bytes of experts on a device beside the repacked ones; a larger expert is copied alone."""

Allocate = Callable[[int], Tensor]
"""Allocates uint8 [bytes] on the device."""


@dataclass(frozen=True)
class Matrices:
    """The matrices of all experts of a layer, as stored: gate and up, or down (`up`, without a gate). bias: fp32 [E,
    N]."""

    gate: Sequence[QuantTensor] | None
    up: Sequence[QuantTensor]
    bias: Tensor | None

    @property
    def kinds(self) -> list[Sequence[QuantTensor]]:
        return [self.up] if self.gate is None else [self.gate, self.up]

    @property
    def paired(self) -> bool:
        """Whether gate and up share tiles."""
        return self.gate is not None and pairs_experts(self.gate[0], self.up[0])

    @property
    def nbytes_of_one(self) -> int:
        return sum(kind[0].nbytes for kind in self.kinds)

    def tables(self, device: torch.device) -> list[RepackTable] | None:
        """The repacking tables of each kind on a device; None: some kind is packed by torch."""
        found = [
            repack_table(kind[0].format, kind[0].cols, device) if kind[0].format.is_quantized else None
            for kind in self.kinds
        ]
        tables = [table for table in found if table is not None]
        return tables if len(tables) == len(found) else None

    def bounds(self, device: torch.device) -> list[PartBounds]:
        """The bounds of each part of the experts' weights on a device, over all experts."""
        found = [_bounds(kind, device) for kind in self.kinds]
        return [each.read() for each in ([found[0] | found[1]] if self.paired else found)]

    def packed(self, experts: Sequence[int], device: torch.device) -> ExpertWeights:
        """Some experts, packed by torch."""
        chosen = [[kind[expert] for expert in experts] for kind in self.kinds]
        bias = None if self.bias is None else self.bias[list(experts)].to(device)
        if self.gate is None:
            return pack_experts(chosen[0], device, bias)
        return pack_gate_up_experts(chosen[0], chosen[1], device, bias)


@dataclass(frozen=True)
class LayerMatrices:
    """The matrices of a layer's experts, and the bounds of their weights on the device."""

    gate_up: Matrices
    down: Matrices
    gate_up_bounds: Sequence[PartBounds]
    down_bounds: Sequence[PartBounds]

    @classmethod
    def of(cls, gate_up: Matrices, down: Matrices, device: torch.device) -> LayerMatrices:
        return cls(gate_up, down, gate_up.bounds(device), down.bounds(device))

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self.down.up)

    @property
    def parts(self) -> list[tuple[Matrices, Sequence[PartBounds]]]:
        return [(self.gate_up, self.gate_up_bounds), (self.down, self.down_bounds)]

    @property
    def nbytes(self) -> int:
        """Bytes of all experts as stored."""
        return self.count * (self.gate_up.nbytes_of_one + self.down.nbytes_of_one)


class ExpertPlaces:
    """`count` places for experts of `matrices` on a device, all zeros at first. bounds: `Matrices.bounds` of the
    layer. share: see ExpertWeights; a routing names places, not experts."""

    def __init__(
        self,
        matrices: Matrices,
        count: int,
        device: torch.device,
        bounds: Sequence[PartBounds],
        allocate: Allocate,
        share: ExpertShare | None = None,
    ) -> None:
        first, self.device = matrices.up[0], device
        self.tables = matrices.tables(device)
        rows = first.rows * (1 if matrices.gate is None else 2)
        parts: list[PackedPart | FloatPart] = []
        for kind, bound in zip(matrices.kinds, bounds, strict=False):
            padded = _padded_rows(kind[0], matrices.paired) * (2 if matrices.paired else 1)
            parts.append(empty_part(kind[0], count * padded, bound, allocate, device))
        bias = None if matrices.bias is None else torch.zeros(count, rows, device=device)
        self.weights = ExpertWeights(tuple(parts), count, rows, matrices.paired, bias, share)

    def bounded(self, bounds: Sequence[PartBounds]) -> ExpertWeights:
        """The weights with the bounds of another layer, whose experts have taken the places."""
        pairs = zip(self.weights.parts, bounds, strict=True)
        parts = [
            part if isinstance(part, FloatPart) else replace(part, weight_scale=bound.scale, norm=bound.norm)
            for part, bound in pairs
        ]
        return replace(self.weights, parts=tuple(parts))

    def put(
        self, matrices: Matrices, experts: Sequence[int], places: Tensor, stored: Sequence[Tensor]
    ) -> None:
        """Repacks experts to `places`, int32 [n] on the device. stored: uint8 [n, rows, row_bytes] of each kind, the
        experts' bytes on the device. Requires `tables`."""
        assert self.tables is not None
        parts = [part for part in self.weights.parts if isinstance(part, PackedPart)]
        if matrices.paired:
            repack(parts[0].planes, stored[0], stored[1], places, self.tables[0])
        else:
            for part, rows, table in zip(parts, stored, self.tables, strict=True):
                repack(part.planes, rows, None, places, table)
        self._put_bias(matrices, experts, places)

    def _put_bias(self, matrices: Matrices, experts: Sequence[int], places: Tensor) -> None:
        if self.weights.bias is not None and matrices.bias is not None:
            self.weights.bias[places.long()] = _sent(matrices.bias[list(experts)], places.device)

    def load(self, matrices: Matrices, experts: Sequence[int], places: Sequence[int]) -> None:
        """Copies experts of the host to places, some at a time."""
        together = max(1, _BYTES_AT_A_TIME // matrices.nbytes_of_one)
        for first in range(0, len(experts), together):
            some = slice(first, first + together)
            self._load(matrices, experts[some], places[some])

    def _load(self, matrices: Matrices, experts: Sequence[int], places: Sequence[int]) -> None:
        if self.tables is None:
            put_experts(self.weights, places, matrices.packed(experts, self.device))
            return
        stored = [copied(kind, experts, None, self.device) for kind in matrices.kinds]
        self.put(matrices, experts, _sent(torch.tensor(places, dtype=torch.int32), self.device), stored)


def copied(
    kind: Sequence[QuantTensor], experts: Sequence[int], room: Tensor | None, device: torch.device
) -> Tensor:
    """Copies the stored bytes of some experts to the device: uint8 [n, rows, row_bytes], in `room` if given. Experts
    that are adjacent in memory are copied at once."""
    rows, width = kind[0].data.shape
    shape = (len(experts), rows, width)
    if room is None:
        room = torch.empty(len(experts) * rows * width, dtype=torch.uint8, device=device)
    made = room[: len(experts) * rows * width].view(shape)
    size, first = rows * width, 0
    while first < len(experts):
        begin, end = kind[experts[first]].data, first + 1
        while end < len(experts) and _follows(begin, kind[experts[end]].data, size * (end - first)):
            end += 1
        stored = begin.as_strided((end - first, rows, width), (size, width, 1))
        made[first:end].copy_(stored, non_blocking=True)
        first = end
    return made


def _follows(first: Tensor, other: Tensor, distance: int) -> bool:
    """Whether `other` lies in the memory of `first`, `distance` bytes further on."""
    alike = first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return alike and other.data_ptr() == first.data_ptr() + distance


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Copies small values to the device without waiting for its work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _padded_rows(matrix: QuantTensor, paired: bool) -> int:
    """Rows of an expert in its part, padded to whole tiles; gate and up share tiles if `paired`."""
    multiple = 1 if not matrix.format.is_quantized else TILE_ROWS // 2 if paired else TILE_ROWS
    return -(-matrix.rows // multiple) * multiple


def _bounds(kind: Sequence[QuantTensor], device: torch.device) -> WeightBounds:
    first = kind[0]
    if not first.format.is_quantized:
        return WeightBounds.none(device)
    found, together = WeightBounds.none(device), max(1, rows_at_a_time(first, device) // first.rows)
    for at in range(0, len(kind), together):
        experts = list(range(at, min(at + together, len(kind))))
        stored = copied(kind, experts, None, device)
        found |= WeightBounds.of(unpack_scales(first.format, stored.view(-1, stored.shape[-1])))
    return found
