"""The tile sizes of prefill matmul on this processor, and the layout of its operands.

A strip is `Tile.columns` weight rows. `DEPTH` columns of it at a time are unpacked into an fp32 panel [depth,
columns]. A block is `Tile.rows` activation rows. Packed activations are fp32 [ceil(K / DEPTH), blocks, Tile.rows,
DEPTH]: the values multiplied with one panel are contiguous, and their addresses do not conflict in the caches as rows
of a power-of-two length do.
"""

from __future__ import annotations

from dataclasses import dataclass

from quengine.kernels.cpu.runtime.arguments import Arguments


@dataclass
class PackArguments(Arguments):
    """fp32 activation rows, and the memory of `blocks` blocks that they are packed into."""

    x: int
    x_stride: int
    rows: int
    cols: int
    packed: int
    blocks: int


@dataclass
class PanelArguments(Arguments):
    """Weight rows, `depth` columns from some column on, to unpack into a panel; the last row fills the strip."""

    weights: int
    row_bytes: int
    rows: int
    depth: int
    panel: int


@dataclass
class MatmulArguments(Arguments):
    """y = weight rows times packed activations plus an addend, which may be y: fp32.

    block_weights, block_bytes: weights and bytes of a block of the weight's format. task_strips: strips per task.
    """

    weights: int
    row_bytes: int
    rows: int
    cols: int
    packed: int
    x_rows: int
    addend: int
    addend_stride: int
    y: int
    y_stride: int
    panel_kernel: int
    block_weights: int
    block_bytes: int
    task_strips: int


DEPTH = 256  # columns of a panel: one block of the K-quants


@dataclass(frozen=True)
class Tile:
    """A register tile: `rows` * `vectors` accumulators of `lanes` fp32, and `vectors` + 1 operands.

    byte_dot_lanes: int32 lanes of vpdpbusd, which adds the products of four uint8 with four int8 to each lane; 0
    where the processor lacks it. 16 lanes imply vpdpwssd, the same for two pairs of int16.
    """

    lanes: int
    vectors: int
    rows: int
    byte_dot_lanes: int = 0

    @property
    def columns(self) -> int:
        return self.lanes * self.vectors


def tile_for(triple: str, features: str) -> Tile:
    """The tile for an LLVM target triple and features: accumulators take 24 of 32 vector registers, or 12 of 16."""
    if triple.startswith(("aarch64", "arm64")):
        return Tile(lanes=4, vectors=4, rows=6)
    has = set(features.split(","))
    if "+avx512f" in has:
        return Tile(
            lanes=16, vectors=2, rows=12, byte_dot_lanes=16 if has >= {"+avx512vnni", "+avx512vl"} else 0
        )
    if "+avx" in has:
        return Tile(lanes=8, vectors=2, rows=6, byte_dot_lanes=8 if "+avxvnni" in has else 0)
    return Tile(lanes=4, vectors=2, rows=6)
