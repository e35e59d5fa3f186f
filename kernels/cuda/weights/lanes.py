"""The order of rows and columns over the lanes of a packed matrix, for packing (see layout.py)."""

import torch
from torch import Tensor

from quengine.kernels.cuda.weights.layout import LANES, TILE_ROWS, PackedLayout


def padded(values: Tensor, width: int) -> Tensor:
    """Pads with zeros below to whole tiles and on the right to a multiple of `width`: [16*tiles, n*width]."""
    rows, cols = values.shape
    if cols % width == 0 and rows % TILE_ROWS == 0:
        return values
    return torch.nn.functional.pad(values, (0, -cols % width, 0, -rows % TILE_ROWS))


def by_lane(values: Tensor, layout: PackedLayout) -> Tensor:
    """One value per group, [rows, cols/group], reordered to [tiles, chunks, 32 lanes, sets, 2 rh]."""
    whole = padded(values, layout.chunk // layout.group)
    chunks = whole.shape[1] * layout.group // layout.chunk
    shape = (-1, 2, 8, chunks, layout.blocks, 4, layout.sets_per_block)
    split = whole.view(shape).permute(0, 3, 2, 5, 4, 6, 1)
    return split.reshape(split.shape[0], chunks, 32, layout.sets, 2)


def by_run(values: Tensor, each: int, layout: PackedLayout) -> Tensor:
    """A value for `each` columns, [rows, cols/each], by runs of 32 columns of a lane, run 2 * block + rh:
    [tiles, chunks, 32 lanes, runs, 32/each]."""
    whole = padded(values, layout.chunk // each)
    shape = (-1, 2, 8, whole.shape[1] * each // layout.chunk, layout.blocks, 4, 32 // each)
    split = whole.view(shape).permute(0, 3, 2, 5, 4, 1, 6)
    return split.reshape(*split.shape[:2], LANES, 2 * layout.blocks, 32 // each)
