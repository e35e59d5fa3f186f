"""Vector code of decode attention: exponentials, softmax weights, weighted sums, rows of codes, block tables."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from quengine.kernels.cpu.ir.cache_ir import emit_codes
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I32, I64, Emitter, vec
from quengine.kernels.kv.cache_types import BLOCK_SIZE

# exp(r) = 1 + r + r^2 * P(r) for |r| <= ln(2)/2: the minimax polynomial of Cephes' expf (S. Moshier), accurate to one
# unit in the last place. ln(2) is split in two parts, so that n*ln(2) is subtracted exactly.
_EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_LEAST = -87.0  # exp of less is a denormal or zero and is flushed to zero


def emit_exp(e: Emitter, x: ir.Value) -> ir.Value:
    """exp of fp32 lanes that are at most 88; 0 below -87, NaN for NaN."""
    b, lanes = e.b, x.type
    count = lanes.count
    tiny = b.fcmp_ordered("<", x, e.const(lanes, _LEAST))
    x = b.select(tiny, e.const(lanes, _LEAST), x)
    # Adding 1.5 * 2^23 rounds x * log2(e) to an integer n and leaves it in the low bits.
    magic = e.const(lanes, 12582912.0)
    shifted = e.fma(x, e.const(lanes, _LOG2_E), magic)
    n = b.fsub(shifted, magic)
    r = e.fma(n, e.const(lanes, -_LN2_HIGH), x)
    r = e.fma(n, e.const(lanes, -_LN2_LOW), r)
    p = e.const(lanes, _EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = e.fma(p, r, e.const(lanes, coefficient))
    y = b.fadd(e.fma(p, b.fmul(r, r), r), e.const(lanes, 1.0))
    # y * 2^n: n is shifted into the exponent field; the upper bits of `shifted` are shifted out.
    power = b.bitcast(
        e.shift_left(b.add(b.bitcast(shifted, vec(I32, count)), e.const(vec(I32, count), 127)), 23), lanes
    )
    return b.select(tiny, e.const(lanes, 0.0), b.fmul(y, power))


@vector_code
def softmax_weights(e: Emitter, scores: ir.Value, count: ir.Value, head: ir.Value) -> None:
    """Replaces scores by exp(score - max), in place.

    scores: fp32 at an address, with room for a multiple of 8, filled with -inf after `count`. Writes the maximum and
    the sum of the weights to address `head`.
    """
    lanes = vec(F32, 8)
    end = e.b.and_(e.b.add(count, e.i64(7)), e.i64(-8))
    least = e.const(F32, float("-inf"))
    e.each(count, end, 1, lambda i: e.store(least, _lane_address(e, scores, i)))

    def step(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        return [e.maximum(e.load(lanes, _lane_address(e, scores, i)), state[0])]

    top = e.loop(e.i64(0), end, 8, [e.splat(least, 8)], step)[0]
    maximum = e.splat(e.lane(e.largest(top), 0), 8)

    def weigh(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        address = _lane_address(e, scores, i)
        weights = emit_exp(e, e.b.fsub(e.load(lanes, address), maximum))
        e.store(weights, address)
        return [e.b.fadd(state[0], weights)]

    total = e.loop(e.i64(0), end, 8, [e.const(lanes, 0.0)], weigh)[0]
    e.store(e.lane(maximum, 0), head)
    e.store(e.total(total), head, 4)


def _lane_address(e: Emitter, base: ir.Value, index: ir.Value) -> ir.Value:
    return e.b.add(base, e.b.mul(index, e.i64(4)))


@vector_code
def add_weighted_halves(
    e: Emitter,
    weights: ir.Value,
    count: ir.Value,
    values: ir.Value,
    stride: ir.Value,
    width: ir.Value,
    out: ir.Value,
) -> None:
    """out[d] += sum over i < count of weights[i] * values[i, d], d < width, in order of i.

    weights, out: fp32 addresses; values: address of fp16 rows, `stride` bytes apart.
    """

    def columns(d: ir.Value, width: int) -> None:
        lanes, parts = (8, 4) if width == 32 else (1, 1)
        base = e.b.add(values, e.b.mul(d, e.i64(2)))

        def row(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            weight = e.splat(e.load(F32, _lane_address(e, weights, i)), lanes)
            address = e.b.add(base, e.b.mul(i, stride))
            return [
                e.fma(weight, e.load_halves(lanes, address, 2 * lanes * k), state[k]) for k in range(parts)
            ]

        target = _lane_address(e, out, d)
        before = [e.load(vec(F32, lanes), target, 4 * lanes * k) for k in range(parts)]
        for k, total in enumerate(e.loop(e.i64(0), count, 1, before, row)):
            e.store(total, target, 4 * lanes * k)

    e.spans(e.i64(0), width, columns, 32)


@vector_code(result=types.float32)
def dot_codes(
    e: Emitter, cache_type: str, codes: ir.Value, scales: ir.Value, width: ir.Value, x: ir.Value
) -> ir.Value:
    """fp32 dot product of a row of codes with fp32 at address x: an fp16 scale for every 32."""

    def group(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        parts, inputs = emit_codes(e, cache_type, codes, i), _lane_address(e, x, i)
        dot = e.b.fmul(parts[0], e.load(vec(F32, 8), inputs))
        for k in range(1, 4):
            dot = e.fma(parts[k], e.load(vec(F32, 8), inputs, 32 * k), dot)
        scale = e.load_halves(1, e.b.add(scales, e.b.udiv(i, e.i64(16))))
        return [e.fma(e.splat_lane(scale, 0, 8), dot, state[0])]

    return e.total(e.loop(e.i64(0), width, 32, [e.const(vec(F32, 8), 0.0)], group)[0])


@vector_code
def add_weighted_codes(
    e: Emitter,
    cache_type: str,
    weights: ir.Value,
    count: ir.Value,
    codes: ir.Value,
    stride: ir.Value,
    scales: ir.Value,
    scale_stride: ir.Value,
    width: ir.Value,
    out: ir.Value,
) -> None:
    """out[d] += sum over i < count of weights[i] * values[i, d], d < width, in order of i, over rows of codes.

    weights, out: fp32 addresses; codes, scales: addresses of codes `stride` bytes and fp16 rows `scale_stride` bytes
    apart.
    """

    def group(d: ir.Value) -> None:
        scale = e.b.add(scales, e.b.udiv(d, e.i64(16)))

        def row(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            factor = e.load_halves(1, e.b.add(scale, e.b.mul(i, scale_stride)))
            weight = e.b.fmul(e.lane(factor, 0), e.load(F32, _lane_address(e, weights, i)))
            parts = emit_codes(e, cache_type, e.b.add(codes, e.b.mul(i, stride)), d)
            wide = e.splat(weight, 8)
            return [e.fma(wide, part, total) for part, total in zip(parts, state, strict=True)]

        target = _lane_address(e, out, d)
        before = [e.load(vec(F32, 8), target, 32 * k) for k in range(4)]
        for k, total in enumerate(e.loop(e.i64(0), count, 1, before, row)):
            e.store(total, target, 32 * k)

    e.each(e.i64(0), width, 32, group)


@vector_code
def combine_parts(
    e: Emitter, parts: ir.Value, count: ir.Value, stride: ir.Value, width: ir.Value, out: ir.Value
) -> None:
    """Combines the softmax-weighted sums of KV splits: fp32 out[width].

    Part i, at parts + i * stride: its maximum, its sum of weights, 6 fp32 of scratch, its weighted sum [width].
    """
    _emit_combined(e, parts, count, stride, width, out, None)


@vector_code(sink=types.float32)
def combine_parts_and_sink(
    e: Emitter,
    parts: ir.Value,
    count: ir.Value,
    stride: ir.Value,
    width: ir.Value,
    sink: ir.Value,
    out: ir.Value,
) -> None:
    """As `combine_parts`, with one extra logit, the sink, in the denominator."""
    _emit_combined(e, parts, count, stride, width, out, sink)


def _emit_combined(
    e: Emitter,
    parts: ir.Value,
    count: ir.Value,
    stride: ir.Value,
    width: ir.Value,
    out: ir.Value,
    sink: ir.Value | None,
) -> None:
    def part(i: ir.Value) -> ir.Value:
        return e.b.add(parts, e.b.mul(i, stride))

    def larger(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        return [e.maximum(e.load(F32, part(i)), state[0])]

    least = e.const(F32, float("-inf")) if sink is None else sink
    top = e.loop(e.i64(0), count, 1, [least], larger)[0]

    def weight_of(logit: ir.Value) -> ir.Value:
        return e.lane(emit_exp(e, e.splat(e.b.fsub(logit, top), 1)), 0)

    def weigh(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        weight = weight_of(e.load(F32, part(i)))
        e.store(weight, part(i), 8)
        return [e.fma(weight, e.load(F32, part(i), 4), state[0])]

    first = e.const(F32, 0.0) if sink is None else weight_of(sink)
    total = e.loop(e.i64(0), count, 1, [first], weigh)[0]

    def columns(d: ir.Value, lanes: int) -> None:
        def term(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            values = e.load(vec(F32, lanes), _lane_address(e, part(i), d), 32)
            return [e.fma(e.splat(e.load(F32, part(i), 8), lanes), values, state[0])]

        value = e.loop(e.i64(0), count, 1, [e.const(vec(F32, lanes), 0.0)], term)[0]
        e.store(e.b.fdiv(value, e.splat(total, lanes)), _lane_address(e, out, d))

    e.spans(e.i64(0), width, columns)


@vector_code(result=types.UniTuple(types.int64, 2))
def block_run(e: Emitter, table: ir.Value, position: ir.Value, most: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The cache row of a position, and the number of adjacent rows from there on, at most `most`. table: address of
    int64."""
    index, inside = e.b.udiv(position, e.i64(BLOCK_SIZE)), e.b.urem(position, e.i64(BLOCK_SIZE))
    block = e.load(I64, e.at(table, e.b.mul(index, e.i64(8))))
    row = e.b.add(e.b.mul(block, e.i64(BLOCK_SIZE)), inside)
    rest = e.b.sub(e.i64(BLOCK_SIZE), inside)
    run = e.b.select(e.b.icmp_signed("<", rest, most), rest, most)
    return row, run
