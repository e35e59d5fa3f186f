"""Where the rows of several prompts' chunks lie, as the kernels of a prompt read it on the device.

Made once for the layers of a step. Knows positions and tiles of rows; not attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.backend import PromptBatch

TILE_FIELDS = 5
"""int32 entries of a tile: the first row of its chunk, its own first row in the chunk, the chunk's rows, the position
of the chunk's first row, and the sequence."""


@dataclass(frozen=True)
class PromptRows:
    """`positions` and `sequences`: int32 [T], of each row; `tiles`: int32 [tiles, TILE_FIELDS], each of at most
    `block_rows` rows of one chunk, those that see the most keys first, so that no long one is left over at the end. A
    tile of a chunk of no rows is nobody's.
    Of all chunks: `longest`, most rows; `latest`, last of the positions they begin at; `deepest`, most positions with
    the chunk.
    """

    positions: Tensor
    sequences: Tensor
    tiles: Tensor
    block_rows: int
    longest: int
    latest: int
    deepest: int

    @classmethod
    def of(cls, batch: PromptBatch, block_rows: int) -> "PromptRows":
        positions, sequences, tiles = places(batch.starts, batch.lengths, block_rows)
        first = len(positions)
        held = torch.tensor(
            [*positions, *sequences, *tiles], dtype=torch.int32, device=batch.block_tables.device
        )
        deepest = max(map(sum, zip(batch.starts, batch.lengths, strict=True)))
        fields = held[2 * first :].view(-1, TILE_FIELDS)
        most = max(batch.lengths), max(batch.starts), deepest
        return cls(held[:first], held[first : 2 * first], fields, block_rows, *most)


@dataclass(frozen=True)
class LaidPrompts(PromptBatch):
    """Chunks whose rows' places are on the device already, in `laid`: those of a captured step, whose number of rows is
    all that the host knows. It has no `starts` and `lengths`."""

    laid: PromptRows


def places(
    starts: Sequence[int], lengths: Sequence[int], block_rows: int
) -> tuple[list[int], list[int], list[int]]:
    """What `PromptRows` holds of such chunks: each row's position and sequence, and the fields of the tiles."""
    positions, sequences, tiles = list[int](), list[int](), list[tuple[int, ...]]()
    first = 0
    for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        positions += range(start, start + length)
        sequences += [sequence] * length
        tiles += [(first, row, length, start, sequence) for row in range(0, length, block_rows)]
        first += length
    tiles.sort(key=lambda tile: -(tile[3] + tile[1]))
    return positions, sequences, [entry for tile in tiles for entry in tile]
