"""The kernel that chooses a token, with its vector code: sampling.py's definition, operation for operation.

The most likely tokens are held in order while the logits pass by, 64 at a time: after the first ones hardly any 64 have
one that is above the last of them.

Does not know: seeds, penalties, or who wants the token.
"""

# ruff: noqa: ARG001 (numba reads the parameters of an intrinsic; its code generator gets the values by position)
from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from quengine.kernels.cpu.ir.row_ir import emitter, get, put
from quengine.kernels.cpu.ir.vector_ir import F32, I64, vec
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.sampling import EXP2_COEFFICIENTS, HALVINGS, MASS_BITS

F64 = ir.DoubleType()
_LANES = 64
_MASS_EXPONENT = 1023 + MASS_BITS


def choose_kernel() -> bytes:
    """0 logits (fp32, finite or -inf), 1 how many, 2 top k (1 or more); of k candidates 3 logits (fp64), 4 ids and
    5 masses (int64); as the bits of fp64: 6 top p, 7 log of min p, 8 and 9 sharpness at temperature 1 and at the one
    wanted, 10 the uniform number; 11 whether top p is below 1, 12 whether min p is above 0; 13 the token, to be
    written: -1 where there is none.
    """

    def choose(context: int, task: int) -> None:
        held = _take_most_likely(context)
        if held == 0:
            put(context, 13, -1)
            return
        if get(context, 11):
            held = _keep_top_p(context, held)
        if get(context, 12):
            least = fp64(get(context, 3)) + fp64(context + 56)
            while fp64(get(context, 3) + 8 * (held - 1)) < least:
                held -= 1
        total = _accumulate_masses(context, held, fp64(context + 72))
        target = whole(math.floor(fp64(context + 80) * total))
        place = 0
        while get(get(context, 5), place) <= target:
            place += 1
        put(context, 13, get(get(context, 4), place))

    return compile_kernel(choose)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _take_most_likely(context: int) -> int:
    """The k largest logits above -inf with their ids, ranked, ties by the lower id; returns how many there are."""
    logits, count, k = get(context, 0), get(context, 1), get(context, 2)
    values, ids = get(context, 3), get(context, 4)
    held, last = 0, -math.inf
    for start in range(0, count, _LANES):
        end = min(start + _LANES, count)
        if end - start == _LANES and not any_above("above", logits + 4 * start, last):
            continue
        for token in range(start, end):
            value = fp32(logits + 4 * token)
            if not value > last:  # of equal ones the earlier is there already
                continue
            place = min(held, k - 1)
            while place > 0 and fp64(values + 8 * (place - 1)) < value:
                put_fp64(values + 8 * place, fp64(values + 8 * (place - 1)))
                put(ids, place, get(ids, place - 1))
                place -= 1
            put_fp64(values + 8 * place, value)
            put(ids, place, token)
            held = min(held + 1, k)
            if held == k:
                last = fp64(values + 8 * (k - 1))
    return held


@njit(inline="always")  # type: ignore[untyped-decorator]
def _keep_top_p(context: int, held: int) -> int:
    total = _accumulate_masses(context, held, fp64(context + 64))
    target = min(whole(math.ceil(fp64(context + 48) * total)), total)
    place = 0
    while get(get(context, 5), place) < target:
        place += 1
    return place + 1


@njit(inline="always")  # type: ignore[untyped-decorator]
def _accumulate_masses(context: int, held: int, sharpness: float) -> int:
    """The masses of the candidates, each with those before it, to slot 5's memory; returns the last."""
    values, largest, total = get(context, 3), fp64(get(context, 3)), 0
    for i in range(held):
        total += _mass(largest - fp64(values + 8 * i), sharpness)
        put(get(context, 5), i, total)
    return total


@njit(inline="always")  # type: ignore[untyped-decorator]
def _mass(gap: float, sharpness: float) -> int:
    """`sampling.masses` of one gap: every product and sum rounded by itself."""
    halvings = min(gap * sharpness, HALVINGS)
    steps = math.floor(halvings + 0.5)
    halvings -= steps
    power = EXP2_COEFFICIENTS[12]
    for i in range(12):
        power = power * halvings
        power = power + EXP2_COEFFICIENTS[11 - i]
    mass: int = whole(power * fp64_of_bits((_MASS_EXPONENT - whole(steps)) << 52) + 0.5)
    return mass


@intrinsic
def fp64(typingctx: Any, address: Any) -> Any:
    """The fp64 at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        return emitter(context, builder).load(F64, args[0])

    return types.float64(types.int64), codegen


@intrinsic
def put_fp64(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an fp64 to an address."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        emitter(context, builder).store(args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float64), codegen


@intrinsic
def fp32(typingctx: Any, address: Any) -> Any:
    """The fp32 at an address, as fp64."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        return builder.fpext(emitter(context, builder).load(F32, args[0]), F64)

    return types.float64(types.int64), codegen


@intrinsic
def fp64_of_bits(typingctx: Any, bits: Any) -> Any:
    """The fp64 that has these bits."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], F64)

    return types.float64(types.int64), codegen


@intrinsic
def whole(typingctx: Any, value: Any) -> Any:
    """An fp64 cut to an integer, as int64."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        return builder.fptosi(args[0], I64)

    return types.int64(types.float64), codegen


@intrinsic(prefer_literal=True)
def any_above(typingctx: Any, variant: Any, address: Any, limit: Any) -> Any:
    """Whether one of 64 fp32 at an address is above an fp64 that is the value of an fp32."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        e = emitter(context, builder)
        bound = e.splat(builder.fptrunc(args[2], F32), 16)
        above = [
            builder.fcmp_ordered(">", e.load(vec(F32, 16), args[1], 64 * part), bound)
            for part in range(_LANES // 16)
        ]
        while len(above) > 1:
            above = [builder.or_(above[i], above[i + 1]) for i in range(0, len(above), 2)]
        bits = builder.bitcast(above[0], ir.IntType(16))
        return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(16), 0))

    return types.boolean(variant, types.int64, types.float64), codegen
