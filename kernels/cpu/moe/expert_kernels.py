"""The expert kernels of a decode step (experts.py): they call other kernels with the selected experts' weights."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit

from quengine.kernels.cpu.gemv.matmul import MatvecArguments
from quengine.kernels.cpu.ir.row_ir import int64_at
from quengine.kernels.cpu.ir.tile_ir import stack_floats
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I64, Emitter, vec
from quengine.kernels.cpu.moe.experts import (
    AddExpertsArguments,
    DownAddArguments,
    DownArguments,
    ExpertMatrices,
    GateUpArguments,
)
from quengine.kernels.cpu.moe.groups import GROUP, HEAD
from quengine.kernels.cpu.ops.add import AddArguments
from quengine.kernels.cpu.ops.glu import GLUArguments
from quengine.kernels.cpu.runtime.argument_types import arguments_at
from quengine.kernels.cpu.runtime.arguments import size_of
from quengine.kernels.cpu.runtime.atomics import call_kernel
from quengine.kernels.cpu.runtime.compiled import compile_kernel

_matvec_at = arguments_at(MatvecArguments)
_add_at = arguments_at(AddArguments)
_glu_at = arguments_at(GLUArguments)
# Scratch for the arguments of any of the three.
_REQUEST_FLOATS = max(size_of(kind) for kind in (MatvecArguments, AddArguments, GLUArguments)) // 4
_LANES, _ONE = 16, np.float32(1)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _multiply(
    matrices: ExpertMatrices,
    table: int,
    group: int,
    step: int,
    y: int,
    y_stride: int,
    block: int,
    memory: int,
) -> None:
    """The block-th `step` outputs of a group's expert, with the bias, for the group's places."""
    at = HEAD + GROUP * group
    expert, first, places = int64_at(table, at), int64_at(table, at + 1), int64_at(table, at + 2)
    target = y + first * y_stride
    request = _matvec_at(memory)
    request.weights = int64_at(matrices.addresses, expert)
    request.row_bytes = matrices.row_bytes
    request.rows = matrices.rows
    request.task_rows = step
    request.length = matrices.length
    request.x = matrices.x + first * matrices.x_stride
    request.x_stride = matrices.x_stride
    request.last_x = places - 1
    request.y = target
    request.y_stride = y_stride
    if places > 1:
        call_kernel(matrices.many_kernel, request, block)
    else:
        call_kernel(matrices.one_kernel, request, block)
    if matrices.bias:
        added = _add_at(memory)
        added.y = target
        added.y_stride = y_stride
        added.addend = matrices.bias + expert * matrices.bias_stride
        added.addend_stride = 0
        added.rows = places
        added.cols = matrices.rows
        added.task_cols = step
        added.scale = _ONE  # type: ignore[assignment]  # numba's fp32
        call_kernel(matrices.add_kernel, added, block)


def gate_up_kernel(has_gate: bool) -> bytes:
    """Task i: block i % blocks of the gated outputs of group i // blocks. Without a gate: of up alone."""
    request_floats, parts = _REQUEST_FLOATS, 2 if has_gate else 1

    def gate_up(args: GateUpArguments, task: int) -> None:
        table, group, block = args.table, task // args.blocks, task % args.blocks
        if group >= int64_at(table, 0):
            return
        memory, width, step = stack_floats(request_floats), args.up.rows, args.task_rows
        between, stride = args.gate_up, 4 * parts * args.up.rows
        if has_gate:
            _multiply(args.gate, table, group, step, between, stride, block, memory)
        _multiply(args.up, table, group, step, between + (stride - 4 * width), stride, block, memory)
        first, places = int64_at(table, HEAD + GROUP * group + 1), int64_at(table, HEAD + GROUP * group + 2)
        request = _glu_at(memory)
        request.gate_up = between + first * stride
        request.rows = places
        request.cols = width
        request.task_rows = places
        request.task_cols = step
        request.out = args.out + 4 * first * width
        request.records = 0
        if args.records:
            request.records = args.records + first * args.record_stride
        request.record_stride = args.record_stride
        call_kernel(args.glu_kernel, request, block)

    return compile_kernel(gate_up, GateUpArguments)


def down_kernel() -> bytes:
    """Task i: block i % blocks of the outputs of group i // blocks."""
    request_floats = _REQUEST_FLOATS

    def down(args: DownArguments, task: int) -> None:
        group, block = task // args.blocks, task % args.blocks
        if group < int64_at(args.table, 0):
            memory, stride = stack_floats(request_floats), 4 * args.down.rows
            _multiply(args.down, args.table, group, args.task_rows, args.products, stride, block, memory)

    return compile_kernel(down, DownArguments)


def add_experts_kernel() -> bytes:
    """Task i: the weighted sum of row i's experts."""

    def add_experts(args: AddExpertsArguments, task: int) -> None:
        row, places = 4 * task * args.cols, args.places + 8 * task * args.used
        weights, residual = args.weights + 4 * task * args.used, args.residual + row
        add_weighted(
            args.products, args.cols, places, weights, args.used, residual, args.y + row, 0, args.cols
        )

    return compile_kernel(add_experts, AddExpertsArguments)


def down_add_kernel() -> bytes:
    """For a single row. Task i: block i of the outputs of every group, then of their weighted sum."""
    request_floats = _REQUEST_FLOATS

    def down_add(args: DownAddArguments, task: int) -> None:
        down, added = args.down, args.add
        memory, stride, step = stack_floats(request_floats), 4 * added.cols, down.task_rows
        for group in range(int64_at(down.table, 0)):
            _multiply(down.down, down.table, group, step, down.products, stride, task, memory)
        first, last = task * step, min(added.cols, (task + 1) * step)
        add_weighted(
            *(added.products, added.cols, added.places, added.weights, added.used),
            *(added.residual, added.y, first, last),
        )

    return compile_kernel(down_add, DownAddArguments)


@vector_code
def add_weighted(
    e: Emitter,
    products: ir.Value,
    cols: ir.Value,
    places: ir.Value,
    weights: ir.Value,
    used: ir.Value,
    residual: ir.Value,
    y: ir.Value,
    first: ir.Value,
    last: ir.Value,
) -> None:
    """y[j] = sum over s < used, in order, of weights[s] * products[places[s], j], plus residual[j]; first <= j < last.
    Slots without a place (-1) add nothing.

    products: fp32 rows of `cols`; places: int64; weights, residual, y: fp32; all at addresses.
    """

    def span(j: ir.Value, lanes: int) -> None:
        column = e.b.mul(j, e.i64(4))

        def add(s: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            place = e.load(I64, e.at(places, e.b.mul(s, e.i64(8))))
            absent = e.b.icmp_signed("<", place, e.i64(0))
            row = e.b.mul(e.b.select(absent, e.i64(0), place), e.b.mul(cols, e.i64(4)))
            weight = e.splat(e.load(F32, e.at(weights, e.b.mul(s, e.i64(4)))), lanes)
            product = e.load(vec(F32, lanes), e.at(e.at(products, row), column))
            return [e.b.select(absent, state[0], e.fma(weight, product, state[0]))]

        zero = e.const(vec(F32, lanes), 0.0)
        total = e.loop(e.i64(0), used, 1, [zero], add)[0]
        total = e.b.fadd(total, e.load(total.type, e.at(residual, column)))
        e.store(total, e.at(y, column))

    e.spans(first, last, span, _LANES)
