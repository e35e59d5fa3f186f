"""The matrices of all experts of a layer, packed one below the other, so that an expert is an offset in tiles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cuda.weights.layout import LANES, TILE_ROWS, packed_layout
from quengine.kernels.cuda.weights.packed import (
    FloatPart,
    PackedPart,
    pack,
    pack_blocks,
    pair_rows,
    rows_at_a_time,
)
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.quant_tensor import QuantTensor

MOST_WORDS = 2**31 - 1
"""The most words of a plane (4 or 8 bytes, one per lane and step): kernels count them in 32 bits."""


@dataclass(frozen=True)
class ExpertWeights:
    """The matrices [expert_rows, K] of `count` experts that are applied to the same rows.

    parts: one, or two for gate and up that cannot be paired. Each has the rows of all experts, one below the other. In
    a PackedPart every expert has `expert_tiles` tiles: those of expert e begin at tile e * expert_tiles, and rows of
    zeros fill its last one. In a FloatPart expert e begins at row e * part_rows.
    paired: the expert's rows are gate and up, paired within its tiles (see PackedWeight).
    bias: fp32 [E, expert_rows], gate first, added to an expert's outputs.
    share: which of a layer's experts they are; None: all.
    """

    parts: tuple[PackedPart | FloatPart, ...]
    count: int
    expert_rows: int
    paired: bool = False
    bias: Tensor | None = None
    share: ExpertShare | None = None

    @property
    def first(self) -> int:
        """The number of the first of these experts in a routing."""
        return 0 if self.share is None else self.share.first

    @property
    def among(self) -> int:
        """The number of experts that a routing's slots are spread over."""
        return self.count if self.share is None else self.share.among

    @property
    def part_rows(self) -> int:
        """Rows of an expert in each part, without padding."""
        return self.expert_rows // len(self.parts)

    @property
    def expert_tiles(self) -> int:
        """Tiles of an expert in each part."""
        return -(-self.part_rows // TILE_ROWS)

    @property
    def rows(self) -> int:
        """Outputs of all experts."""
        return self.count * self.expert_rows

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over all experts reads."""
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return bias + sum(part.nbytes for part in self.parts)


def put_experts(held: ExpertWeights, places: Sequence[int], experts: ExpertWeights) -> None:
    """Copies expert i of `experts` to place `places[i]` of `held`, whose scales and bounds cover it."""
    for own, new in zip(held.parts, experts.parts, strict=True):
        if isinstance(own, FloatPart):
            assert isinstance(new, FloatPart)
            pairs, rows = [(own.weight, new.weight)], held.part_rows
        else:
            assert isinstance(new, PackedPart)
            planes = zip(own.planes, new.planes, strict=True)
            pairs = [pair for n, pair in enumerate(planes) if n != 1 or not own.layout.book]
            rows = held.expert_tiles
        for number, place in enumerate(places):
            for target, source in pairs:
                target[place * rows : (place + 1) * rows] = source[number * rows : (number + 1) * rows]
    if held.bias is not None and experts.bias is not None:
        held.bias[list(places)] = experts.bias


def pack_experts(
    experts: Sequence[QuantTensor],
    device: torch.device | str,
    bias: Tensor | None = None,
    share: ExpertShare | None = None,
) -> ExpertWeights:
    """Repacks the matrices [N, K] of E experts on `device`. bias: [E, N]. share: see ExpertWeights.

    Raises ValueError if formats or shapes differ, or for more weights than kernels can count.
    """
    rows = experts[0].rows
    own = _bias(bias, len(experts), rows)
    return ExpertWeights((_pack(experts, device),), len(experts), rows, bias=own, share=share)


def pack_gate_up_experts(
    gate: Sequence[QuantTensor],
    up: Sequence[QuantTensor],
    device: torch.device | str,
    bias: Tensor | None = None,
    share: ExpertShare | None = None,
) -> ExpertWeights:
    """Repacks the gate and up matrices [F, K] of E experts on `device`, paired if they have one format. bias: [E, 2F].

    Raises ValueError as `pack_experts`, and if gate and up have different shapes.
    """
    if (gate[0].shape, len(gate)) != (up[0].shape, len(up)):
        raise ValueError(
            f"{len(gate)} gates {list(gate[0].shape)} have {len(up)} up matrices {list(up[0].shape)}"
        )
    rows = 2 * gate[0].rows
    bias = _bias(bias, len(gate), rows)
    if pairs_experts(gate[0], up[0]):
        return ExpertWeights((_pack_paired(gate, up, device),), len(gate), rows, True, bias, share)
    return ExpertWeights((_pack(gate, device), _pack(up, device)), len(gate), rows, bias=bias, share=share)


def pairs_experts(gate: QuantTensor, up: QuantTensor) -> bool:
    """Whether gate and up of an expert share tiles, row by row."""
    return gate.format == up.format and gate.format.is_quantized


def _pack(experts: Sequence[QuantTensor], device: torch.device | str) -> PackedPart | FloatPart:
    first = experts[0]
    _check(experts, -(-first.rows // TILE_ROWS) * TILE_ROWS)
    if not first.format.is_quantized:
        return pack(experts, device).parts[0]
    blocks = _blocks(experts, TILE_ROWS, rows_at_a_time(first, device), device)
    return pack_blocks(first, len(experts) * (-(-first.rows // TILE_ROWS) * TILE_ROWS), blocks, device)


def _pack_paired(
    gate: Sequence[QuantTensor], up: Sequence[QuantTensor], device: torch.device | str
) -> PackedPart:
    half = TILE_ROWS // 2
    padded = -(-gate[0].rows // half) * half
    _check([*gate, *up], 2 * padded, len(gate))
    at_a_time = rows_at_a_time(gate[0], device) // 2
    gates, ups = (_blocks(experts, half, at_a_time, device) for experts in (gate, up))
    pairs = (pair_rows(*pair) for pair in zip(gates, ups, strict=True))
    return pack_blocks(gate[0], 2 * len(gate) * padded, pairs, device)


def _blocks(
    experts: Sequence[QuantTensor], multiple: int, at_a_time: int, device: torch.device | str
) -> Iterator[Tensor]:
    """Yields the rows of all experts on `device`, in blocks of about `at_a_time` rows: several experts, or a piece of
    one. Each expert's rows are padded to a multiple with zero bytes, which are zeros in every format.
    """
    rows, width = experts[0].data.shape
    padded = -(-rows // multiple) * multiple
    together = max(1, at_a_time // padded)
    for first in range(0, len(experts), together):
        some = experts[first : first + together]
        for row in range(0, padded, at_a_time):
            count = min(at_a_time, padded - row)
            block = torch.zeros(len(some), count, width, dtype=torch.uint8, device=device)
            for place, expert in zip(block, some, strict=True):
                stored = expert.data[row : row + count]
                place[: len(stored)].copy_(stored, non_blocking=True)
            yield block.view(-1, width)


def _check(experts: Sequence[QuantTensor], padded_rows: int, count: int | None = None) -> None:
    """Raises ValueError if experts differ or are more than kernels can count."""
    first = experts[0]
    for expert in experts:
        if expert.format != first.format or expert.shape != first.shape:
            raise ValueError(
                f"experts of one layer must be alike: {first.format.name} {list(first.shape)} ({first.name}), "
                f"but {expert.format.name} {list(expert.shape)} ({expert.name})"
            )
    if not first.format.is_quantized:
        return
    layout = packed_layout(first.format, first.cols)
    chunks = (count or len(experts)) * padded_rows // TILE_ROWS * -(-first.cols // layout.chunk)
    words = chunks * layout.low_words * LANES
    if words > MOST_WORDS:
        raise ValueError(
            f"{first.name}: {len(experts)} experts {list(first.shape)} of {first.format.name} take {words} words, "
            f"and kernels count up to {MOST_WORDS}"
        )


def _bias(bias: Tensor | None, count: int, rows: int) -> Tensor | None:
    """The bias as contiguous fp32. Raises ValueError for another shape."""
    if bias is None:
        return None
    if bias.shape != (count, rows):
        raise ValueError(f"a bias of experts must be {[count, rows]}, not {list(bias.shape)}")
    return bias.float().contiguous()
