"""How a matmul of many activation rows is cut into tiles on this processor, and how its operands lie in memory.

A strip is `Tile.columns` weight rows; over `DEPTH` of the inner dimension at a time it becomes a panel of fp32, that of
each inner index side by side: [depth, columns]. A block is `Tile.rows` activation rows. Packed activations are
[ceil(K / DEPTH), blocks, Tile.rows, DEPTH] fp32, so that what one panel is multiplied with lies together, at addresses
that do not collide in the caches as rows of a power of two do.

Does not know: formats, or what is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 256  # of a panel: one block of the K-quants


@dataclass(frozen=True)
class Tile:
    """rows * vectors accumulators of `lanes` fp32 stay in registers; `vectors` and one more are operands.

    quads: int32 lanes of the instruction that adds the products of four unsigned with four signed bytes to each
    (vpdpbusd); 0: the processor has none. With 16 comes the one for two int16 and two (vpdpwssd).
    """

    lanes: int
    vectors: int
    rows: int
    quads: int = 0

    @property
    def columns(self) -> int:
        return self.lanes * self.vectors


def tile_for(triple: str, features: str) -> Tile:
    """The tile for a target as LLVM names it: 24 of 32 registers are accumulators, or 12 of 16."""
    if triple.startswith(("aarch64", "arm64")):
        return Tile(lanes=4, vectors=4, rows=6)
    has = set(features.split(","))
    if "+avx512f" in has:
        return Tile(lanes=16, vectors=2, rows=12, quads=16 if has >= {"+avx512vnni", "+avx512vl"} else 0)
    if "+avx" in has:
        return Tile(lanes=8, vectors=2, rows=6, quads=8 if "+avxvnni" in has else 0)
    return Tile(lanes=4, vectors=2, rows=6)
