"""The kernel of Q/K norms, rotary embedding and the KV store (rope_store.py), with its vector code."""

from __future__ import annotations

from llvmlite import ir
from numba import njit

from quengine.kernels.cpu.ir.cache_ir import hadamard_row, store_codes
from quengine.kernels.cpu.ir.row_ir import float_at, int64_at, scale_row
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec
from quengine.kernels.cpu.ops.rms_norm_kernels import norm_row
from quengine.kernels.cpu.ops.rope_store import RopeStoreArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.kv.cache_types import CACHE_FORMATS, CacheType
from quengine.kernels.rope import RopeLayout


def rope_store_kernel(layout: RopeLayout, cache_type: CacheType) -> bytes:
    """A task is `task_heads` heads. Each row has heads + 2 * kv_heads of them: queries, keys and values."""

    is_coded = CACHE_FORMATS[cache_type].coded

    @njit  # type: ignore[untyped-decorator]
    def rope_store_head(args: RopeStoreArguments, number: int) -> None:
        heads, kv_heads, width = args.heads, args.kv_heads, args.width
        token, h = number // (heads + 2 * kv_heads), number % (heads + 2 * kv_heads)
        position, slot, pairs = int64_at(args.positions, token), int64_at(args.slots, token), args.pairs
        head = args.qkv + number * 4 * width
        if args.queries:  # gates follow each query head
            head += (token * heads + min(h, heads)) * 4 * width
            if h < heads:
                moved = args.queries + (token * heads + h) * 4 * width
                scale_row(head, 1.0, width, moved)
                head = moved
        if h < heads + kv_heads:
            norm = args.q_norm if h < heads else args.k_norm
            if norm and not args.norms_rotated:
                norm_row(head, norm, width, args.eps, head)
            angles = int64_at(args.angle_rows, token) * 4 * pairs
            rotate(layout, head, pairs, args.cos + angles, args.sin + angles)
            if norm and args.norms_rotated:
                norm_row(head, norm, width, args.eps, head)
        if h < heads:
            if args.query_scale:
                scale_row(head, float_at(args.query_scale, position), width, head)
            if args.hadamard:
                hadamard_row(head, width, args.hadamard)
            return
        value = h >= heads + kv_heads
        if value and args.v_norm:
            norm_row(head, args.v_norm, width, args.eps, head)
        held = args.v if value else args.k
        h -= heads + kv_heads if value else heads
        row = held.rows + slot * held.row_stride + h * held.head_stride
        if args.hadamard:
            hadamard_row(head, width, args.hadamard)
        if is_coded:
            scales = held.scales + slot * held.scale_row_stride + h * held.scale_head_stride
            store_codes(cache_type, head, width, row, scales)
        else:
            store_halves(head, width, row)

    def rope_store(args: RopeStoreArguments, task: int) -> None:
        first = task * args.task_heads
        for number in range(first, min(first + args.task_heads, args.all_heads)):
            rope_store_head(args, number)

    return compile_kernel(rope_store, RopeStoreArguments)


@vector_code
def rotate(e: Emitter, layout: str, head: ir.Value, pairs: ir.Value, cos: ir.Value, sin: ir.Value) -> None:
    """Rotates the first 2 * pairs fp32 at address head, in place; see `RopeLayout`."""
    half = e.b.mul(pairs, e.i64(4))

    def turn(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        c, s = e.load(lane, e.at(cos, at)), e.load(lane, e.at(sin, at))
        near = e.at(head, e.b.mul(at, e.i64(2)) if layout == "pairs" else at)
        if layout == "pairs":
            first, second = e.evens_odds(e.load(vec(F32, 2 * lanes), near))
        else:
            first, second = e.load(lane, near), e.load(lane, e.at(near, half))
        x, y = _rotated(e, first, second, c, s)
        if layout == "pairs":
            e.store(e.interleave(x, y), near)
        else:
            e.store(x, near)
            e.store(y, e.at(near, half))

    e.spans(e.i64(0), pairs, turn)


def _rotated(e: Emitter, x: ir.Value, y: ir.Value, c: ir.Value, s: ir.Value) -> tuple[ir.Value, ir.Value]:
    b = e.b
    return b.fsub(b.fmul(x, c), b.fmul(y, s)), b.fadd(b.fmul(x, s), b.fmul(y, c))


@vector_code
def store_halves(e: Emitter, x: ir.Value, count: ir.Value, out: ir.Value) -> None:
    """Stores `count` fp32 at address x as fp16 at address out."""

    def store(i: ir.Value, lanes: int) -> None:
        values = e.load(vec(F32, lanes), e.at(x, e.b.mul(i, e.i64(4))))
        e.store(e.float_to_half(values), e.at(out, e.b.mul(i, e.i64(2))))

    e.spans(e.i64(0), count, store)
