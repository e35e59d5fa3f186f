"""The kernels of the gated delta net (gated_delta.py), with their vector code."""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types

from quengine.kernels.cpu.ir.gate_ir import exponential, gate_row, sigmoid, softplus
from quengine.kernels.cpu.ir.row_ir import float_at, int64_at, store_f32
from quengine.kernels.cpu.ir.tile_ir import clear_floats, prefetch, prefetch_to_write, stack_floats
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.ops.causal_conv_rows import convolve_row
from quengine.kernels.cpu.ops.gated_delta import COLUMNS, MOST_WIDTH, GatedDeltaArguments
from quengine.kernels.cpu.ops.rms_norm_kernels import emit_sum_of_squares, norm_row
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.cpu.runtime.target import host_tile

_REGISTERS_32 = 16
"""fp32 lanes of a processor with 32 vector registers, which hold the sums of all columns of a task."""
_CHAINS = 4
"""Sums over a matrix's rows: row i adds to sum i mod _CHAINS of its column."""


_AHEAD = 3
"""Rows ahead that are prefetched: each begins on another page, which no processor prefetches by itself."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def _prefetch(address: int, count: int) -> None:
    """The cache lines of `count` bytes."""
    for line in range(0, count, 64):
        prefetch(address + line)


def delta_convolution_kernel() -> bytes:
    """Task h: head h of queries, keys and values, in this order, of all rows, one after the other."""

    def convolve_head(args: GatedDeltaArguments, task: int) -> None:
        width, keys = 4 * args.width, 2 * args.key_heads
        channels = (keys + args.value_heads) * width
        at, value = task * width, task - keys
        for row in range(args.rows):
            position, x = int64_at(args.positions, row), args.x + row * args.row_bytes
            slot = int64_at(args.tables + row * args.table_stride, 0)
            if row + _AHEAD < args.rows:
                for line in range(0, width, 64):
                    prefetch_to_write(x + at + _AHEAD * args.row_bytes + line)
            history, head = args.history + slot * args.history_rows * channels + at, x + at
            convolve_row(
                head, args.width, position, history, args.history_rows, channels, args.conv + at, args.taps, 0
            )
            if value < 0:
                _unit_row(head, args.width, args.l2_eps, args.scale if task < args.key_heads else 1.0)
            else:
                b = x + channels + args.value_heads * width + 4 * value
                a = b + 4 * args.value_heads
                rate = softplus(float_at(a, 0) + float_at(args.bias, value))
                store_f32(sigmoid(float_at(b, 0)), b)
                store_f32(exponential(float_at(args.decay, value) * rate), a)

    return compile_kernel(convolve_head, GatedDeltaArguments)


def delta_memory_kernel(wide: bool) -> bytes:
    """Task h * blocks + i: the i-th block of columns of value head h's matrix, of all rows, one after the other.

    The matrix is on the stack from a sequence's first row of the step to its last. `wide`: a block is COLUMNS columns;
    else 8.
    """
    columns = COLUMNS if wide else 8
    most = MOST_WIDTH * columns

    def advance_block(args: GatedDeltaArguments, task: int) -> None:
        width = 4 * args.width
        blocks = args.width // columns
        head, first = task // blocks, 4 * (task % blocks) * columns
        ratio = args.value_heads // args.key_heads
        key_head = head % args.key_heads if args.tiled else head // ratio
        query_at, value_at = key_head * width, (2 * args.key_heads + head) * width + first
        key_at = query_at + args.key_heads * width
        b_at = (2 * args.key_heads + 2 * args.value_heads) * width + 4 * head
        local, sums, goes_on = stack_floats(most), stack_floats(columns), False
        for row in range(args.rows):
            x, position = args.x + row * args.row_bytes, int64_at(args.positions, row)
            slot = int64_at(args.tables + row * args.table_stride, 0)
            if row + _AHEAD < args.rows:
                ahead = x + _AHEAD * args.row_bytes
                _prefetch(ahead + key_at, width)
                _prefetch(ahead + query_at, width)
                _prefetch(ahead + value_at, 4 * columns)
                prefetch(ahead + b_at)
            memory = args.memory + (slot * args.value_heads + head) * args.width * width + first
            if not goes_on:
                if position:
                    _take(columns, memory, width, x + key_at, args.width, local, sums)
                else:
                    clear_floats(local, args.width * columns)
                    clear_floats(sums, columns)
            goes_on = False
            if row + 1 < args.rows and int64_at(args.positions, row + 1) == position + 1:
                goes_on = int64_at(args.tables + (row + 1) * args.table_stride, 0) == slot
            decay, beta = float_at(x + b_at + 4 * args.value_heads, 0), float_at(x + b_at, 0)
            key, query, value = x + key_at, x + query_at, x + value_at
            out = args.out + (row * args.value_heads + head) * width + first
            if goes_on:
                _advance(
                    columns, "and reads", local, local, 4 * columns, key, query, value,
                    key + args.row_bytes, sums, args.width, decay, beta, out,
                )  # fmt: skip
            else:
                _advance(
                    columns, "", local, memory, width, key, query, value,
                    key, sums, args.width, decay, beta, out,
                )  # fmt: skip

    return compile_kernel(advance_block, GatedDeltaArguments)


def delta_output_kernel() -> bytes:
    """A task is a row."""

    def gate_heads(args: GatedDeltaArguments, row: int) -> None:
        width, heads = 4 * args.width, args.value_heads
        z = args.x + row * args.row_bytes + (2 * args.key_heads + heads) * width
        out = args.out + row * heads * width
        for _ in range(heads):
            norm_row(out, args.norm, args.width, args.eps, out)
            gate_row("silu", z, out, args.width)
            z += width
            out += width

    return compile_kernel(gate_heads, GatedDeltaArguments)


@vector_code(eps=types.float32, factor=types.float32)
def _unit_row(e: Emitter, x: ir.Value, count: ir.Value, eps: ir.Value, factor: ir.Value) -> None:
    """`count` fp32 at address x divided by their length and times `factor`, in place."""
    length = e.sqrt(e.b.fadd(emit_sum_of_squares(e, x, count), eps))
    scale = e.b.fdiv(factor, length)

    def multiply(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        e.store(e.b.fmul(e.load(lane, e.at(x, at)), e.splat(scale, lanes)), e.at(x, at))

    e.spans(e.i64(0), count, multiply)


def _parts(columns: int) -> tuple[ir.VectorType, range]:
    """The vectors that hold `columns` fp32, of a processor's registers, and where each begins, in bytes. With 16
    registers a matrix goes through the sums of one after the other."""
    lanes = min(columns, max(8, host_tile().lanes))
    return vec(F32, lanes), range(0, 4 * columns, 4 * lanes)


@vector_code
def _take(
    e: Emitter,
    columns: int,
    memory: ir.Value,
    stride: ir.Value,
    key: ir.Value,
    count: ir.Value,
    local: ir.Value,
    sums: ir.Value,
) -> None:
    """`columns` columns of the `count` rows of a matrix at address memory to address local, and S^T k to sums."""
    lane, parts = _parts(columns)

    def rows(i: ir.Value, flat: list[ir.Value]) -> list[ir.Value]:
        flat = list(flat)
        for chain in range(_CHAINS):
            row = e.b.add(i, e.i64(chain))
            k = e.splat(e.load(F32, e.at(key, e.b.mul(row, e.i64(4)))), lane.count)
            source, target = (
                e.at(start, e.b.mul(row, step))
                for start, step in ((memory, stride), (local, e.i64(4 * columns)))
            )
            for part, offset in enumerate(parts):
                s = e.load(lane, source, offset)
                e.store(s, target, offset)
                place = chain * len(parts) + part
                flat[place] = e.fma(s, k, flat[place])
        return flat

    zeros = [e.const(lane, 0.0)] * (_CHAINS * len(parts))
    found = e.loop(e.i64(0), count, _CHAINS, zeros, rows)
    for part, offset in enumerate(parts):
        _store_sum(e, sums, offset, found[part :: len(parts)])


@vector_code(decay=types.float32, beta=types.float32)
def _advance(
    e: Emitter,
    columns: int,
    how: str,
    local: ir.Value,
    target: ir.Value,
    stride: ir.Value,
    key: ir.Value,
    query: ir.Value,
    value: ir.Value,
    next_key: ir.Value,
    sums: ir.Value,
    count: ir.Value,
    decay: ir.Value,
    beta: ir.Value,
    out: ir.Value,
) -> None:
    """S = decay S + k (beta (v - decay sums))^T of `columns` columns at address local, to rows `stride` bytes apart at
    address target; out = S^T q. `how` "and reads": sums become S^T next_key.
    """
    lane, parts = _parts(columns)
    decays, reads = e.splat(decay, lane.count), bool(how)
    together = len(parts) if lane.count == _REGISTERS_32 else 1
    places = ((local, e.i64(4 * columns)), (target, stride))
    for first in range(0, len(parts), together):
        some = parts[first : first + together]
        deltas = []
        for offset in some:
            kept = e.b.fmul(decays, e.load(lane, sums, offset))
            changed = e.b.fsub(e.load(lane, value, offset), kept)
            deltas.append(e.b.fmul(e.splat(beta, lane.count), changed))

        def rows(
            i: ir.Value,
            flat: list[ir.Value],
            some: range = some,
            deltas: list[ir.Value] = deltas,
        ) -> list[ir.Value]:
            flat, vectors = list(flat), (key, query, next_key) if reads else (key, query)
            for chain in range(_CHAINS):
                row = e.b.add(i, e.i64(chain))
                at = e.b.mul(row, e.i64(4))
                k, *others = (e.splat(e.load(F32, e.at(each, at)), lane.count) for each in vectors)
                source, line = (e.at(start, e.b.mul(row, step)) for start, step in places)
                for part, offset in enumerate(some):
                    s = e.fma(k, deltas[part], e.b.fmul(e.load(lane, source, offset), decays))
                    e.store(s, line, offset)
                    for which, other in enumerate(others):
                        place = (which * len(some) + part) * _CHAINS + chain
                        flat[place] = e.fma(s, other, flat[place])
            return flat

        zeros = [e.const(lane, 0.0)] * (_CHAINS * len(some) * (2 if reads else 1))
        found = e.loop(e.i64(0), count, _CHAINS, zeros, rows)
        chains = [found[n : n + _CHAINS] for n in range(0, len(found), _CHAINS)]
        for part, offset in enumerate(some):
            _store_sum(e, out, offset, chains[part])
            if reads:
                _store_sum(e, sums, offset, chains[len(some) + part])


def _store_sum(e: Emitter, out: ir.Value, offset: int, chains: list[ir.Value]) -> None:
    """The sum of all chains to address out."""
    a, b, c, d = chains
    e.store(e.b.fadd(e.b.fadd(a, b), e.b.fadd(c, d)), out, offset)
