"""Matrix tiles in portable code: what the kernels of amx_ir.py do on a processor that has none.

`main` compiles those kernels with every instruction on tiles replaced by vector code on a tile file in memory, and
compares prompts with their definition. For a process and a cache folder of its own (cpu_target.py), as the kernels
have the names of the real ones; one thread, as there is one tile file.
"""

import ctypes

import torch
from llvmlite import ir

from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.kernels.cpu import prompt_linear, set_threads
from quengine.kernels.cpu.attention import prefill_attention
from quengine.kernels.cpu.gemm import tile_matmul
from quengine.kernels.cpu.gemm.amx import TILE_BYTES, two_term_product
from quengine.kernels.cpu.gemm.amx_bytes import FACTORS, byte_product
from quengine.kernels.cpu.gemv import amx_rows
from quengine.kernels.cpu.ir import amx_ir
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I16, I32, I64, Emitter, vec
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.kv.cache_types import CacheType
from tests.kernels.cpu.cpu_runs import attend_chunk, decode_linear
from tests.kernels.cpu.test_cpu_prefill_attention import expected as definition_of_attention
from tests.kernels.cpu.test_cpu_prefill_attention import queries, random_layer
from tests.kernels.weights import nmse, random_weight

TILES = (ctypes.c_uint8 * (8 * TILE_BYTES))()
CONFIGURATION = (ctypes.c_uint8 * 64)()
CASES = [
    ("Q4_K", 77, 512, 33),
    ("Q6_K", 32, 768, 16),
    ("Q4_1", 64, 576, 530),
    ("Q8_0", 300, 96, 40),
    ("F16", 40, 300, 50),
    ("MXFP4", 70, 288, 40),
    ("BF16", 37, 300, 20),
    ("F32", 5, 31, 1),
]
BYTES = [
    ("Q4_K", 77, 512, 16),
    ("Q6_K", 32, 768, 63),
    ("Q2_K", 300, 256, 40),
    ("Q3_K", 37, 512, 530),
]
ROWS = [("Q4_K", 50, 2, 8), ("Q5_K", 16, 3, 9), ("Q3_K", 37, 1, 19)]
ATTENTION: list[tuple[CacheType, int, int, int, int, int, int | None]] = [
    ("f16", 9, 3, 64, 0, 77, None),
    ("q8_0", 6, 2, 96, 250, 70, 100),
    ("f16", 4, 4, 32, 3, 55, 7),
]


def emulate(e: Emitter, name: str, *args: ir.Value) -> None:
    """In the place of amx_ir._call."""
    if name == "tileloadd64":
        _clear(e, args[0])
        _move(e, args, True)
    elif name == "tilestored64":
        _move(e, args, False)
    elif name == "tdpbf16ps":
        _multiply(e, *(_file(arg) for arg in args))
    elif name == "tdpbssd":
        _multiply_bytes(e, *(_file(arg) for arg in args))
    elif name == "tilezero":
        _clear(e, args[0])
    elif name == "ldtilecfg":
        held = e.load(vec(I8, 64), e.b.ptrtoint(args[0], I64))
        e.store(held, e.i64(ctypes.addressof(CONFIGURATION)))
    else:
        assert name == "tilerelease"


def _clear(e: Emitter, tile: ir.Constant) -> None:
    for row in range(16):
        e.store(e.const(vec(I32, 16), 0), e.i64(_file(tile)), 64 * row)


def _move(e: Emitter, args: tuple[ir.Value, ...], into_file: bool) -> None:
    """Moves the configured rows and bytes of a tile; what else it has is 0, and adds nothing to products."""
    tile, pointer, stride = args
    number, configured = int(tile.constant), e.i64(ctypes.addressof(CONFIGURATION))
    width = e.b.zext(e.load(I16, configured, 16 + 2 * number), I64)
    rows = e.b.zext(e.load(I8, configured, 48 + number), I64)

    def row(i: ir.Value) -> None:
        outside = e.at(e.b.ptrtoint(pointer, I64), e.b.mul(stride, i))
        inside = e.at(e.i64(_file(tile)), e.b.mul(i, e.i64(64)))
        source, target = (outside, inside) if into_file else (inside, outside)
        e.each(e.i64(0), width, 16, lambda k: e.store(e.load(vec(I8, 16), e.at(source, k)), e.at(target, k)))

    e.each(e.i64(0), rows, 1, row)


def _file(tile: ir.Constant) -> int:
    return ctypes.addressof(TILES) + TILE_BYTES * int(tile.constant)


def _multiply(e: Emitter, sums: int, a: int, b: int) -> None:
    """sums[i, j] += a[i, 2k] * b[k, 2j] + a[i, 2k + 1] * b[k, 2j + 1], of bf16."""

    def row(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        offset = e.b.mul(i, e.i64(64))

        def pair(k: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            at = e.at(e.at(e.i64(a), offset), e.b.mul(k, e.i64(4)))
            both = e.load(vec(I32, 16), e.at(e.i64(b), e.b.mul(k, e.i64(64))))
            (total,) = state
            for half in range(2):
                one = e.b.zext(e.load(I16, at, 2 * half), I32)
                lanes = e.shift_left(both, 16) if half == 0 else e.and_(both, 0xFFFF0000)
                factor = e.splat(e.b.bitcast(e.b.shl(one, ir.Constant(I32, 16)), F32), 16)
                total = e.fma(factor, e.b.bitcast(lanes, vec(F32, 16)), total)
            return [total]

        place = e.at(e.i64(sums), offset)
        (total,) = e.loop(e.i64(0), e.i64(16), 1, [e.load(vec(F32, 16), place)], pair)
        e.store(total, place)
        return []

    e.loop(e.i64(0), e.i64(16), 1, [], row)


def _multiply_bytes(e: Emitter, sums: int, a: int, b: int) -> None:
    """sums[i, j] += the sum over four n of a[i, 4k + n] * b[k, 4j + n], of signed bytes."""

    def row(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        offset = e.b.mul(i, e.i64(64))

        def four(k: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            at = e.at(e.at(e.i64(a), offset), e.b.mul(k, e.i64(4)))
            lanes = e.load(vec(I32, 16), e.at(e.i64(b), e.b.mul(k, e.i64(64))))
            (total,) = state
            for n in range(4):
                factor = e.splat(e.b.sext(e.load(I8, at, n), I32), 16)
                byte = e.b.ashr(e.shift_left(lanes, 24 - 8 * n), e.const(vec(I32, 16), 24))
                total = e.b.add(total, e.b.mul(factor, byte))
            return [total]

        place = e.at(e.i64(sums), offset)
        (total,) = e.loop(e.i64(0), e.i64(16), 1, [e.load(vec(I32, 16), place)], four)
        e.store(total, place)
        return []

    e.loop(e.i64(0), e.i64(16), 1, [], row)


def main() -> None:
    amx_ir._call = emulate
    tile_matmul.has_amx = prefill_attention.has_amx = lambda: True
    set_threads(1)
    generator = torch.Generator().manual_seed(1)
    for bytes_of, cases in ((False, CASES), (True, BYTES)):
        tile_matmul.uses_amx_bytes = lambda w, use=bytes_of: use and w.format.name in FACTORS
        check(cases, bytes_of, generator)
    for case in ATTENTION:
        check_attention(*case)
    assert {name for name, *_ in ROWS} == amx_rows.TYPES
    for rows_case in ROWS:
        check_rows(*rows_case)
    print(
        f"{len(CASES)} weights in bf16, {len(BYTES)} in bytes, {len(ATTENTION)} attentions, {len(ROWS)} steps"
    )


def check_rows(name: str, weight_rows: int, blocks: int, count: int) -> None:
    """Rows of a decode step on tiles have the bits of a step of their own."""
    w = random_weight(name, weight_rows, blocks)
    x = torch.randn(count, w.cols, generator=torch.Generator().manual_seed(2))
    amx_rows.has_amx_bytes = lambda: False
    expected = torch.cat([decode_linear(row, [w]) for row in x.split(1)])
    amx_rows.has_amx_bytes = lambda: True
    assert amx_rows.uses_amx_rows(w, count) == bool(host_tile().byte_dot_lanes)
    assert torch.equal(decode_linear(x, [w]), expected), name


def check_attention(
    cache_type: CacheType, heads: int, kv_heads: int, width: int, start: int, tokens: int, window: int | None
) -> None:
    """A chunk's attention on emulated tiles against the definition, and its last tokens alone."""
    layer, q = random_layer(start + tokens + 3, kv_heads, width, cache_type), queries(tokens, heads, width)
    out = attend_chunk(q, layer, start, width**-0.5, window)
    assert nmse(out, definition_of_attention(q, layer, start, window)) <= 5e-9
    assert torch.equal(attend_chunk(q[-9:], layer, start + tokens - 9, width**-0.5, window), out[-9:])


def check(cases: list[tuple[str, int, int, int]], bytes_of: bool, generator: torch.Generator) -> None:
    """Prompts on emulated tiles against the definition, of two bf16 terms or of two bytes."""
    for name, weight_rows, cols, rows in cases:
        w = random_weight(name, weight_rows, cols // FORMATS[name].block)
        x, addend = (torch.randn(rows, n, generator=generator) for n in (cols, weight_rows))
        expected = byte_product(x, w) if bytes_of else two_term_product(x, dequantize(w.format, w.data))
        y = prompt_linear(x, [w])
        assert nmse(y, expected) <= 1e-11, (name, nmse(y, expected))
        assert nmse(prompt_linear(x, [w], addend), expected + addend) <= 1e-11, name
        assert nmse(prompt_linear(x, [w], addend[:1]), expected + addend[:1]) <= 1e-11, name
        for some in (slice(0, 1), slice(rows // 3, rows), slice(rows - 1, rows)):
            assert torch.equal(prompt_linear(x[some], [w]), y[some]), name
