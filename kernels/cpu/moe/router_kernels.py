"""The kernel that selects and weights a row's experts, with its vector code; defined in kernels/moe/router.py."""

from __future__ import annotations

import math

from llvmlite import ir
from numba import njit, types

from quengine.kernels.cpu.ir.attention_ir import emit_exp, softmax_weights
from quengine.kernels.cpu.ir.row_ir import float_at
from quengine.kernels.cpu.ir.tile_ir import copy_floats, stack_floats
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, I32, I64, Emitter, vec
from quengine.kernels.cpu.moe.router import RouterArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.moe.router import SUM_EPS
from quengine.kernels.moe.router_kind import MOST_EXPERTS, MOST_EXPERTS_USED, Scores

_MOST = 88.0  # exp of more overflows


def router_kernel(scores_kind: Scores) -> bytes:
    """Task i routes row i."""
    most_experts, most_used, head_floats = MOST_EXPERTS, MOST_EXPERTS_USED, 2
    softmax, sigmoid = scores_kind == "softmax", scores_kind == "sigmoid"
    of_chosen = scores_kind == "softmax_of_chosen"

    def router(args: RouterArguments, task: int) -> None:
        logits, count, used = args.logits + task * args.stride, args.count, args.used
        scores, ranks = stack_floats(most_experts), stack_floats(most_experts)
        chosen, head, sums = stack_floats(most_used), stack_floats(head_floats), stack_floats(most_experts)
        experts, weights = args.experts + 4 * args.width * task, args.weights + 4 * args.width * task
        copy_floats(logits, scores, count)
        if args.bias:
            add_floats(scores, args.bias, count)
        if softmax:
            softmax_weights(scores, count, head)
            divide_floats(scores, float_at(head, 1), count)
        if sigmoid:
            sigmoid_floats(scores, count)
        if args.forced:
            copy_floats(args.forced + 4 * used * task, experts, used)
        else:
            rank_floats(scores, ranks, count)
            if args.selection_bias:
                add_floats(ranks, args.selection_bias, count)
            if args.groups > 1:
                _keep_best_groups(ranks, count, args.groups, args.groups_used, sums)
            _choose(ranks, count, used, chosen, experts)
        for i in range(used):
            put_float(weights, i, float_at(scores, int32_at(experts, i)))
        if of_chosen:
            copy_floats(weights, chosen, used)
            softmax_weights(chosen, used, head)
            divide_floats(chosen, float_at(head, 1), used)
            copy_floats(chosen, weights, used)
        total = 1.0
        if args.normalized:
            total = SUM_EPS
            for i in range(used):
                total += float_at(weights, i)
        for i in range(used):
            put_float(weights, i, float_at(weights, i) / total * args.scale)
            if args.expert_scale:
                scale = float_at(args.expert_scale, int32_at(experts, i))
                put_float(weights, i, float_at(weights, i) * scale)
        if args.shared:
            copy_floats(logits + 4 * count, args.shared + 4 * task, 1)
            sigmoid_floats(args.shared + 4 * task, 1)
        if args.width > used:
            put_int32(experts, used, count)
            put_float(weights, used, 1.0)
            if args.gated:
                copy_floats(logits + 4 * count, weights + 4 * used, 1)
                sigmoid_floats(weights + 4 * used, 1)

    return compile_kernel(router, RouterArguments)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _choose(ranks: int, count: int, used: int, values: int, experts: int) -> None:
    """The indices of the `used` highest of `count` fp32, ties to the lower index: int32, in ascending order.

    values: the address of `used` fp32 of scratch.
    """
    held = 0
    for i in range(count):
        value = float_at(ranks, i)
        if held == used and not value > float_at(values, used - 1):
            continue
        place = min(held, used - 1)
        while place > 0 and float_at(values, place - 1) < value:
            put_float(values, place, float_at(values, place - 1))
            put_int32(experts, place, int32_at(experts, place - 1))
            place -= 1
        put_float(values, place, value)
        put_int32(experts, place, i)
        held = min(held + 1, used)
    for i in range(1, used):
        expert, place = int32_at(experts, i), i
        while place > 0 and int32_at(experts, place - 1) > expert:
            put_int32(experts, place, int32_at(experts, place - 1))
            place -= 1
        put_int32(experts, place, expert)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _keep_best_groups(ranks: int, count: int, groups: int, groups_used: int, sums: int) -> None:
    """Group-limited routing: sets fp32 outside the best groups to -inf; a group's score is the sum of its two highest.

    sums: the address of `groups` fp32 of scratch. Ties go to the lower group.
    """
    size = count // groups
    for group in range(groups):
        put_float(sums, group, _best_two(ranks + 4 * group * size, size))
    for group in range(groups):
        own, better = float_at(sums, group), 0
        for other in range(groups):
            theirs = float_at(sums, other)
            if theirs > own or (theirs == own and other < group):
                better += 1
        if better >= groups_used:
            for i in range(group * size, (group + 1) * size):
                put_float(ranks, i, -math.inf)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _best_two(ranks: int, count: int) -> float:
    """The sum of the two highest fp32, or the only one."""
    first, second = -math.inf, -math.inf
    for i in range(count):
        value = float_at(ranks, i)
        if value > first:
            first, second = value, first
        elif value > second:
            second = value
    return first if count == 1 else first + second


@vector_code
def add_floats(e: Emitter, x: ir.Value, addend: ir.Value, count: ir.Value) -> None:
    """x[i] += addend[i], i < count: fp32 at addresses."""

    def add(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        e.store(e.b.fadd(e.load(lane, e.at(x, at)), e.load(lane, e.at(addend, at))), e.at(x, at))

    e.spans(e.i64(0), count, add)


@vector_code(divisor=types.float32)
def divide_floats(e: Emitter, x: ir.Value, divisor: ir.Value, count: ir.Value) -> None:
    """x[i] /= divisor, i < count: fp32 at an address."""

    def divide(i: ir.Value, lanes: int) -> None:
        at = e.at(x, e.b.mul(i, e.i64(4)))
        e.store(e.b.fdiv(e.load(vec(F32, lanes), at), e.splat(divisor, lanes)), at)

    e.spans(e.i64(0), count, divide)


@vector_code
def sigmoid_floats(e: Emitter, x: ir.Value, count: ir.Value) -> None:
    """x[i] = 1 / (1 + exp(-x[i])), i < count: fp32 at an address."""

    def sigmoid(i: ir.Value, lanes: int) -> None:
        at, most, one = e.at(x, e.b.mul(i, e.i64(4))), e.const(vec(F32, lanes), _MOST), 1.0
        power = e.b.fneg(e.load(vec(F32, lanes), at))
        power = e.b.select(e.b.fcmp_ordered(">", power, most), most, power)
        ones = e.const(power.type, one)
        e.store(e.b.fdiv(ones, e.b.fadd(ones, emit_exp(e, power))), at)

    e.spans(e.i64(0), count, sigmoid)


@vector_code
def rank_floats(e: Emitter, x: ir.Value, out: ir.Value, count: ir.Value) -> None:
    """out[i] = x[i], and -inf for NaN, i < count: fp32 at addresses."""

    def rank(i: ir.Value, lanes: int) -> None:
        at = e.b.mul(i, e.i64(4))
        value = e.load(vec(F32, lanes), e.at(x, at))
        least = e.const(value.type, float("-inf"))
        e.store(e.b.select(e.b.fcmp_ordered("ord", value, value), value, least), e.at(out, at))

    e.spans(e.i64(0), count, rank)


@vector_code(value=types.float32)
def put_float(e: Emitter, array: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """Stores element `index` of an fp32 array at an address."""
    e.store(value, e.at(array, e.b.mul(index, e.i64(4))))


@vector_code(result=types.int64)
def int32_at(e: Emitter, array: ir.Value, index: ir.Value) -> ir.Value:
    """Element `index` of an int32 array at an address."""
    return e.b.sext(e.load(I32, e.at(array, e.b.mul(index, e.i64(4)))), I64)


@vector_code
def put_int32(e: Emitter, array: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """Stores element `index` of an int32 array at an address."""
    e.store(e.b.trunc(value, I32), e.at(array, e.b.mul(index, e.i64(4))))
