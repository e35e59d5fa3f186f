"""The kernels of alternating updates and of gates above a cutoff (altup.py), with their vector code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types

from quengine.kernels.altup import LEAST
from quengine.kernels.cpu.ir.gate_ir import emit_tanh
from quengine.kernels.cpu.ir.row_ir import dot_float_row, multiply_span, scale_row, store_f32
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.ops.altup import AltUpArguments, RowsArguments
from quengine.kernels.cpu.ops.glu_kernels import gated_span
from quengine.kernels.cpu.ops.rms_norm_kernels import emit_sum_of_squares, norm_row
from quengine.kernels.cpu.runtime.compiled import compile_kernel

_ROOT = 2.0**-0.5


def altup_predict_kernel() -> bytes:
    """Task t predicts the rows of token t."""

    def predict(args: AltUpArguments, task: int) -> None:
        count, cols, at = args.count, args.cols, 4 * args.cols * task
        work = args.work + 4 * (cols + count) * task
        numbers = work + 4 * cols
        route(args.x + at, args, work, numbers)
        for n in range(count):
            out = args.out + n * args.stride + at
            scale_row(args.x + n * args.stride + at, 1.0, cols, out)
            for other in range(count):
                row = args.coefficients + 4 * count * (n * count + other)
                add_scaled(out, args.x + other * args.stride + at, short_dot(row, numbers, count), cols)

    return compile_kernel(predict, AltUpArguments)


def altup_correct_kernel() -> bytes:
    """Task t corrects the rows of token t."""

    def correct(args: AltUpArguments, task: int) -> None:
        count, cols, at = args.count, args.cols, 4 * args.cols * task
        work = args.work + 4 * (cols + count) * task
        numbers = work + 4 * cols
        route(args.y + at, args, work, numbers)
        scale_row(args.y + at, 1.0, cols, work)
        add_scaled(work, args.x + at, -1.0, cols)
        for n in range(count):
            out = args.out + n * args.stride + at
            scale_row(args.x + n * args.stride + at, 1.0, cols, out)
            add_scaled(
                out, work, one_more(short_dot(args.coefficients + 4 * count * n, numbers, count)), cols
            )
        multiply_span(args.out + at, args.scale, args.scaled + at, 0, cols)

    return compile_kernel(correct, AltUpArguments)


@njit(inline="always")  # type: ignore[untyped-decorator]
def route(row: int, args: Any, work: int, numbers: int) -> None:
    """Writes the factors with which a token's rows are mixed: tanh of the router's products with the norm of `row`,
    which is put in `work`."""
    count, cols = args.count, args.cols
    norm_row(row, args.norm, cols, args.eps, work)
    for n in range(count):
        product = dot_float_row("F32", "row", args.router + 4 * cols * n, cols, work)
        store_f32(hyperbolic(product), numbers + 4 * n)


def altup_open_kernel() -> bytes:
    """Task t makes the rows of token t."""

    def opened(args: RowsArguments, task: int) -> None:
        cols, at = args.cols, 4 * args.cols * task
        x = args.out + at
        scale_row(x, 1.0, cols, args.x + at)
        for n in range(1, args.count):
            row = args.y + 4 * cols * ((args.count - 1) * task + n - 1)
            scale_row(row, ratio_of_sizes(x, row, cols), cols, args.x + n * args.stride + at)

    return compile_kernel(opened, RowsArguments)


def altup_close_kernel() -> bytes:
    """Task t adds a row of token t."""

    def closed(args: RowsArguments, task: int) -> None:
        cols, at = args.cols, 4 * args.cols * task
        first, row, total = args.x + at, args.y + at, args.out + at
        if args.number == 1:
            scale_row(first, 1.0, cols, total)
        add_scaled(total, row, ratio_of_sizes(first, row, cols), cols)
        if args.number == args.count - 1:
            scale_row(total, inverse(args.count), cols, total)

    return compile_kernel(closed, RowsArguments)


def altup_add_kernel() -> bytes:
    """Task t adds a row to all rows of token t but the first."""

    def add(args: RowsArguments, task: int) -> None:
        cols, at = args.cols, 4 * args.cols * task
        for n in range(1, args.count):
            add_scaled(args.x + n * args.stride + at, args.y + at, 1.0, cols)

    return compile_kernel(add, RowsArguments)


def altup_join_kernel() -> bytes:
    """Task t joins the two rows of token t."""

    def join(args: RowsArguments, task: int) -> None:
        cols, at = args.cols, 4 * args.cols * task
        scale_row(args.x + at, 1.0, cols, args.out + at)
        add_scaled(args.out + at, args.y + at, 1.0, cols)
        scale_row(args.out + at, _ROOT, cols, args.out + at)

    return compile_kernel(join, RowsArguments)


def sparse_gate_kernel() -> bytes:
    """Task t gates row t."""

    def gate(args: RowsArguments, task: int) -> None:
        cols = args.cols
        gates, out = args.y + 8 * cols * task, args.out + 4 * cols * task
        above_cutoff(gates, args.factor, cols, out)
        gated_span("gelu_tanh", out, gates + 4 * cols, 0, cols, out)

    return compile_kernel(gate, RowsArguments)


@vector_code(scale=types.float32)
def add_scaled(e: Emitter, y: ir.Value, x: ir.Value, scale: ir.Value, count: ir.Value) -> None:
    """y += scale * x, `count` fp32 at addresses, each rounded once."""

    def add(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        e.store(
            e.fma(e.load(lane, e.at(x, at)), e.splat(scale, lanes), e.load(lane, e.at(y, at))), e.at(y, at)
        )

    e.spans(e.i64(0), count, add)


@vector_code(result=types.float32)
def short_dot(e: Emitter, x: ir.Value, y: ir.Value, count: ir.Value) -> ir.Value:
    """The sum of products of a few fp32 at addresses, in order."""

    def turn(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        at = e.b.mul(i, e.i64(4))
        return [e.fma(e.load(F32, e.at(x, at)), e.load(F32, e.at(y, at)), state[0])]

    return e.loop(e.i64(0), count, 1, [e.const(F32, 0.0)], turn)[0]


@vector_code(result=types.float32, x=types.float32)
def hyperbolic(e: Emitter, x: ir.Value) -> ir.Value:
    """tanh of one fp32."""
    return e.lane(emit_tanh(e, e.splat(x, 1)), 0)


@vector_code(result=types.float32, x=types.float32)
def one_more(e: Emitter, x: ir.Value) -> ir.Value:
    return e.b.fadd(x, e.const(F32, 1.0))


@vector_code(result=types.float32)
def inverse(e: Emitter, count: ir.Value) -> ir.Value:
    """1 / count, an int64."""
    return e.b.fdiv(e.const(F32, 1.0), e.to_float(count))


@vector_code(result=types.float32)
def ratio_of_sizes(e: Emitter, like: ir.Value, x: ir.Value, count: ir.Value) -> ir.Value:
    """The root mean square of `like` over that of x, of which the mean square is LEAST at least."""
    size, least = e.to_float(count), e.const(F32, LEAST)
    wanted, mean = (e.b.fdiv(emit_sum_of_squares(e, row, count), size) for row in (like, x))
    return e.b.fdiv(e.sqrt(wanted), e.sqrt(e.maximum(mean, least)))


@vector_code(deviations=types.float32)
def above_cutoff(e: Emitter, x: ir.Value, deviations: ir.Value, count: ir.Value, out: ir.Value) -> None:
    """What elements of x are above its mean plus so many standard deviations, 0 for others, to `out`."""
    size = e.to_float(count)

    def lanes_at(i: ir.Value, lanes: int, offset: int = 0) -> ir.Value:
        return e.load(vec(F32, lanes), e.at(x, e.b.mul(i, e.i64(4))), offset)

    whole = e.b.and_(count, e.i64(-32))

    def total(term: Callable[[ir.Value], ir.Value]) -> ir.Value:
        zeros = [e.const(vec(F32, 8), 0.0)] * 4
        s = e.loop(
            e.i64(0), whole, 32, zeros,
            lambda i, state: [e.b.fadd(state[k], term(lanes_at(i, 8, 32 * k))) for k in range(4)],
        )  # fmt: skip
        zero = [e.const(vec(F32, 1), 0.0)]
        rest = e.loop(whole, count, 1, zero, lambda i, state: [e.b.fadd(state[0], term(lanes_at(i, 1)))])
        return e.b.fadd(e.total(e.b.fadd(e.b.fadd(s[0], s[1]), e.b.fadd(s[2], s[3]))), e.lane(rest[0], 0))

    mean = e.b.fdiv(total(lambda v: v), size)

    def squared(v: ir.Value) -> ir.Value:
        off = e.b.fsub(v, e.splat(mean, v.type.count))
        return e.b.fmul(off, off)

    cutoff = e.fma(e.sqrt(e.b.fdiv(total(squared), size)), deviations, mean)

    def cut(i: ir.Value, lanes: int) -> None:
        above = e.b.fsub(lanes_at(i, lanes), e.splat(cutoff, lanes))
        zero = e.const(vec(F32, lanes), 0.0)
        kept = e.b.select(e.b.fcmp_ordered("<", above, zero), zero, above)
        e.store(kept, e.at(out, e.b.mul(i, e.i64(4))))

    e.spans(e.i64(0), count, cut)
