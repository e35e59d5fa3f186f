"""Vector code of decode attention: exponentials, softmax weights, weighted sums, rows of codes, block tables."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types

from quengine.kernels.cpu.ir.cache_ir import emit_codes
from quengine.kernels.cpu.ir.row_ir import emit_float_dots
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I32, I64, Emitter, vec
from quengine.kernels.kv.cache_types import BLOCK_SIZE

# exp(r) = 1 + r + r^2 * P(r) for |r| <= ln(2)/2: the minimax polynomial of Cephes' expf (S. Moshier), accurate to one
# unit in the last place. ln(2) is split in two parts, so that n*ln(2) is subtracted exactly.
_EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
HEADS_AT_ONCE = 4  # query heads that share what is read of a cache
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


def _heads_at_once(e: Emitter) -> int:
    """Query heads whose sums stay in registers, of 32 or 16."""
    return HEADS_AT_ONCE if e.byte_dot_lanes == 16 else HEADS_AT_ONCE // 2


def _by_heads(
    e: Emitter,
    heads: ir.Value,
    arrays: list[tuple[ir.Value, ir.Value]],
    body: Callable[..., None],
) -> None:
    """Emits body(addresses in the first array, in the second) of as many query heads at a time as registers hold.

    heads: up to HEADS_AT_ONCE. arrays: of each its address, and the bytes between heads.
    """
    most = _heads_at_once(e)

    def some(first: ir.Value) -> None:
        left = e.b.sub(heads, first)
        count = e.b.select(e.b.icmp_signed("<", left, e.i64(most)), left, e.i64(most))

        def known(n: int) -> None:
            body(
                *(
                    [e.b.add(base, e.b.mul(e.at(first, i), stride)) for i in range(n)]
                    for base, stride in arrays
                )
            )

        e.by_count(count, most, known)

    e.each(e.i64(0), heads, most, some)


@vector_code(scale=types.float32)
def dot_halves(
    e: Emitter,
    heads: ir.Value,
    key: ir.Value,
    width: ir.Value,
    q: ir.Value,
    scale: ir.Value,
    scores: ir.Value,
    scores_stride: ir.Value,
) -> None:
    """scores[h] = scale times the dot product of an fp16 row with fp32 q[h], for up to HEADS_AT_ONCE heads.

    key, q, scores: addresses; q: adjacent rows of `width`; scores_stride: bytes.
    """

    def some(rows: list[ir.Value], places: list[ir.Value]) -> None:
        for place, dot in zip(places, emit_float_dots(e, "F16", "row", key, width, rows), strict=True):
            e.store(e.b.fmul(dot, scale), place)

    _by_heads(e, heads, [(q, e.b.mul(width, e.i64(4))), (scores, scores_stride)], some)


@vector_code
def add_weighted_halves(
    e: Emitter,
    heads: ir.Value,
    weights: ir.Value,
    weights_stride: ir.Value,
    count: ir.Value,
    values: ir.Value,
    stride: ir.Value,
    width: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
) -> None:
    """out[h, d] += sum over i < count of weights[h, i] * values[i, d], in order of i, for d < width, h < heads.

    heads: up to HEADS_AT_ONCE; weights, out: fp32 addresses, and bytes between heads; values: address of fp16 rows,
    `stride` bytes apart.
    """

    def some(sources: list[ir.Value], targets: list[ir.Value]) -> None:
        def columns(d: ir.Value, width: int) -> None:
            lanes, parts = (8, 4) if width == 32 else (1, 1)
            base = e.b.add(values, e.b.mul(d, e.i64(2)))

            def row(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
                address, result = e.b.add(base, e.b.mul(i, stride)), []
                halves = [e.load_halves(lanes, address, 2 * lanes * k) for k in range(parts)]
                for h, source in enumerate(sources):
                    weight = e.splat(e.load(F32, _lane_address(e, source, i)), lanes)
                    result += [e.fma(weight, half, state[parts * h + k]) for k, half in enumerate(halves)]
                return result

            places = [
                (_lane_address(e, target, d), 4 * lanes * k) for target in targets for k in range(parts)
            ]
            before = [e.load(vec(F32, lanes), *place) for place in places]
            for place, total in zip(places, e.loop(e.i64(0), count, 1, before, row), strict=True):
                e.store(total, *place)

        e.spans(e.i64(0), width, columns, 32)

    _by_heads(e, heads, [(weights, weights_stride), (out, out_stride)], some)


@vector_code(scale=types.float32)
def dot_codes(
    e: Emitter,
    cache_type: str,
    heads: ir.Value,
    codes: ir.Value,
    scales: ir.Value,
    width: ir.Value,
    q: ir.Value,
    scale: ir.Value,
    scores: ir.Value,
    scores_stride: ir.Value,
) -> None:
    """As `dot_halves`, of a row of codes, and an fp16 scale for every 32."""

    def some(rows: list[ir.Value], places: list[ir.Value]) -> None:
        def group(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            values, result = emit_codes(e, cache_type, codes, i), []
            factor = e.splat_lane(e.load_halves(1, e.b.add(scales, e.b.udiv(i, e.i64(16)))), 0, 8)
            for row, total in zip(rows, state, strict=True):
                inputs = _lane_address(e, row, i)
                dot = e.b.fmul(values[0], e.load(vec(F32, 8), inputs))
                for k in range(1, 4):
                    dot = e.fma(values[k], e.load(vec(F32, 8), inputs, 32 * k), dot)
                result.append(e.fma(factor, dot, total))
            return result

        zeros = [e.const(vec(F32, 8), 0.0)] * len(rows)
        for place, total in zip(places, e.loop(e.i64(0), width, 32, zeros, group), strict=True):
            e.store(e.b.fmul(e.total(total), scale), place)

    _by_heads(e, heads, [(q, e.b.mul(width, e.i64(4))), (scores, scores_stride)], some)


@vector_code
def add_weighted_codes(
    e: Emitter,
    cache_type: str,
    heads: ir.Value,
    weights: ir.Value,
    weights_stride: ir.Value,
    count: ir.Value,
    codes: ir.Value,
    stride: ir.Value,
    scales: ir.Value,
    scale_stride: ir.Value,
    width: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
) -> None:
    """As `add_weighted_halves`, over rows of codes: they are `stride`, fp16 scales `scale_stride` bytes apart."""

    def some(sources: list[ir.Value], targets: list[ir.Value]) -> None:
        def group(d: ir.Value) -> None:
            scale = e.b.add(scales, e.b.udiv(d, e.i64(16)))

            def row(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
                factor = e.lane(e.load_halves(1, e.b.add(scale, e.b.mul(i, scale_stride))), 0)
                values, result = emit_codes(e, cache_type, e.b.add(codes, e.b.mul(i, stride)), d), []
                for h, source in enumerate(sources):
                    weight = e.b.fmul(factor, e.load(F32, _lane_address(e, source, i)))
                    wide = e.splat(weight, 8)
                    result += [e.fma(wide, value, state[4 * h + k]) for k, value in enumerate(values)]
                return result

            places = [(_lane_address(e, target, d), 32 * k) for target in targets for k in range(4)]
            before = [e.load(vec(F32, 8), *place) for place in places]
            for place, total in zip(places, e.loop(e.i64(0), count, 1, before, row), strict=True):
                e.store(total, *place)

        e.each(e.i64(0), width, 32, group)

    _by_heads(e, heads, [(weights, weights_stride), (out, out_stride)], some)


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
