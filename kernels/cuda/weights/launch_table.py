"""Launch geometry of the matmul kernels by (device, format, shape): measured, stored in launch_table.json.

benchmarks/cuda/ writes it: matvec_types.py, tune_matvec_chain.py and tune_matmul.py. Shapes and GPUs without an entry
get a default that works everywhere and is not far off; nothing is tuned at run time.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from quengine.kernels.cuda.launch.gpu import current_gpu
from quengine.kernels.cuda.weights.geometry import FusedGeometry, Geometry, Shape, WgmmaGeometry
from quengine.kernels.cuda.weights.layout import Book, PackedLayout
from quengine.kernels.cuda.weights.many_rows import MULTIPROCESSORS, many_rows_geometry
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.moe.grouping import default_block

_TABLE = Path(__file__).with_name("launch_table.json")
_MOST_ROUNDS = 16
_MANY_TILES = 1024

_REGISTERS = 65536
"""Registers of a multiprocessor."""

_SHARED_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10
"""Shared memory of a multiprocessor, and what each program reserves of it besides its own."""

_LIMITS, _LONG_LIMITS = (80, 72, 64), (128, 80)
"""Limits on registers per thread for the matvecs; and for long columns, which 64 registers make slower."""

MOST_FEW = 128
"""The most rows of x that the wgmma matmul leaves in one block, so that a program takes all of them."""


@cache
def _table() -> dict[str, Any]:
    return dict(json.loads(_TABLE.read_text()))


def table_key() -> str:
    """The key of the GPU in the table, "" without one."""
    gpu = current_gpu()
    return "" if gpu is None else gpu.name


def matvec_key(parts: Sequence[PackedPart], kind: str) -> str:
    """Formats, rows and columns of the parts of one launch, e.g. "rows Q4_K 5120 + Q6_K 1024 x 4096"."""
    rows = " + ".join(f"{part.layout.format} {part.rows}" for part in parts)
    return f"{kind} {rows} x {parts[0].cols}"


def matvec_geometry(parts: Sequence[PackedPart], kind: str) -> Geometry:
    """Geometry for a launch of `kind` "rows", "norm" (one tile or an even number) or "swiglu" on the current device."""
    entry = _table().get(table_key(), {}).get("matvec", {}).get(matvec_key(parts, kind))
    return Geometry(*entry) if entry else default_geometry(parts[0], kind)


def experts_key(part: PackedPart, kind: str, tiles: int, used: int) -> str:
    """Format, rows per expert, columns and experts per row, e.g. "add Q6_K 2048 x 768 of 8"."""
    return f"{kind} {part.layout.format} {16 * tiles} x {part.cols} of {used}"


def experts_glu_geometry(part: PackedPart, tiles: int, used: int) -> Geometry:
    """Geometry for `used` experts of `tiles` tiles each, on one row; a program's tiles belong to one expert."""
    entry = _table().get(table_key(), {}).get("experts", {}).get(experts_key(part, "glu", tiles, used))
    return Geometry(*entry) if entry else _one_tile(part, 4, (72,))


def experts_add_geometry(part: PackedPart, tiles: int, used: int) -> tuple[Geometry, int]:
    """Geometry for the sum of `used` experts of `tiles` tiles each, on one row, with one tile or an even number of them
    per program; and the number of experts, a power of two, that a program's warps take at a time. Each tile has that
    many times `k_warps` warps.
    """
    entry = _table().get(table_key(), {}).get("experts", {}).get(experts_key(part, "add", tiles, used))
    return (Geometry(*entry[1:]), entry[0]) if entry else _default_experts_add(part, tiles, used)


def fused_limit(wgmma: bool) -> int:
    """The most rows for which the fused matmul beats dequantizing for cuBLAS on the current device. With `wgmma`, the
    limit of the wgmma matmul, which was faster at every number of rows that was measured.
    """
    return _fused_limit(table_key(), wgmma)


@cache
def _fused_limit(device: str, wgmma: bool) -> int:
    name, default = ("wgmma_limit", 4096) if wgmma else ("fused_limit", 64)
    return int(_table().get(device, {}).get(name, default))


def fused_geometry(part: PackedPart, kind: str, rows: int, batch_invariant: bool = False) -> FusedGeometry:
    """Geometry of the fused matmul for `rows` rows; kind "rows" or "swiglu".

    `batch_invariant`: column splits, and so the order of a row's sums, follow from the weight alone.
    """
    token_tiles = 1
    while token_tiles < 8 and 8 * token_tiles < rows:
        token_tiles *= 2
    if batch_invariant:
        return default_fused(part, token_tiles)
    key = f"{kind} {part.layout.format} {part.rows} x {part.cols} by {8 * token_tiles}"
    entry = _table().get(table_key(), {}).get("fused", {}).get(key)
    return FusedGeometry(*entry) if entry else default_fused(part, token_tiles)


def grouped_block(pairs: int, experts: int) -> int:
    """Rows per block of the grouped matmuls on packed weights, for `pairs` pairs of a row and an expert."""
    return _grouped_block(table_key(), -(-pairs // experts)) or default_block(pairs, experts)


@lru_cache(1024)
def _grouped_block(device: str, mean: int) -> int:
    """The block size for `mean` pairs per expert, by the table's `grouped_blocks`; 0 if the table has none."""
    for most, block in _table().get(device, {}).get("grouped_blocks", ()):
        if mean <= most:
            return int(block)
    return 0


def grouped_fused_geometry(part: PackedPart, expert_tiles: int, block: int) -> FusedGeometry:
    """Geometry of the grouped matmul on m16n8k16 for blocks of 8 to 64 rows; `k_warps`, and so the order of a
    row's sums, follow from the weight alone.
    """
    return replace(default_fused(replace(part, rows=16 * expert_tiles), block // 8), ahead=block < 64)


def grouped_wgmma_geometry(part: PackedPart, cols: int, block: int, exact: bool) -> WgmmaGeometry:
    """Geometry of the grouped wgmma matmul for blocks of 8 to 256 rows of `cols` columns. Columns are not
    split: experts and blocks make enough programs. exact: see WgmmaFlags.
    """
    entry = _table().get(table_key(), {}).get("grouped_wgmma", {}).get(str(block))
    if entry:
        geometry = WgmmaGeometry(*entry, block=block)
        return geometry if cols > geometry.columns else replace(geometry, ring=0)
    if block > 32:
        return WgmmaGeometry(8 if block > 128 else 4, 1, 3, True, 0, 128, block=block)
    return _grouped_few(part.layout, cols, block, exact)


@lru_cache(1024)
def _grouped_few(layout: PackedLayout, cols: int, block: int, exact: bool) -> WgmmaGeometry:
    """Geometry for blocks of few rows: with a ring buffer for the weights if that pays.

    Blocks of 8 rows use a ring buffer if a multiprocessor has room for four programs, each with a ring and two sets of
    rows. If it has room for five, a register limit lets five run, except for 4-bit signed codes, which would spill, and
    for `exact`. With more rows a ring takes longer. MXFP4 does not gain from one, as it is bound by instructions; its
    blocks of 8 rows gain from warps that wait for no others.
    """
    few = WgmmaGeometry(4, 1, 2, False, 128, 256, block=block)
    if layout.format == "MXFP4":
        return replace(few, registers=80 if block == 8 else 0, per_warp=block == 8)
    ring = 3
    slot = few.warps * layout.chunk_bytes * few.columns // layout.chunk
    programs = _SHARED_BYTES // (_RESERVED_BYTES + few.stages * 2 * few.columns * block + ring * slot)
    if block > 8 or programs < 4 or cols <= few.columns:
        return few
    five = programs >= 5 and not exact and not (layout.bits == 4 and layout.offset)
    return replace(few, ring=ring, registers=96 if five else 128)


def wgmma_block(rows: int) -> int:
    """Rows that the matrix instruction takes at a time: a power of two from 8 to 128."""
    block = 8
    while block < min(rows, 128):
        block *= 2
    return block


def wgmma_geometry(
    part: PackedPart,
    kind: str,
    rows: int,
    batch_invariant: bool = False,
    consumer: bool = False,
    beside: int = 0,
    apart: bool = False,
) -> WgmmaGeometry:
    """Geometry of the wgmma matmul; kind "rows" or "swiglu". `splits` is the same for every number of rows up
    to 64, and, with `batch_invariant`, for all. `consumer`: see `launch_wgmma`. beside: weight rows of
    another part in the same launch. apart: see `many_rows_geometry`.
    """
    shape = Shape(part.layout.format, part.rows, part.cols, part.chunks)
    return _wgmma_geometry(table_key(), shape, kind, rows, batch_invariant, consumer, beside, apart)


def wgmma_entry(device: str, key: str) -> dict[str, Any] | None:
    """The table's entry for "kind format rows x columns" on a device: `splits`, and for each number of rows
    the rest of a WgmmaGeometry.
    """
    entry: dict[str, Any] | None = _table().get(device, {}).get("wgmma", {}).get(key)
    return entry


@lru_cache(1024)
def _wgmma_geometry(
    device: str,
    shape: Shape,
    kind: str,
    rows: int,
    batch_invariant: bool,
    consumer: bool,
    beside: int,
    apart: bool,
) -> WgmmaGeometry:
    key = f"{kind} {shape.format} {shape.rows} x {shape.cols}"
    entry, block = wgmma_entry(device, key), wgmma_block(rows)
    splits = _splits(shape, 4) if entry is None else entry["splits"]
    if rows > MOST_FEW:
        return many_rows_geometry(shape, rows, splits if batch_invariant else 0, consumer, apart)
    if block == MOST_FEW and not batch_invariant:
        splits = _splits(shape._replace(rows=shape.rows + beside), 2)
    if entry is None:
        return _default_wgmma(splits, block)
    warps, *rest = entry[str(block)]
    return WgmmaGeometry(warps, splits, *rest)


def _default_wgmma(splits: int, block: int) -> WgmmaGeometry:
    """Programs of 4 warps for blocks of up to `MOST_FEW` rows."""
    if block <= 16:
        return WgmmaGeometry(4, splits, 2, False, 128, 256)
    return WgmmaGeometry(4, splits, 2 if block == 64 else 3, block > 64, 128 if block <= 64 else 0)


def _splits(shape: Shape, programs: int) -> int:
    """The number of splits, of two chunks or more each, that makes `programs` programs of 4 warps per multiprocessor,
    or slightly fewer. A multiprocessor runs four programs at a time with up to 64 rows, and two with 128; a second wave
    takes as long as the first.
    """
    return max(1, min(shape.chunks // 2, programs * MULTIPROCESSORS // -(-shape.tiles // 4)))


def default_fused(part: PackedPart, token_tiles: int) -> FusedGeometry:
    """Programs of up to 8 warps, which share the columns of a few tiles."""
    tiles = 2 if part.tiles >= 512 else 1
    k_warps = 1
    while k_warps < 8 and part.chunks > 2 * k_warps:
        k_warps *= 2
    return FusedGeometry(token_tiles, tiles, 1, k_warps)


def default_geometry(part: PackedPart, kind: str) -> Geometry:
    """One tile per program, with up to 8 warps of a chunk or two each; long columns, which take a loop, may
    use more registers. Gate and up use 4 warps or fewer with more chunks each: 2 if codes take long to
    unpack, so that programs form one wave. Weights of many rows whose chunks are not a multiple of 8 also use fewer
    warps with more chunks each.
    """
    if kind == "swiglu":
        return _one_tile(part, 2 if part.layout.table or part.layout.bits < 4 else 4)
    if kind == "norm" or part.tiles < _MANY_TILES or part.chunks % 8 == 0:
        return _one_tile(part, 8, _LONG_LIMITS if part.chunks > 32 else _LIMITS)
    k_warps = 1
    while k_warps < 32 and part.chunks > (8 if k_warps < 8 else _MOST_ROUNDS) * k_warps:
        k_warps *= 2
    return Geometry(max(1, 4 // k_warps), k_warps, 2)


def _one_tile(part: PackedPart, most_warps: int, limits: Sequence[int] = _LIMITS) -> Geometry:
    """One tile per program, by up to `most_warps` warps of a chunk or more each (or more warps, if each had over
    `_MOST_ROUNDS` chunks), with the largest register limit that gives the fewest waves. Warps that check bounds over a
    few chunks need more registers, so they have no limit.
    """
    long = limits is _LONG_LIMITS
    if part.layout.book == Book.IQ3:  # two entries a row and step: below 80 registers these spill
        limits = tuple(max(limit, 80) for limit in limits)
    k_warps = 1
    while k_warps < most_warps and 2 * k_warps <= part.chunks:
        k_warps *= 2
    while k_warps < 32 and part.chunks > _MOST_ROUNDS * k_warps:
        k_warps *= 2
    if not long and (part.chunks % k_warps or part.layout.chunk != 256):
        return Geometry(1, k_warps, 1, 0, True)

    def waves(registers: int) -> int:
        resident = MULTIPROCESSORS * max(1, _REGISTERS // (32 * k_warps * registers))
        return -(-part.tiles // resident)

    return Geometry(1, k_warps, 1, min(limits, key=waves) if k_warps < 32 else 64, True)


def _default_experts_add(part: PackedPart, tiles: int, used: int) -> tuple[Geometry, int]:
    """Up to 16 warps per program, experts first, then columns. A warp with few chunks loads them all at once;
    with many, two programs share a multiprocessor. 9 to 15 experts are taken at once, in 16 slots:
    some warps then have nothing to do, but in two turns all warps would wait for memory twice.
    """
    in_program = 1 if tiles <= 2 * MULTIPROCESSORS else 2
    slots = 16 if in_program == 1 and 8 < used < 16 else 1
    while slots < 8 and 2 * slots <= used:
        slots *= 2
    k_warps = 1
    while in_program * slots * k_warps < 16 and part.chunks > 3 * k_warps:
        k_warps *= 2
    if part.chunks > 3 * k_warps:
        return Geometry(in_program, k_warps, 1, 64, True), slots
    return Geometry(in_program, k_warps, 3), slots
