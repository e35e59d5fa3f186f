"""Vector code of prefill matmul on AMX (amx.py).

Operands are tiles of 1024 bytes, 16 rows of 64, made of bf16 pairs: column i of the first half of STEP columns with
column i + STEP / 2.

    weights        a tile is 16 weight rows, STEP columns; a panel of 32 weight rows is
                   [2 halves, DEPTH / STEP, 2 terms] tiles
    activations    a tile is STEP / 2 column pairs of 16 rows of x; a block of 32 rows is
                   [DEPTH / STEP, 2 halves, 2 terms] tiles
    sums           a tile is fp32 [16 weight rows, 16 rows of x]; a block is [2 weight halves, 2 halves of x] tiles
"""

from __future__ import annotations

from llvmlite import ir

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm.amx import HALF_BYTES, ONE_TERM, STEP, TILE_BYTES
from quengine.kernels.cpu.ir.tile_ir import transposed
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, Emitter, vec

_UPPER = 0xFFFF0000
_LANE = vec(F32, STEP // 2)
_LANE_BYTES = 2 * STEP


@vector_code
def split_row(e: Emitter, row: ir.Value, depth: ir.Value, tiles: ir.Value) -> None:
    """Splits `depth` fp32 weights, a multiple of STEP, into a row of tiles; `tiles`: the row's address in the first."""

    def step(k: ir.Value) -> None:
        source = e.at(row, e.b.mul(k, e.i64(4)))
        first, second = (e.load(_LANE, source, _LANE_BYTES * i) for i in range(2))
        _store_pairs(e, first, second, tiles, k)

    e.each(e.i64(0), depth, STEP, step)


@vector_code
def scale_and_split_row(
    e: Emitter,
    format_name: str,
    codes: ir.Value,
    depth: ir.Value,
    scales: ir.Value,
    mins: ir.Value,
    tiles: ir.Value,
) -> None:
    """`split_row` of scale * code - min. codes: int8; scales, mins: fp32, one per group."""
    fmt, terms = FORMATS[format_name], 1 if format_name in ONE_TERM else 2

    def step(k: ir.Value) -> None:
        group = e.b.mul(e.b.udiv(k, e.i64(fmt.group)), e.i64(4))
        values = []
        for half in range(2):
            offset = 4 * half * (fmt.group == STEP // 2)
            scale, added = (
                e.splat(e.load(F32, e.at(base, group), offset), STEP // 2) for base in (scales, mins)
            )
            ints = e.load(vec(I8, STEP // 2), e.at(codes, k), STEP // 2 * half)
            value = e.b.fmul(e.to_float(e.widen(ints, I32, True)), scale)
            values.append(e.b.fsub(value, added) if fmt.has_min else value)
        _store_pairs(e, values[0], values[1], tiles, k, terms)

    e.each(e.i64(0), depth, STEP, step)


def _store_pairs(
    e: Emitter, first: ir.Value, second: ir.Value, tiles: ir.Value, k: ir.Value, terms: int = 2
) -> None:
    """Stores STEP columns from k on, given as two halves, as a row of the first-term and of the second-term tile."""
    target = e.at(tiles, e.b.mul(k, e.i64(2 * TILE_BYTES // STEP)))
    for term, pairs in enumerate(_pairs(e, first, second)[:terms]):
        e.store(pairs, target, TILE_BYTES * term)


def _pairs(e: Emitter, first: ir.Value, second: ir.Value) -> list[ir.Value]:
    """fp32 lanes as bf16 pairs: the first terms, the second terms."""
    return [
        e.b.or_(e.shift_left(a, -16), e.and_(b, _UPPER))
        for a, b in zip(_split(e, first), _split(e, second), strict=True)
    ]


def _split(e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The bits of fp32 lanes, and of the remainder below their upper halves; the upper halves of both are the terms."""
    bits = e.b.bitcast(x, vec(I32, x.type.count))
    rest = e.b.fsub(x, e.b.bitcast(e.and_(bits, _UPPER), x.type))
    return bits, e.b.bitcast(rest, bits.type)


@vector_code
def pack_tile(e: Emitter, x: ir.Value, stride: ir.Value, tiles: ir.Value) -> None:
    """STEP columns of 16 fp32 rows of x, `stride` bytes apart, as a first-term and a second-term tile."""
    rows = [e.at(x, e.b.mul(stride, e.i64(i))) for i in range(16)]
    pairs = [_pairs(e, *(e.load(_LANE, row, _LANE_BYTES * i) for i in range(2))) for row in rows]
    for term, lines in enumerate(zip(*pairs, strict=True)):
        for i, line in enumerate(transposed(e, list(lines))):
            e.store(line, tiles, TILE_BYTES * term + 64 * i)


@vector_code
def pair_rows(e: Emitter, x: ir.Value, stride: ir.Value, tiles: ir.Value) -> None:
    """16 columns of STEP fp32 rows of x, `stride` bytes apart, which are summed over: a tile of each term.

    A tile's row is row i of x paired with row i + STEP / 2, as columns are by `pack_tile`.
    """
    rows = [e.load(vec(F32, 16), e.at(x, e.b.mul(stride, e.i64(i)))) for i in range(STEP)]
    for i, (first, second) in enumerate(zip(rows[: STEP // 2], rows[STEP // 2 :], strict=True)):
        for term, pairs in enumerate(_pairs(e, first, second)):
            e.store(pairs, tiles, TILE_BYTES * term + 64 * i)


@vector_code
def finish_tile(
    e: Emitter, sums: ir.Value, addend: ir.Value, addend_stride: ir.Value, y: ir.Value, y_stride: ir.Value
) -> None:
    """y[i, j] = the sum of weight row j and row i of x, plus addend[i, j]. Strides are bytes between rows."""
    for i, line in enumerate(transposed(e, [e.load(vec(F32, 16), sums, 64 * i) for i in range(16)])):
        added = e.load(line.type, e.at(addend, e.b.mul(addend_stride, e.i64(i))))
        e.store(e.b.fadd(line, added), e.at(y, e.b.mul(y_stride, e.i64(i))))


@vector_code
def configure_tiles(e: Emitter, memory: ir.Value) -> None:
    """Configures eight tiles of 16 rows of 64 bytes for this thread. memory: the address of 64 bytes of scratch."""
    configure(e, memory, e.const(vec(I8, 16), [16] * 8 + [0] * 8))


def configure(e: Emitter, memory: ir.Value, rows: ir.Value, widths: ir.Value | None = None) -> None:
    """Configures eight tiles. rows: int8 [16], of each tile, then zeros; widths: the same of bytes a row, int16, 64 if
    not given."""
    # Byte 0: palette 1; bytes 16 on: bytes per row, int16; bytes 48 on: rows, int8.
    e.store(e.const(vec(I8, 16), [1] + [0] * 15), memory)
    e.store(e.const(vec(I16, 16), [64] * 8 + [0] * 8) if widths is None else widths, memory, 16)
    e.store(rows, memory, 48)
    _call(e, "ldtilecfg", _pointer(e, memory))


@vector_code
def release_tiles(
    e: Emitter,
) -> None:
    """Releases this thread's tiles, so that a context switch need not save them."""
    _call(e, "tilerelease")


@vector_code
def multiply_amx_tiles(
    e: Emitter,
    halves: int,
    terms: int,
    weights: ir.Value,
    depth: ir.Value,
    x: ir.Value,
    sums: ir.Value,
    line: int,
    fresh: ir.Value,
) -> None:
    """sums += products over `depth` columns, a multiple of STEP above 0; where `fresh`, sums start at 0.

    weights, x, sums: addresses of the first tile of each. halves: 1 for 16 rows of x, 2 for 32. terms: of weights, 1
    where the second is 0. line: bytes between the rows of sums; 64 where these are tiles one after another.
    """

    def place(tile: int) -> ir.Value:
        return e.at(sums, TILE_BYTES * tile if line == 64 else 16 * line * (tile // 2) + 64 * (tile % 2))

    product = _Product(halves, terms)

    def operands(k: ir.Value) -> tuple[ir.Value, ir.Value]:
        steps = e.b.udiv(k, e.i64(STEP))
        first = e.at(weights, e.b.mul(steps, e.i64(2 * TILE_BYTES)))
        return first, e.at(x, e.b.mul(steps, e.i64(4 * TILE_BYTES)))

    def step(k: ir.Value) -> None:
        product.emit(e, operands(k), operands(e.at(k, STEP)))

    with e.b.if_else(e.b.icmp_signed("!=", fresh, e.i64(0))) as (then, otherwise):
        with then:
            for tile in product.sums:
                clear_tile(e, tile)
        with otherwise:
            for tile in product.sums:
                load_tile(e, tile, place(tile), line)
    product.begin(e, operands(e.i64(0)))
    last = e.at(depth, -STEP)
    e.each(e.i64(0), last, STEP, step)
    product.emit(e, operands(last), None)
    for tile in product.sums:
        store_tile(e, tile, place(tile), line)


class _Product:
    """The products of one step of STEP columns. Tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 activations.

    Products in order: second terms of weights, if any, by first terms of x, first by first, first by second. Each
    operand is loaded once, as soon as its tile is free, so that loads overlap with products.
    """

    def __init__(self, halves: int, terms: int) -> None:
        self.x, self.terms = range(halves), terms
        self.sums = [2 * a + b for a in range(2) for b in self.x]

    def begin(self, e: Emitter, at: tuple[ir.Value, ir.Value]) -> None:
        """Loads the operands that a step begins with."""
        for half in range(2):
            self._weights(e, at, half, self.terms - 1)
        for half in self.x:
            self._activations(e, at, half, 0)

    def emit(
        self, e: Emitter, at: tuple[ir.Value, ir.Value], following: tuple[ir.Value, ir.Value] | None
    ) -> None:
        """The products of a step, and the loads that the following step begins with."""
        for a in range(2 if self.terms == 2 else 0):
            for b in self.x:
                self._multiply(e, a, b)
            self._weights(e, at, a, 0)
        for b in self.x:
            for a in range(2):
                self._multiply(e, a, b)
            self._activations(e, at, b, 1)
        for a in range(2):
            for b in self.x:
                self._multiply(e, a, b)
                if a == 1 and following is not None:
                    self._activations(e, following, b, 0)
            if following is not None:
                self._weights(e, following, a, self.terms - 1)

    def _multiply(self, e: Emitter, a: int, b: int) -> None:
        tile_instruction(e, "tdpbf16ps", 2 * a + b, 4 + a, 6 + b)

    def _weights(self, e: Emitter, at: tuple[ir.Value, ir.Value], half: int, term: int) -> None:
        load_tile(e, 4 + half, e.at(at[0], HALF_BYTES * half + TILE_BYTES * term))

    def _activations(self, e: Emitter, at: tuple[ir.Value, ir.Value], half: int, term: int) -> None:
        load_tile(e, 6 + half, e.at(at[1], TILE_BYTES * (2 * half + term)))


def _tile(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def load_tile(e: Emitter, tile: int, address: ir.Value, line: int | ir.Value = 64) -> None:
    """Loads a tile whose rows are `line` bytes apart."""
    stride = e.i64(line) if isinstance(line, int) else line
    _call(e, "tileloadd64", _tile(tile), _pointer(e, address), stride)


def store_tile(e: Emitter, tile: int, address: ir.Value, line: int = 64) -> None:
    """Stores a tile with rows `line` bytes apart."""
    _call(e, "tilestored64", _tile(tile), _pointer(e, address), e.i64(line))


def clear_tile(e: Emitter, tile: int) -> None:
    """Sets a tile to zero."""
    _call(e, "tilezero", _tile(tile))


def tile_instruction(e: Emitter, name: str, *tiles: int) -> None:
    """An instruction of tiles alone: llvm.x86.`name`."""
    _call(e, name, *(_tile(tile) for tile in tiles))


def _pointer(e: Emitter, address: ir.Value) -> ir.Value:
    return e.b.inttoptr(address, I8.as_pointer())


def _call(e: Emitter, name: str, *args: ir.Value) -> None:
    """Calls LLVM's llvm.x86.* tile intrinsic, in the form that names tiles by number."""
    declared = e.b.module.globals.get(f"llvm.x86.{name}")
    if declared is None:
        signature = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
        declared = ir.Function(e.b.module, signature, f"llvm.x86.{name}")
    e.b.call(declared, list(args))
