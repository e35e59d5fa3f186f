"""Launch geometry of the matmul kernels by (device, format, shape): measured, kept in launch_table.json.

benchmarks/tune_matvec.py and benchmarks/matmul_crossover.py write the file. A shape or GPU that is not in it gets a
default that is right everywhere and not far off; nothing is tuned at run time.
Does not know: how the kernels use the numbers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quengine.kernels.cuda.packed import PackedPart

_TABLE = Path(__file__).with_name("launch_table.json")
_MOST_ROUNDS = 16


@dataclass(frozen=True)
class Geometry:
    """A program of the matvec kernels: `tiles` tiles of 16 weight rows, each shared by `k_warps` warps (powers of
    two) that split its columns; `ahead` chunks are read before they are needed; `registers` is a limit per thread
    (0: none) that leaves room on a multiprocessor for more programs, also for those of the next kernel;
    `early`: see q_dot.py.

    `k_warps` fixes the order in which a row is summed, so it may follow from the weight alone, never from the batch.
    """

    tiles: int
    k_warps: int
    ahead: int
    registers: int = 0
    early: bool = False

    @property
    def warps(self) -> int:
        return self.tiles * self.k_warps


@dataclass(frozen=True)
class FusedGeometry:
    """A program of the fused matmul: 8 * `token_tiles` rows by `n_warps` * `tiles` tiles of 16 weight rows, `tiles` a
    warp, each shared by `k_warps` warps; `splits` programs share the columns. All are powers of two but `splits`.
    `ahead`: a chunk of weights is read ahead of the one that is multiplied.

    `k_warps` and `splits` fix the order in which a row is summed.
    """

    token_tiles: int
    tiles: int
    n_warps: int
    k_warps: int
    splits: int = 1
    ahead: bool = True
    registers: int = 0


@dataclass(frozen=True)
class WgmmaGeometry:
    """A program of the fused matmul on Hopper: `warps` (a multiple of 4) tiles of 16 weight rows; `splits` programs
    share the columns, which fixes the order in which a row is summed. `stages` sets of `columns` columns (128 or 256,
    no more than a chunk) of the rows are in shared memory; `overlap`: the matrix units work on 128 columns while the
    next ones are dequantized. `registers` is a limit per thread (0: none)."""

    warps: int
    splits: int = 1
    stages: int = 4
    overlap: bool = True
    registers: int = 0
    columns: int = 128


@cache
def _table() -> dict[str, Any]:
    return dict(json.loads(_TABLE.read_text()))


@cache
def device_name() -> str:
    """The key of this machine's GPU in the table, "" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def matvec_key(parts: Sequence[PackedPart], kind: str) -> str:
    """Formats, rows and columns of the parts of one launch, e.g. "rows Q4_K 5120 + Q6_K 1024 x 4096"."""
    rows = " + ".join(f"{part.layout.format} {part.rows}" for part in parts)
    return f"{kind} {rows} x {parts[0].cols}"


def matvec_geometry(parts: Sequence[PackedPart], kind: str) -> Geometry:
    """Geometry for a launch of `kind` "rows", "norm" (one tile or an even number) or "swiglu" on the current device."""
    entry = _table().get(device_name(), {}).get("matvec", {}).get(matvec_key(parts, kind))
    return Geometry(*entry) if entry else default_geometry(parts[0], kind)


def fused_limit() -> int:
    """Up to how many rows the fused matmul is faster than dequantizing for cuBLAS, on the current device."""
    return int(_table().get(device_name(), {}).get("fused_limit", 64))


def fused_geometry(part: PackedPart, kind: str, rows: int, fixed: bool = False) -> FusedGeometry:
    """Geometry of the fused matmul for `rows` rows; kind "rows" or "swiglu".

    `fixed`: one whose share of the columns, and so the order of a row's sums, follows from the weight alone.
    """
    token_tiles = 1
    while token_tiles < 8 and 8 * token_tiles < rows:
        token_tiles *= 2
    if fixed:
        return default_fused(part, token_tiles)
    key = f"{kind} {part.layout.format} {part.rows} x {part.cols} by {8 * token_tiles}"
    entry = _table().get(device_name(), {}).get("fused", {}).get(key)
    return FusedGeometry(*entry) if entry else default_fused(part, token_tiles)


def wgmma_block(rows: int) -> int:
    """How many rows the matrix instruction takes at a time: a power of two from 8 to 128."""
    block = 8
    while block < min(rows, 128):
        block *= 2
    return block


def wgmma_geometry(part: PackedPart, kind: str, rows: int) -> WgmmaGeometry:
    """Geometry of the fused matmul on Hopper, `splits` the same for every number of rows; kind "rows" or "swiglu"."""
    key = f"{kind} {part.layout.format} {part.rows} x {part.cols}"
    entry = _table().get(device_name(), {}).get("wgmma", {}).get(key)
    if entry is None:
        return default_wgmma(part, rows)
    if rows > 128:
        return _many_rows(part, rows, entry["splits"])
    warps, *rest = entry[str(wgmma_block(rows))]
    return WgmmaGeometry(warps, entry["splits"], *rest)


def default_wgmma(part: PackedPart, rows: int) -> WgmmaGeometry:
    """About three programs of 4 warps on each of 132 multiprocessors, with two chunks each or more."""
    splits = max(1, min(part.chunks // 2, 396 // -(-part.tiles // 4)))
    if rows > 128:
        return _many_rows(part, rows, splits)
    if rows <= 16:
        return WgmmaGeometry(4, splits, 2, True, 0, 256)
    return WgmmaGeometry(4, splits, 3, rows > 64, 128 if rows <= 64 else 0)


def _many_rows(part: PackedPart, rows: int, splits: int) -> WgmmaGeometry:
    """For several blocks of 128 rows: 8 warps read them half as often from the L2 cache, where programs are enough."""
    programs = -(-part.tiles // 8) * -(-rows // 128)
    return WgmmaGeometry(8 if programs >= 128 else 4, splits, 3, True)


def default_fused(part: PackedPart, token_tiles: int) -> FusedGeometry:
    """Programs of up to 8 warps whose warps share the columns of a few tiles."""
    tiles = 2 if part.tiles >= 512 else 1
    k_warps = 1
    while k_warps < 8 and part.chunks > 2 * k_warps:
        k_warps *= 2
    return FusedGeometry(token_tiles, tiles, 1, k_warps)


def default_geometry(part: PackedPart, kind: str) -> Geometry:
    """Small programs, of 4 warps or fewer; K split so that a warp has about 4 chunks, more where rows are many."""
    rounds = 4 if part.tiles < 1024 else 8
    k_warps = 1
    while k_warps < 32 and part.chunks > (rounds if k_warps < 8 else _MOST_ROUNDS) * k_warps:
        k_warps *= 2
    if kind == "norm":
        while k_warps < 4 and k_warps < part.chunks:
            k_warps *= 2
        return Geometry(2, min(k_warps, 16), 1)
    return Geometry(4 // k_warps if kind == "rows" and k_warps < 4 else 1, k_warps, 2)
