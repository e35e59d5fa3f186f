"""Vector code of decode's products of a few activation rows on AMX tiles (gemv/amx_rows.py, where the layouts are).

Two tiles sum a group's products exactly: one for the high bytes of activations, one for the low bytes. Their rows are
activation rows, their columns ROWS weight rows. The fp32 arithmetic that follows is that of row_dot_ir.py, in the same
order, with weight rows in lanes instead of groups, so the bits are the same.
"""

from __future__ import annotations

from llvmlite import ir

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.cpu.gemm.amx import TILE_BYTES
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.gemv.amx_rows import MINS_AT, MOST_ROWS, ROWS, SCALES_AT
from quengine.kernels.cpu.gemv.quantized_rows import SCALES, SUMS
from quengine.kernels.cpu.ir import amx_ir
from quengine.kernels.cpu.ir.row_ir import record_field
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, Emitter, vec
from quengine.kernels.cpu.ir.vnni_panel_ir import row_addresses, super_block_bytes

_LANES = vec(F32, ROWS)
_LINE = 64  # bytes of fp32 of ROWS weight rows


@vector_code
def configure_groups(e: Emitter, format_name: str, memory: ir.Value, rows: ir.Value) -> None:
    """Configures this thread's tiles: 0 to 3, of sums, and 4 and 5, of a group's activations, have `rows` rows; 6 and
    7 are a group of weights.

    memory: the address of 64 bytes of scratch.
    """
    group = FORMATS[format_name].group
    lanes, of_rows = vec(I8, 16), [1] * 6 + [0] * 10
    fixed = e.const(lanes, [0] * 6 + [group // 4] * 2 + [0] * 8)
    counts = e.b.mul(e.splat(e.b.trunc(rows, I8), 16), e.const(lanes, of_rows))
    widths = e.const(vec(I16, 16), [64] * 4 + [group] * 2 + [64] * 2 + [0] * 8)
    amx_ir.configure(e, memory, e.b.add(counts, fixed), widths)


@vector_code
def fill_group_tiles(
    e: Emitter, format_name: str, w: ir.Value, row_bytes: ir.Value, last: ir.Value, panel: ir.Value
) -> None:
    """Unpacks a super-block of weight rows 0 .. ROWS - 1 into a panel; rows after `last` repeat it.

    w: the address of the super-block in row 0.
    """
    fmt, b = FORMATS[format_name], e.b
    scales, lines = super_block_bytes(e, fmt, row_addresses(e, w, row_bytes, e.i64(0), last))
    for column, line in lines:
        e.store(line, panel, column // 4 * _LINE)
    for g, sc in enumerate(scales.sc):
        e.store(b.fmul(e.to_float(sc), scales.d), panel, SCALES_AT + _LINE * g)
    for g, mn in enumerate(scales.mn):
        e.store(b.fneg(b.fmul(e.to_float(mn), scales.dmin)), panel, MINS_AT + _LINE * g)


@vector_code
def add_groups(
    e: Emitter,
    format_name: str,
    records: ir.Value,
    stride: ir.Value,
    cols: ir.Value,
    column: ir.Value,
    rows: ir.Value,
    panel: ir.Value,
    sums: ir.Value,
    lanes: ir.Value,
) -> None:
    """lanes fp32 [groups, MOST_ROWS, ROWS] += the products of a panel with DEPTH columns of `rows` activation rows.

    records: the address of the rows' quantized activations, `stride` bytes apart, of `cols` columns; column: the first
    one. sums: scratch of four tiles. A group's products are scaled while the next one's are computed.
    """
    fmt = FORMATS[format_name]
    groups = DEPTH // fmt.group
    for g in range(groups + 1):
        if g < groups:
            _multiply_group(e, fmt, g, e.at(records, column), stride, cols, panel, sums)
        if g:
            _scale_group(e, fmt, g - 1, (records, stride, cols, column, rows), panel, sums, lanes)


def _multiply_group(
    e: Emitter,
    fmt: BlockFormat,
    g: int,
    activations: ir.Value,
    stride: ir.Value,
    cols: ir.Value,
    panel: ir.Value,
    sums: ir.Value,
) -> None:
    """Group g's two tiles of sums. Neighbours use other tiles and other sums."""
    weights, high = 6 + g % 2, 2 * (g % 2)
    amx_ir.load_tile(e, weights, e.at(panel, fmt.group // 4 * _LINE * g))
    for part in range(2):
        amx_ir.clear_tile(e, high + part)
        plane = e.at(activations, cols) if part else activations
        amx_ir.load_tile(e, 4 + part, e.at(plane, fmt.group * g), stride)
        amx_ir.tile_instruction(e, "tdpbssd", high + part, 4 + part, weights)
        amx_ir.store_tile(e, high + part, e.at(sums, TILE_BYTES * (high + part)))


def _scale_group(
    e: Emitter,
    fmt: BlockFormat,
    g: int,
    of_rows: tuple[ir.Value, ...],
    panel: ir.Value,
    sums: ir.Value,
    lanes: ir.Value,
) -> None:
    """Adds group g's sums, scaled, to its lanes of each activation row, and subtracts the minimums."""
    (records, stride, cols, column, rows), b = of_rows, e.b
    scale = e.load(_LANES, panel, SCALES_AT + _LINE * g)
    minus = e.load(_LANES, panel, MINS_AT + _LINE * g) if fmt.has_min else None
    first_slice = b.udiv(column, e.i64(32))
    scales = e.at(record_field(e, records, cols, SCALES), b.mul(first_slice, e.i64(4)))
    by_group = e.at(record_field(e, records, cols, SUMS[fmt.group]), b.udiv(column, e.i64(fmt.group // 4)))

    def row(i: ir.Value) -> None:
        apart, line = b.mul(i, stride), e.at(sums, b.mul(i, e.i64(_LINE)))
        high, low = (e.load(vec(I32, ROWS), line, TILE_BYTES * (2 * (g % 2) + part)) for part in range(2))
        total = e.to_float(b.add(e.shift_left(high, 8), low))
        t = e.splat(e.load(F32, e.at(scales, apart), 4 * (g * fmt.group // 32)), ROWS)
        place = e.at(e.at(lanes, _LINE * MOST_ROWS * g), b.mul(i, e.i64(_LINE)))
        head = e.fma(total, b.fmul(scale, t), e.load(_LANES, place))
        if minus is not None:
            head = e.fma(minus, e.splat(e.load(F32, e.at(by_group, apart), 4 * g), ROWS), head)
        e.store(head, place)

    e.each(e.i64(0), rows, 1, row)


@vector_code
def total_lanes(e: Emitter, format_name: str, lanes: ir.Value, out: ir.Value) -> None:
    """The sums of an activation row's lanes, added by halves: fp32 [ROWS] to address out."""
    groups = DEPTH // FORMATS[format_name].group
    parts = [e.load(_LANES, lanes, _LINE * MOST_ROWS * g) for g in range(groups)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [e.b.fadd(low, high) for low, high in zip(parts[:half], parts[half:], strict=True)]
    e.store(parts[0], out)
