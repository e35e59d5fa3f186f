"""The kernel between the QKV matmul and attention (rope_store.py), with its vector code.

Does not know: the attention that follows.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.cpu.ir.row_ir import emitter, get, scale_row
from quengine.kernels.cpu.ir.vector_ir import F32, I8, I32, Emitter, vec
from quengine.kernels.cpu.ops.rms_norm_kernels import norm_row
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.rope import RopeLayout


def rope_store_kernel(layout: RopeLayout, q8_0: bool) -> bytes:
    """Task t * H + h: head h of the H = heads + 2 * kv_heads of queries, keys, values, of row t.

    0 qkv, 1 query heads, 2 key/value heads, 3 head_dim, 4 address of the rows' positions; 5 cosines, 6 sines (fp32),
    7 their width; keys: 8 address, 9 bytes from position to position, 10 from head to head; values: 11, 12, 13;
    14 query norm, 15 key norm (0: none), 16 eps (the bits of an fp32), 17 query scale (fp32 by position; 0: none);
    scales of keys in a q8_0 cache: 18 address, 19 bytes from position to position, 20 from head to head; of values:
    21, 22, 23; 24 address of the rows' places in the cache.
    """
    variant = layout

    def rope_store_head(context: int, task: int) -> None:
        heads, kv_heads, width = get(context, 1), get(context, 2), get(context, 3)
        token, h = task // (heads + 2 * kv_heads), task % (heads + 2 * kv_heads)
        position, slot, pairs = get(get(context, 4), token), get(get(context, 24), token), get(context, 7)
        head = get(context, 0) + task * 4 * width
        if h < heads + kv_heads:
            norm = get(context, 14) if h < heads else get(context, 15)
            if norm:
                norm_row(variant, head, norm, width, context + 8 * 16, head)
            angles = position * 4 * pairs
            _rotate(variant, head, pairs, get(context, 5) + angles, get(context, 6) + angles)
        if h < heads:
            if get(context, 17):
                scale_row(variant, head, get(context, 17) + 4 * position, width, head)
            return
        # Where keys are described in the parameters, and values behind them.
        value = h >= heads + kv_heads
        at, scales_at = (11, 21) if value else (8, 18)
        h -= heads + kv_heads if value else heads
        row = get(context, at) + slot * get(context, at + 1) + h * get(context, at + 2)
        if q8_0:
            scales = get(context, scales_at) + slot * get(context, scales_at + 1)
            _store_codes(variant, head, width, row, scales + h * get(context, scales_at + 2))
        else:
            _store_halves(variant, head, width, row)

    return compile_kernel(rope_store_head)


@intrinsic(prefer_literal=True)
def _rotate(typingctx: Any, variant: Any, head: Any, pairs: Any, cos: Any, sin: Any) -> Any:
    """Rotate the first 2 * pairs fp32 at address head, in place. `variant`: the layout, "pairs/..." or "halves/..."."""
    layout = variant.literal_value.split("/")[0]

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, head, pairs, cos, sin = args
        e = emitter(context, builder)
        half = builder.mul(pairs, e.i64(4))

        def turn(i: ir.Value, lanes: int) -> None:
            at, lane = builder.mul(i, e.i64(4)), vec(F32, lanes)
            c, s = e.load(lane, e.at(cos, at)), e.load(lane, e.at(sin, at))
            near = e.at(head, builder.mul(at, e.i64(2)) if layout == "pairs" else at)
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
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 4), codegen


def _rotated(e: Emitter, x: ir.Value, y: ir.Value, c: ir.Value, s: ir.Value) -> tuple[ir.Value, ir.Value]:
    b = e.b
    return b.fsub(b.fmul(x, c), b.fmul(y, s)), b.fadd(b.fmul(x, s), b.fmul(y, c))


@intrinsic(prefer_literal=True)
def _store_halves(typingctx: Any, variant: Any, x: Any, count: Any, out: Any) -> Any:
    """`count` fp32 at address x as fp16 at address out."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, x, count, out = args
        e = emitter(context, builder)

        def store(i: ir.Value, lanes: int) -> None:
            values = e.load(vec(F32, lanes), e.at(x, builder.mul(i, e.i64(4))))
            e.store(e.float_to_half(values), e.at(out, builder.mul(i, e.i64(2))))

        e.spans(e.i64(0), count, store)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def _store_codes(typingctx: Any, variant: Any, x: Any, count: Any, codes: Any, scales: Any) -> Any:
    """`count` fp32 at address x, a multiple of 32, as q8_0: int8 codes and fp16 scales (kernels/kv/kv_q8_0.py)."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _, x, count, codes, scales = args
        e = emitter(context, builder)
        lanes, bits = vec(F32, 8), vec(I32, 8)
        magic, zero = e.const(lanes, 12582912.0), e.const(lanes, 0.0)

        def group(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            address = e.at(x, builder.mul(i, e.i64(4)))
            values = [e.load(lanes, address, 32 * k) for k in range(4)]
            sizes = [builder.bitcast(e.and_(builder.bitcast(v, bits), 0x7FFFFFFF), lanes) for v in values]
            top = sizes[0]
            for size in sizes[1:]:
                top = _larger(e, top, size)
            while top.type.count > 1:
                top = _larger(e, *e.halves(top))
            scale = builder.fdiv(top, e.const(vec(F32, 1), 127.0))
            e.store(e.float_to_half(scale), builder.add(scales, builder.udiv(i, e.i64(16))))
            wide = e.splat_lane(scale, 0, 8)
            live = builder.fcmp_ordered(">", wide, zero)
            for k, value in enumerate(values):
                ratio = builder.select(live, builder.fdiv(value, wide), zero)
                # Adding 1.5 * 2^23 rounds to an integer, halves to even, and leaves it in the low bits.
                code = builder.bitcast(builder.fadd(ratio, magic), bits)
                e.store(builder.trunc(code, vec(I8, 8)), builder.add(codes, i), 8 * k)
            return []

        e.loop(e.i64(0), count, 32, [], group)
        return context.get_dummy_value()

    return types.void(variant, *[types.int64] * 4), codegen


def _larger(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    return e.b.select(e.b.fcmp_ordered(">", x, y), x, y)
