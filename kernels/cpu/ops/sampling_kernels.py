"""The kernel that samples a token, with its vector code: kernels/sampling.py, operation for operation.

The top-k candidates are kept sorted while the logits are read, 64 at a time; after the first few groups hardly any has
a logit above the last candidate.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import njit, types

from quengine.kernels.cpu.ir.row_ir import int64_at
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, F64, I64, Emitter, vec
from quengine.kernels.cpu.ops.sampling import ChooseArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.sampling import EXP2_COEFFICIENTS, HALVINGS, MASS_BITS

_LANES = 64
_MASS_EXPONENT = 1023 + MASS_BITS


def choose_kernel() -> bytes:
    """One task: writes the sampled token to `ChooseArguments`."""

    def choose(args: ChooseArguments, _task: int) -> None:
        held = _take_most_likely(args)
        if held == 0:
            args.token = -1
            return
        if args.has_top_p:
            held = _keep_top_p(args, held)
        if args.has_min_p:
            least = fp64(args.logits) + args.log_min_p
            while fp64(args.logits + 8 * (held - 1)) < least:
                held -= 1
        total = _accumulate_masses(args, held, args.sharpness)
        target = whole(math.floor(args.uniform * total))
        place = 0
        while int64_at(args.masses, place) <= target:
            place += 1
        args.token = int64_at(args.ids, place)

    return compile_kernel(choose, ChooseArguments)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _take_most_likely(args: ChooseArguments) -> int:
    """The k largest logits above -inf with their ids, sorted, ties by the lower id; returns their number."""
    logits, count, k = args.all_logits, args.count, args.top_k
    values, ids = args.logits, args.ids
    held, last = 0, -math.inf
    for start in range(0, count, _LANES):
        end = min(start + _LANES, count)
        if end - start == _LANES and not any_above(logits + 4 * start, last):
            continue
        for token in range(start, end):
            value = fp32(logits + 4 * token)
            if not value > last:  # of equal logits the lower id is already there
                continue
            place = min(held, k - 1)
            while place > 0 and fp64(values + 8 * (place - 1)) < value:
                put_fp64(values + 8 * place, fp64(values + 8 * (place - 1)))
                put_int64(ids, place, int64_at(ids, place - 1))
                place -= 1
            put_fp64(values + 8 * place, value)
            put_int64(ids, place, token)
            held = min(held + 1, k)
            if held == k:
                last = fp64(values + 8 * (k - 1))
    return held


@njit(inline="always")  # type: ignore[untyped-decorator]
def _keep_top_p(args: ChooseArguments, held: int) -> int:
    total = _accumulate_masses(args, held, args.sharpness_at_1)
    target = min(whole(math.ceil(args.top_p * total)), total)
    place = 0
    while int64_at(args.masses, place) < target:
        place += 1
    return place + 1


@njit(inline="always")  # type: ignore[untyped-decorator]
def _accumulate_masses(args: ChooseArguments, held: int, sharpness: float) -> int:
    """The cumulative masses of the candidates; returns the last."""
    values, largest, total = args.logits, fp64(args.logits), 0
    for i in range(held):
        total += _mass(largest - fp64(values + 8 * i), sharpness)
        put_int64(args.masses, i, total)
    return total


@njit(inline="always")  # type: ignore[untyped-decorator]
def _mass(gap: float, sharpness: float) -> int:
    """`sampling.masses` of one gap, with every product and sum rounded separately."""
    halvings = min(gap * sharpness, HALVINGS)
    steps = math.floor(halvings + 0.5)
    halvings -= steps
    power = EXP2_COEFFICIENTS[12]
    for i in range(12):
        power = power * halvings
        power = power + EXP2_COEFFICIENTS[11 - i]
    mass: int = whole(power * fp64_of_bits((_MASS_EXPONENT - whole(steps)) << 52) + 0.5)
    return mass


@vector_code(result=types.float64)
def fp64(e: Emitter, address: ir.Value) -> ir.Value:
    """The fp64 at an address."""
    return e.load(F64, address)


@vector_code(value=types.float64)
def put_fp64(e: Emitter, address: ir.Value, value: ir.Value) -> None:
    """Stores an fp64 at an address."""
    e.store(value, address)


@vector_code
def put_int64(e: Emitter, array: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """Stores element `index` of an int64 array at an address."""
    e.store(value, e.at(array, e.b.mul(index, e.i64(8))))


@vector_code(result=types.float64)
def fp32(e: Emitter, address: ir.Value) -> ir.Value:
    """The fp32 at an address, as fp64."""
    return e.b.fpext(e.load(F32, address), F64)


@vector_code(result=types.float64)
def fp64_of_bits(e: Emitter, bits: ir.Value) -> ir.Value:
    """The fp64 with these bits."""
    return e.b.bitcast(bits, F64)


@vector_code(result=types.int64, value=types.float64)
def whole(e: Emitter, value: ir.Value) -> ir.Value:
    """An fp64 truncated to int64."""
    return e.b.fptosi(value, I64)


@vector_code(result=types.boolean, limit=types.float64)
def any_above(e: Emitter, address: ir.Value, limit: ir.Value) -> ir.Value:
    """Whether any of 64 fp32 at an address exceeds limit, an fp64 that an fp32 represents exactly."""
    bound = e.splat(e.b.fptrunc(limit, F32), 16)
    above = [
        e.b.fcmp_ordered(">", e.load(vec(F32, 16), address, 64 * part), bound) for part in range(_LANES // 16)
    ]
    while len(above) > 1:
        above = [e.b.or_(above[i], above[i + 1]) for i in range(0, len(above), 2)]
    bits = e.b.bitcast(above[0], ir.IntType(16))
    return e.b.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(16), 0))
