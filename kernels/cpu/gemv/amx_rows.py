"""Decode's products of several activation rows on AMX tiles: where they are used, and their layouts.

A task's weight rows are unpacked ROWS at a time, a super-block of each into a panel:

    byte 0            tiles of int8 by group: [columns / 4, ROWS, 4 columns], 4 KiB in all
    byte SCALES_AT    scales, fp32 [groups, ROWS]
    byte MINS_AT      minimums, negated, the same

Activations are read where they lie, as two planes of bytes (quantized_rows.py). A result has the same bits as that of
one row.
"""

from __future__ import annotations

from quengine.kernels.cpu.gemm.amx_bytes import has_amx_bytes
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.quant_tensor import QuantTensor

ROWS = 16  # weight rows per panel: columns of a tile
MOST_ROWS = 16  # activation rows at once: rows of a tile
LEAST_ROWS = 8  # activation rows from which tiles are faster: fewer take as long as 8
TYPES = frozenset({"Q3_K", "Q4_K", "Q5_K"})
"""Types that are faster on tiles. With Q6_K, 8 rows take 1.5 times as long or more; others are not measured."""
MOST_GROUPS = DEPTH // 16
SCALES_AT = DEPTH * ROWS
MINS_AT = SCALES_AT + 4 * MOST_GROUPS * ROWS
PANEL_BYTES = MINS_AT + 4 * MOST_GROUPS * ROWS


def uses_amx_rows(w: QuantTensor, rows: int) -> bool:
    """Whether this processor multiplies the weight with `rows` activation rows of a decode step on tiles."""
    return (
        rows >= LEAST_ROWS and w.format.name in TYPES and has_amx_bytes() and host_tile().byte_dot_lanes > 0
    )


def whole_panels(w: QuantTensor, rows: int, step: int) -> int:
    """`step` weight rows per task, where they are multiplied on tiles rounded up: part of a panel takes as long as all
    of it."""
    return -(-step // ROWS) * ROWS if uses_amx_rows(w, rows) else step
