"""The kernels of Mamba2's state space layer (mamba2.py), with their vector code."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from quengine.kernels.cpu.ir.gate_ir import exponential, gate_row, softplus
from quengine.kernels.cpu.ir.row_ir import float_at, int64_at, store_f32
from quengine.kernels.cpu.ir.tile_ir import clear_floats
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.ops.causal_conv_rows import convolve_row
from quengine.kernels.cpu.ops.mamba2 import ROWS, Mamba2Arguments
from quengine.kernels.cpu.ops.rms_norm_kernels import norm_row
from quengine.kernels.cpu.runtime.compiled import compile_kernel

_TOGETHER = 4
"""Rows of a matrix that share the loads of B and C."""


def mamba2_convolution_kernel() -> bytes:
    """Task i: the i-th run of channels of all rows, one after the other; tasks after the runs: dt of a head of all
    rows."""

    def convolve_run(args: Mamba2Arguments, task: int) -> None:
        inner, channels = 4 * args.heads * args.width, 4 * args.channels
        first = task * args.task_channels
        if first < args.channels:
            count = min(args.task_channels, args.channels - first)
            for row in range(args.rows):
                x = args.x + row * args.row_bytes + inner + 4 * first
                slot = int64_at(args.tables + row * args.table_stride, 0)
                history = args.history + slot * args.history_rows * channels + 4 * first
                convolve_row(
                    x, count, int64_at(args.positions, row), history, args.history_rows, channels,
                    args.conv + 4 * first, args.taps, args.conv_bias + 4 * first,
                )  # fmt: skip
            return
        head = task - (args.channels + args.task_channels - 1) // args.task_channels
        for row in range(args.rows):
            dt = args.x + row * args.row_bytes + inner + channels + 4 * head
            step = softplus(float_at(dt, 0) + float_at(args.bias, head))
            store_f32(min(max(step, args.low), args.high), dt)

    return compile_kernel(convolve_run, Mamba2Arguments)


def mamba2_scan_kernel(wide: bool, pairs: bool) -> bytes:
    """Task h * blocks + i: the i-th block of rows of head h's matrix, through all rows of the step in order.

    `wide`: a block is ROWS rows, else 8. `pairs`: rows of the matrix are whole vectors of 16, else of 8.
    """
    block, lanes = ROWS if wide else 8, 16 if pairs else 8

    def advance_block(args: Mamba2Arguments, task: int) -> None:
        blocks, state = args.width // block, 4 * args.state
        head, first = task // blocks, (task % blocks) * block
        inner, group = 4 * args.heads * args.width, head // (args.heads // args.groups)
        values = inner + 4 * (head * args.width + first)
        b_at = 2 * inner + group * state
        c_at = b_at + args.groups * state
        dt_at = 2 * inner + 2 * args.groups * state + 4 * head
        for row in range(args.rows):
            x = args.x + row * args.row_bytes
            slot = int64_at(args.tables + row * args.table_stride, 0)
            memory = args.memory + ((slot * args.heads + head) * args.width + first) * state
            if int64_at(args.positions, row) == 0:
                clear_floats(memory, block * args.state)
            step = float_at(x + dt_at, 0)
            decay, skip = exponential(float_at(args.decay, head) * step), float_at(args.skip, head)
            out = args.out + row * inner + values - inner
            for i in range(0, block, _TOGETHER):
                _advance(
                    lanes, memory + i * state, args.state, x + values + 4 * i, x + b_at, x + c_at,
                    out + 4 * i, decay, step, skip,
                )  # fmt: skip

    return compile_kernel(advance_block, Mamba2Arguments)


def mamba2_output_kernel() -> bytes:
    """Task i is group i % groups of row i // groups."""

    def gate_group(args: Mamba2Arguments, task: int) -> None:
        row, group = task // args.groups, task % args.groups
        count = args.heads * args.width // args.groups
        out = args.out + 4 * task * count
        gate_row("silu", args.x + row * args.row_bytes + 4 * group * count, out, count)
        norm_row(out, args.norm + 4 * group * count, count, args.eps, out)

    return compile_kernel(gate_group, Mamba2Arguments)


@vector_code(decay=types.float32, step=types.float32, skip=types.float32)
def _advance(
    e: Emitter,
    lanes: int,
    state: ir.Value,
    count: ir.Value,
    x: ir.Value,
    b: ir.Value,
    c: ir.Value,
    out: ir.Value,
    decay: ir.Value,
    step: ir.Value,
    skip: ir.Value,
) -> None:
    """_TOGETHER rows of `count` fp32 of a matrix at address state: S = decay S + step x B^T; out = S C + skip x."""
    lane, decays = vec(F32, lanes), e.splat(decay, lanes)
    values = [e.load(F32, x, 4 * k) for k in range(_TOGETHER)]
    given = [e.splat(e.b.fmul(step, value), lanes) for value in values]

    def columns(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        at = e.b.mul(i, e.i64(4))
        of_b, of_c, sums = e.load(lane, e.at(b, at)), e.load(lane, e.at(c, at)), list(sums)
        for k in range(_TOGETHER):
            place = e.at(state, e.b.mul(e.b.add(i, e.b.mul(count, e.i64(k))), e.i64(4)))
            s = e.fma(given[k], of_b, e.b.fmul(e.load(lane, place), decays))
            e.store(s, place)
            sums[k] = e.fma(s, of_c, sums[k])
        return sums

    found = e.loop(e.i64(0), count, lanes, [e.const(lane, 0.0)] * _TOGETHER, columns)
    for k in range(_TOGETHER):
        e.store(e.fma(skip, values[k], e.total(found[k])), out, 4 * k)
