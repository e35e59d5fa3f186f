"""Repacks stored blocks into planes in one launch a plane, by the table of their format (repack_table.py).

One kernel takes all formats, planes and widths, as arguments, because it is the first kernel that a model needs.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.weights.layout import TILE_ROWS
from quengine.kernels.cuda.weights.repack_table import RepackTable

_BLOCK = 256


@DirectLaunch
@triton.jit(
    do_not_specialize=[
        "expert_tiles", "expert_rows", "tile_rows", "row_bytes", "chunks", "unit_bytes", "size", "runs", "second",
    ]
)  # fmt: skip
def _repack_kernel(
    out_ptr, first_ptr, second_ptr, runs_ptr, places_ptr, expert_tiles, expert_rows, tile_rows, row_bytes, chunks,
    unit_bytes, size, runs, second, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (unit of an expert, expert, block of bytes). Rows 8 to 15 of a tile are those of `second_ptr`, `second`
    further on: 8, where they follow in the same rows."""
    tile, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    expert = tl.program_id(1).to(tl.int64)
    place = tl.load(places_ptr + expert).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.zeros((BLOCK,), tl.int32)
    for run in range(runs):
        code = tl.load(runs_ptr + run * size + at, mask=inside, other=0)
        row, offset = code & 15, (code >> 4) & 1023
        width = (code >> 17) & 15
        stored = tile * tile_rows + (row & 7) + tl.where(row < 8, 0, second)
        there = inside & (width > 0) & (stored < expert_rows) & (chunk * unit_bytes + offset < row_bytes)
        source = (expert * expert_rows + stored) * row_bytes + chunk * unit_bytes + offset
        one = tl.load(first_ptr + source, mask=there & (row < 8), other=0).to(tl.int32)
        two = tl.load(second_ptr + source, mask=there & (row >= 8), other=0).to(tl.int32)
        bits = ((one | two) >> ((code >> 14) & 7)) & ((1 << width) - 1)
        moved = (bits << ((code >> 21) & 7)) ^ ((code >> 24) & 255)
        value |= tl.where(there, moved, 0)
    unit = (place * expert_tiles + tile) * chunks + chunk
    tl.store(out_ptr + unit * size + at, value.to(tl.uint8), mask=inside)


def repack(
    planes: Sequence[Tensor | None],
    first: Tensor,
    second: Tensor | None,
    places: Tensor,
    table: RepackTable,
) -> None:
    """Writes n experts to `planes`, uint8 [tiles, chunks, bytes], on the device. first: their stored rows, uint8 [n,
    expert_rows, row_bytes]. places: int32 [n], the place of each expert. second: matrices that share tiles with those
    of `first`, row by row (gate and up); None: there are none. A fifth plane takes the plain scales.
    """
    paired = second is not None
    tile_rows = TILE_ROWS // 2 if paired else TILE_ROWS
    count, rows, row_bytes = first.shape
    expert_tiles = -(-rows // tile_rows)
    chunks = -(-row_bytes // table.unit_bytes)
    for plane, runs in zip(planes, (*table.runs, table.plain), strict=False):
        if runs is None or plane is None:
            continue
        most, size = runs.shape
        _repack_kernel[(expert_tiles * chunks, count, triton.cdiv(size, _BLOCK))](
            plane, first, first if second is None else second, runs, places, expert_tiles, rows, tile_rows,
            row_bytes, chunks, table.unit_bytes, size, most, 0 if paired else 8, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
