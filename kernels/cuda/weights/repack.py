"""Repacks stored blocks into planes in one launch a plane, for weights that pass through the device.

Packing (packed.py) only moves bits, and inverts some, in nearly all formats: a bit of a plane is one bit of the 16 rows
and the columns of a chunk that it holds. So a table, found once for a format by packing rows whose bits number
themselves, says for each byte of a unit (a tile's chunk) which runs of bits it is made of. The hundred torch operations
of packing take ten times as long; they are the definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.weights.layout import TILE_ROWS, PackedLayout, packed_layout
from quengine.kernels.cuda.weights.packed import PackedPart, pack_blocks
from quengine.kernels.quant_tensor import QuantTensor

_BLOCK = 256
_ROW, _OFFSET, _RIGHT, _WIDTH, _LEFT = 0, 4, 14, 17, 21
"""First bits of a run's fields: row in the tile, byte in the row's part of the unit, shift to the right there, bits,
shift to the left in the result."""


@dataclass(frozen=True, eq=False)
class PlaneRuns:
    """The bytes of a plane's unit. runs: int32 [most runs, bytes], the runs of bits of each byte, 0 for none. flips:
    int32 [bytes], the bits that are inverted."""

    runs: Tensor
    flips: Tensor


@dataclass(frozen=True, eq=False)
class RepackTable:
    """How units of a format are made of stored rows. planes: low, high, scales and supers, None for an empty one.
    unit_bytes: bytes of a stored row in a unit."""

    layout: PackedLayout
    planes: tuple[PlaneRuns | None, ...]
    unit_bytes: int

    def to(self, device: torch.device) -> "RepackTable":
        planes = tuple(
            None if plane is None else PlaneRuns(plane.runs.to(device), plane.flips.to(device))
            for plane in self.planes
        )
        return RepackTable(self.layout, planes, self.unit_bytes)


def repack_table(fmt: BlockFormat, cols: int) -> RepackTable | None:
    """The table of a format for rows of `cols` columns; None where packing does more than move bits."""
    return _table(fmt.name, packed_layout(fmt, cols).chunk)


@cache
def _table(name: str, chunk: int) -> RepackTable | None:
    fmt = FORMATS[name]
    if chunk % fmt.block:
        return None
    unit_bytes = fmt.row_bytes(chunk)
    bits = TILE_ROWS * unit_bytes * 8
    number = np.arange(1, bits + 1)
    zero = _planes(fmt, chunk, np.zeros(bits, dtype=np.uint8))
    sources = [np.zeros(len(plane), dtype=np.int64) for plane in zero]
    for place in range(int(bits + 1).bit_length()):
        packed = _planes(fmt, chunk, ((number >> place) & 1).astype(np.uint8))
        for source, plane, base in zip(sources, packed, zero, strict=True):
            source |= (plane ^ base).astype(np.int64) << place
    if any(len(source) and source.max() > bits for source in sources):
        return None
    random = np.random.default_rng(0).integers(0, 2, bits).astype(np.uint8)
    with_none = np.concatenate([np.zeros(1, dtype=np.uint8), random])
    packed = _planes(fmt, chunk, random)
    for source, plane, base in zip(sources, packed, zero, strict=True):
        if not np.array_equal(with_none[source] ^ base, plane):
            return None
    planes = [_runs(source, base, unit_bytes) for source, base in zip(sources, zero, strict=True)]
    return RepackTable(packed_layout(fmt, chunk), tuple(planes), unit_bytes)


def _planes(fmt: BlockFormat, chunk: int, bits: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """The bits of each plane of one tile's chunk, whose stored bits are `bits`."""
    data = torch.from_numpy(np.packbits(bits, bitorder="little").reshape(TILE_ROWS, -1))
    part = pack_blocks(QuantTensor("", fmt, (TILE_ROWS, chunk), data), TILE_ROWS, [data], "cpu")
    held = [None if number == 1 and part.layout.book else plane for number, plane in enumerate(part.planes)]
    empty = np.zeros(0, dtype=np.uint8)
    return [
        empty if plane is None else np.unpackbits(plane.flatten().numpy(), bitorder="little")
        for plane in held
    ]


def _runs(source: NDArray[np.int64], base: NDArray[np.uint8], unit_bytes: int) -> PlaneRuns | None:
    """source: of each bit of the plane the number of its stored bit, from 1; 0: none, it is constant."""
    if not len(source):
        return None
    of_bytes = [_runs_of_byte(each, unit_bytes) for each in source.reshape(-1, 8).tolist()]
    most = max(1, *map(len, of_bytes))
    runs = [[each[n] if n < len(each) else 0 for each in of_bytes] for n in range(most)]
    flips = np.packbits(base, bitorder="little").astype(np.int32)
    return PlaneRuns(torch.tensor(runs, dtype=torch.int32), torch.from_numpy(flips))


def _runs_of_byte(source: Sequence[int], unit_bytes: int) -> list[int]:
    """The fewest runs of bits that neighbour each other in one stored byte too."""
    found, left = list[int](), 0
    while left < 8:
        if not source[left]:
            left += 1
            continue
        first = source[left] - 1
        width = 1
        while left + width < 8 and source[left + width] - 1 == first + width and (first + width) % 8:
            width += 1
        row, at = divmod(first // 8, unit_bytes)
        fields = ((row, _ROW), (at, _OFFSET), (first % 8, _RIGHT), (width, _WIDTH), (left, _LEFT))
        found.append(sum(value << place for value, place in fields))
        left += width
    return found


@DirectLaunch
@triton.jit
def _repack_kernel(
    out_ptr, first_ptr, second_ptr, runs_ptr, flips_ptr, places_ptr, expert_tiles, expert_rows, tile_rows, row_bytes,
    chunks, BYTES: tl.constexpr, RUNS: tl.constexpr, UNIT: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (unit of an expert, expert, block of bytes). Rows 8 to 15 of a tile are `second`'s; SECOND: of the same
    rows in memory, 8 further on."""
    tile, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    expert = tl.program_id(1).to(tl.int64)
    place = tl.load(places_ptr + expert).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < BYTES
    value = tl.load(flips_ptr + at, mask=inside, other=0)
    for run in tl.static_range(RUNS):
        code = tl.load(runs_ptr + run * BYTES + at, mask=inside, other=0)
        row, offset = code & 15, (code >> 4) & 1023
        width = (code >> 17) & 15
        in_half = tile * tile_rows + (row & 7)
        stored = in_half + tl.where(row < 8, 0, SECOND)
        there = inside & (width > 0) & (stored < expert_rows) & (chunk * UNIT + offset < row_bytes)
        source = (expert * expert_rows + stored) * row_bytes + chunk * UNIT + offset
        one = tl.load(first_ptr + source, mask=there & (row < 8), other=0).to(tl.int32)
        two = tl.load(second_ptr + source, mask=there & (row >= 8), other=0).to(tl.int32)
        bits = ((one | two) >> ((code >> 14) & 7)) & ((1 << width) - 1)
        value ^= bits << ((code >> 21) & 7)
    unit = (place * expert_tiles + tile) * chunks + chunk
    tl.store(out_ptr + unit * BYTES + at, value.to(tl.uint8), mask=inside)


def repack(
    part: PackedPart,
    first: Tensor,
    second: Tensor | None,
    places: Tensor,
    expert_rows: int,
    table: RepackTable,
) -> None:
    """Writes experts to their places in `part`, on the device: expert i of the stored rows, uint8 [n, expert_rows,
    row_bytes], to place `places[i]`, int32 [n]. second: the matrices that share tiles with those of `first`, row by row
    (gate and up); None: there are none.
    """
    paired = second is not None
    tile_rows = TILE_ROWS // 2 if paired else TILE_ROWS
    expert_tiles = -(-expert_rows // tile_rows)
    for plane, runs in zip(part.planes, table.planes, strict=True):
        if runs is None:
            continue
        most, size = runs.runs.shape
        _repack_kernel[(expert_tiles * part.chunks, len(places), triton.cdiv(size, _BLOCK))](
            plane, first, first if second is None else second, runs.runs, runs.flips, places, expert_tiles,
            expert_rows, tile_rows, first.shape[-1], part.chunks,
            BYTES=size, RUNS=most, UNIT=table.unit_bytes, SECOND=0 if paired else 8, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
