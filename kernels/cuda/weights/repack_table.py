"""How the bits of stored rows move to the planes of a format, as a table that a kernel follows (repack.py).

In nearly all formats packing only moves bits, and inverts some: each bit of a plane comes from one stored bit of its
unit (a tile's chunk: 16 rows, the columns of a chunk). To find out which, rows whose bits number themselves are packed
by the definition (planes.py): the result says for each byte of a unit which runs of stored bits make it up. The same
finds the scales of a unit in one form for all formats, from which bounds on its weights follow (bounds.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quengine.kernels.block_formats import FORMATS, BlockFormat, Groups, unpack
from quengine.kernels.cuda.weights.layout import TILE_ROWS, packed_layout
from quengine.kernels.cuda.weights.planes import planes_of

ROW, OFFSET, RIGHT, WIDTH, LEFT, FLIPS = 0, 4, 14, 17, 21, 24
"""The first bit of each field of a run: row in the tile, byte in the row's part of the unit, right shift there, number
of bits, left shift in the result, and mask of the result's inverted bits."""


@dataclass(frozen=True, eq=False)
class RepackTable:
    """How units of a format are made of stored rows. runs: for each plane (low, high, scales, supers) int32 [most
    runs, bytes], the runs of bits of each byte, 0 for none; None for an empty plane. plain: the same for
    `plain_scales`; None if packing them does more than move bits. unit_bytes: bytes of a stored row in a unit."""

    runs: tuple[Tensor | None, ...]
    plain: Tensor | None
    unit_bytes: int


def repack_table(fmt: BlockFormat, cols: int, device: torch.device | str = "cpu") -> RepackTable | None:
    """The table of a format for rows of `cols` columns, on a device; None where packing does more than move bits."""
    return _on_device(fmt.name, packed_layout(fmt, cols).chunk, torch.device(device))


@cache
def _on_device(name: str, chunk: int, device: torch.device) -> RepackTable | None:
    table = _table(name, chunk)
    if table is None:
        return None
    runs = tuple(None if each is None else each.to(device) for each in table.runs)
    return RepackTable(runs, None if table.plain is None else table.plain.to(device), table.unit_bytes)


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
    random = np.random.default_rng(0).integers(0, 2, bits).astype(np.uint8)
    packed = _planes(fmt, chunk, random)
    moved = [_moves(*each, random) for each in zip(sources, zero, packed, strict=True)]
    if not all(moved[:-1]):
        return None
    each = zip(sources, zero, moved, strict=True)
    runs = [_runs(source, base, unit_bytes) if moves else None for source, base, moves in each]
    return RepackTable(tuple(runs[:-1]), runs[-1], unit_bytes)


def plain_scales(groups: Groups) -> Tensor:
    """What scales and minimums of groups are made of, in one form for all formats: int16 [R, K/group, 4], the bits of d
    and dmin, sub-scale and sub-minimum; 0 for what a format lacks."""
    count = groups.codes.shape[1] // groups.group

    def of(field: Tensor | None) -> Tensor:
        if field is None:
            return torch.zeros(len(groups.codes), count, dtype=torch.int16)
        whole = field.view(torch.int16) if field.dtype == torch.float16 else field.to(torch.int16)
        return whole.repeat_interleave(count // field.shape[1], 1)

    return torch.stack([of(each) for each in (groups.d, groups.dmin, groups.sc, groups.mn)], -1)


def _planes(fmt: BlockFormat, chunk: int, bits: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """The bits of each plane of one tile's chunk, whose stored bits are `bits`, and of its plain scales."""
    data = torch.from_numpy(np.packbits(bits, bitorder="little").reshape(TILE_ROWS, -1))
    layout, groups = packed_layout(fmt, chunk), unpack(fmt, data)
    found = planes_of(groups, layout)
    made = [
        np.zeros(0, dtype=np.uint8)
        if plane is None
        else np.unpackbits(plane.contiguous().view(torch.uint8).flatten().numpy(), bitorder="little")
        for plane in (*found, plain_scales(groups))
    ]
    assert [len(plane) // 8 for plane in made[:-1]] == list(layout.plane_bytes)
    return made


def _moves(
    source: NDArray[np.int64], base: NDArray[np.uint8], packed: NDArray[np.uint8], stored: NDArray[np.uint8]
) -> bool:
    """Whether each bit of a plane is a stored bit, or an inverted one, tested on the bits `stored` and `packed`."""
    if not len(source):
        return True
    if source.max() > len(stored) or (base & (source == 0)).any():
        return False
    with_none = np.concatenate([np.zeros(1, dtype=np.uint8), stored])
    return bool(np.array_equal(with_none[source] ^ base, packed))


def _runs(source: NDArray[np.int64], base: NDArray[np.uint8], unit_bytes: int) -> Tensor | None:
    """A plane's runs, as in `RepackTable`. source: for each bit of the plane the number of its stored bit, from 1; 0:
    it has none, and is 0. base: 1 for each inverted bit."""
    if not len(source):
        return None
    pairs = zip(source.reshape(-1, 8).tolist(), np.packbits(base, bitorder="little").tolist(), strict=True)
    of_bytes = [_runs_of_byte(each, flips, unit_bytes) for each, flips in pairs]
    most = max(1, *map(len, of_bytes))
    runs = [[each[n] if n < len(each) else 0 for each in of_bytes] for n in range(most)]
    return torch.from_numpy(np.array(runs, dtype=np.uint32).view(np.int32))


def _runs_of_byte(source: Sequence[int], flips: int, unit_bytes: int) -> list[int]:
    """A byte as the fewest runs of adjacent bits that are also adjacent in one stored byte."""
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
        inverted = flips & (((1 << width) - 1) << left)
        fields = (
            *((row, ROW), (at, OFFSET), (first % 8, RIGHT), (width, WIDTH), (left, LEFT)),
            (inverted, FLIPS),
        )
        found.append(sum(value << place for value, place in fields))
        left += width
    return found
