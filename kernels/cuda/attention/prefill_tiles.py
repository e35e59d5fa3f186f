"""Cuts the rows of a step's chunks into tiles for prefill attention, once per step for all layers."""

from collections.abc import Sequence

import torch

from quengine.kernels.forward_batch import ForwardBatch, PrefillTiles

TILE_FIELDS = 5
"""int32 fields of a tile, see `PrefillTiles`."""

_ALIGNED = 4
"""int32 values in 16 bytes: Triton specializes kernels on addresses that are multiples of 16."""


def cut_tiles(batch: ForwardBatch, block_rows: int) -> PrefillTiles:
    """Tiles of at most `block_rows` rows of a prefill step's chunks, on the step's device."""
    sequences, tiles = tile_entries(batch.starts, batch.query_lens, block_rows)
    rows, first_tile = len(sequences), -(-len(sequences) // _ALIGNED) * _ALIGNED
    held = torch.tensor([*sequences, *[0] * (first_tile - rows), *tiles], dtype=torch.int32)
    if batch.device.type == "cuda":  # so that the copy does not wait for the step's launches
        held = held.pin_memory()
    held = held.to(batch.device, non_blocking=True)
    return PrefillTiles(
        sequences=held[:rows],
        tiles=held[first_tile:].view(-1, TILE_FIELDS),
        block_rows=block_rows,
        longest=max(batch.query_lens),
        deepest=max(map(sum, zip(batch.starts, batch.query_lens, strict=True))),
    )


def tile_entries(
    starts: Sequence[int], lengths: Sequence[int], block_rows: int
) -> tuple[list[int], list[int]]:
    """`PrefillTiles.sequences` and the flattened `PrefillTiles.tiles`, for chunks of these starts and lengths."""
    sequences, tiles = list[int](), list[tuple[int, ...]]()
    first = 0
    for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        sequences += [sequence] * length
        tiles += [(first, row, length, start, sequence) for row in range(0, length, block_rows)]
        first += length
    tiles.sort(key=lambda tile: -(tile[3] + tile[1]))
    return sequences, [entry for tile in tiles for entry in tile]
