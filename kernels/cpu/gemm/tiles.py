"""How a matmul of many activation rows is cut into tiles on this processor, and how its operands lie in memory.

A strip is `Tile.columns` weight rows; over `DEPTH` of the inner dimension at a time it becomes a panel of fp32, that of
each inner index side by side: [depth, columns]. A block is `Tile.rows` activation rows. Packed activations are
[ceil(K / DEPTH), blocks, Tile.rows, DEPTH] fp32, so that what one panel is multiplied with lies together, at addresses
that do not collide in the caches as rows of a power of two do.
"""

from __future__ import annotations

from dataclasses import dataclass

from quengine.kernels.cpu.runtime.arguments import Arguments


@dataclass
class PackArguments(Arguments):
    """fp32 activation rows, and the memory that they are packed into in so many blocks."""

    x: int
    x_stride: int
    rows: int
    cols: int
    packed: int
    blocks: int


@dataclass
class PanelArguments(Arguments):
    """Weight rows from some column on, `depth` columns of them, as a panel; the last row is repeated."""

    weights: int
    row_bytes: int
    rows: int
    depth: int
    panel: int


@dataclass
class MatmulArguments(Arguments):
    """Weight rows times packed activations plus an addend, which may be y: fp32.

    block_weights, block_bytes: of a block of the weight's format. task_strips: strips of a task.
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


DEPTH = 256  # of a panel: one block of the K-quants


@dataclass(frozen=True)
class Tile:
    """rows * vectors accumulators of `lanes` fp32 stay in registers; `vectors` and one more are operands.

    byte_dot_lanes: int32 lanes of the instruction that adds the products of four unsigned with four signed bytes to
    each (vpdpbusd); 0: the processor has none. With 16 comes the one for two int16 and two (vpdpwssd).
    """

    lanes: int
    vectors: int
    rows: int
    byte_dot_lanes: int = 0

    @property
    def columns(self) -> int:
        return self.lanes * self.vectors


def tile_for(triple: str, features: str) -> Tile:
    """The tile for a target as LLVM names it: 24 of 32 registers are accumulators, or 12 of 16."""
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
