"""Vector code that unpacks weight rows into a panel: codes and scales per row, then transposed.

Codes are transposed as bytes and widened afterwards, which moves a quarter of the data of transposing fp32; a vector
of the panel is then scaled by a vector of its rows' scales.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.ir.block_ir import emit_blocks
from quengine.kernels.cpu.ir.tile_ir import transposed
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I32, Emitter, vec
from quengine.kernels.cpu.runtime.target import host_tile

GROUPS = 16  # groups per DEPTH columns, at most: fp32 scales of a row, and as many minimums


@vector_code
def unpack_row(
    e: Emitter,
    format_name: str,
    w: ir.Value,
    blocks: ir.Value,
    codes: ir.Value,
    scales: ir.Value,
    mins: ir.Value,
) -> None:
    """Unpacks a row of `blocks` quantized blocks at address w: int8 codes, one fp32 scale and one minimum per group.

    `mins` is not written for formats without minimums. The row has at most DEPTH columns.
    """
    fmt = FORMATS[format_name]

    def turn(i: ir.Value) -> None:
        content = emit_blocks(e, fmt, e.at(w, e.b.mul(i, e.i64(fmt.nbytes))), 1)
        target = e.at(codes, e.b.mul(i, e.i64(fmt.block)))
        for j in range(fmt.block // 32):
            e.store(content.ints(e, j, 1), target, 32 * j)
        groups = fmt.block // fmt.group
        first = e.b.mul(i, e.i64(4 * groups))
        for out, vectors in ((scales, content.scales), (mins, content.mins or ())):
            for k, vector in enumerate(vectors):
                lanes = min(vector.type.count, groups - 8 * k)
                if lanes > 0:
                    e.store(e.pick(vector, range(lanes)), e.at(out, first), 32 * k)

    e.each(e.i64(0), blocks, 1, turn)


@vector_code
def fill_panel(
    e: Emitter,
    format_name: str,
    codes: ir.Value,
    depth: ir.Value,
    scales: ir.Value,
    mins: ir.Value,
    out: ir.Value,
) -> None:
    """scale * code - min of `Tile.lanes` rows, transposed: out[k, lane], lines `Tile.columns` apart.

    codes: [lanes, DEPTH] int8; scales, mins: [groups, lanes] fp32. depth: a multiple of 32.
    """
    fmt = FORMATS[format_name]
    tile = host_tile()

    def slice_(k: ir.Value) -> None:
        target = e.at(out, e.b.mul(k, e.i64(4 * tile.columns)))
        for column, value in enumerate(_values(e, fmt, codes, scales, mins, k, tile.lanes)):
            e.store(value, target, 4 * tile.columns * column)

    e.each(e.i64(0), depth, 32, slice_)


def _values(
    e: Emitter, fmt: BlockFormat, codes: ir.Value, scales: ir.Value, mins: ir.Value, k: ir.Value, lanes: int
) -> Iterator[ir.Value]:
    """The weights of columns k .. k + 31, each a vector over the rows."""
    rows = [e.load(vec(I8, 32), e.at(codes, k), DEPTH * i) for i in range(lanes)]
    group = e.b.mul(e.b.udiv(k, e.i64(fmt.group)), e.i64(4 * lanes))
    factors = [
        [_group_vector(e, fmt, base, group, half, lanes) for base in (scales, mins)] for half in (0, 1)
    ]
    for column, ints in enumerate(_columns(e, rows)):
        scale, added = factors[column // 16]
        value = e.b.fmul(e.to_float(e.widen(ints, I32, True)), scale)
        yield e.b.fsub(value, added) if fmt.has_min else value


def _group_vector(
    e: Emitter, fmt: BlockFormat, base: ir.Value, group: ir.Value, half: int, lanes: int
) -> ir.Value:
    """The rows' scales, or minimums, of the first or the second half of a slice."""
    return e.load(vec(F32, lanes), e.at(base, group), 4 * lanes * half * (fmt.group == 16))


def _columns(e: Emitter, rows: list[ir.Value]) -> list[ir.Value]:
    """The 32 columns of a power-of-two number of rows of 32 bytes.

    Row i is interleaved with row i + count / 2, within 16 bytes as unpack instructions do, until those bytes hold
    whole columns.
    """
    count = len(rows)
    low = [lane for base in (0, 16) for i in range(8) for lane in (base + i, 32 + base + i)]
    for _ in range(count.bit_length() - 1):
        pairs = zip(rows[: count // 2], rows[count // 2 :], strict=True)
        rows = [e.pick(a, [lane + up for lane in low], b) for a, b in pairs for up in (0, 8)]
    each = 16 // count  # columns in 16 bytes
    return [
        e.pick(rows[k // each], range(start := 16 * h + k % each * count, start + count))
        for h in (0, 1)
        for k in range(16)
    ]


@vector_code
def transpose_groups(e: Emitter, rows: ir.Value, out: ir.Value) -> None:
    """Transposes fp32 [Tile.lanes, GROUPS] at address rows to [GROUPS, Tile.lanes] at address out."""
    lanes = host_tile().lanes
    for k in range(0, GROUPS, lanes):
        lines = [e.load(vec(F32, lanes), rows, 4 * (GROUPS * i + k)) for i in range(lanes)]
        for i, line in enumerate(transposed(e, lines)):
            e.store(line, out, 4 * lanes * (k + i))
