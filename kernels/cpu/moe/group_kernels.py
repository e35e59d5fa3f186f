"""The kernels that group rows by expert, and those that run over groups (groups.py)."""

from __future__ import annotations

from quengine.kernels.cpu.gemm.tiles import DEPTH, MatmulArguments, PackArguments
from quengine.kernels.cpu.ir.row_ir import int64_at
from quengine.kernels.cpu.ir.tile_ir import copy_floats, stack_floats
from quengine.kernels.cpu.moe.groups import (
    GROUP,
    HEAD,
    GroupArguments,
    GroupedMatmulArguments,
    PackGroupsArguments,
    SpreadArguments,
)
from quengine.kernels.cpu.moe.router_kernels import int32_at
from quengine.kernels.cpu.ops.sampling_kernels import put_int64
from quengine.kernels.cpu.runtime.argument_types import arguments_at
from quengine.kernels.cpu.runtime.arguments import size_of
from quengine.kernels.cpu.runtime.atomics import call_kernel, read_lines
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.moe.router_kind import MOST_EXPERTS

_MOST_BLOCK_ROWS = 32


def group_kernel() -> bytes:
    """One task: a stable sort of the slots by expert; slots of experts that are not here come nowhere."""
    start_floats = 2 * (MOST_EXPERTS + 1)  # with a shared expert

    def group(args: GroupArguments, _task: int) -> None:
        experts, slots, table = args.experts, args.slots, args.table
        starts = stack_floats(start_floats)
        for expert in range(args.count):
            put_int64(starts, expert, 0)
        for slot in range(slots):
            expert = int32_at(experts, slot) - args.first
            if 0 <= expert < args.count:
                put_int64(starts, expert, int64_at(starts, expert) + 1)
        groups, blocks, first = 0, 0, 0
        for expert in range(args.count):
            end = first + int64_at(starts, expert)
            put_int64(starts, expert, first)
            while first < end:
                places, at = min(args.most, end - first), HEAD + GROUP * groups
                put_int64(table, at, expert)
                put_int64(table, at + 1, first)
                put_int64(table, at + 2, places)
                put_int64(table, at + 3, blocks)
                groups += 1
                blocks += (places + args.block_rows - 1) // args.block_rows
                first += places
        put_int64(table, 0, groups)
        put_int64(table, 1, blocks)
        for slot in range(slots):
            expert = int32_at(experts, slot) - args.first
            place = -1
            if 0 <= expert < args.count:
                place = int64_at(starts, expert)
                put_int64(starts, expert, place + 1)
                put_int64(args.order, place, slot)
            put_int64(args.places, slot, place)

    return compile_kernel(group, GroupArguments)


def spread_kernel() -> bytes:
    """Task i copies row i to the places of its slots. A row is a multiple of 4 bytes."""

    def spread(args: SpreadArguments, task: int) -> None:
        for slot in range(task * args.used, (task + 1) * args.used):
            place = int64_at(args.places, slot)
            if place >= 0:
                target = args.out + place * args.row_bytes
                copy_floats(args.rows + task * args.row_bytes, target, args.row_bytes // 4)

    return compile_kernel(spread, SpreadArguments)


def pack_groups_kernel() -> bytes:
    """Task i packs the i-th block over all groups."""
    request_at, request_floats = arguments_at(PackArguments), size_of(PackArguments) // 4
    row_floats = _MOST_BLOCK_ROWS * DEPTH

    def pack_groups(args: PackGroupsArguments, task: int) -> None:
        table, block_rows = args.table, args.block_rows
        if task >= int64_at(table, 1):
            return
        at = HEAD
        for group in range(1, int64_at(table, 0)):
            if int64_at(table, HEAD + GROUP * group + 3) <= task:
                at = HEAD + GROUP * group
        first_block, places = int64_at(table, at + 3), int64_at(table, at + 2)
        block, blocks = task - first_block, (places + block_rows - 1) // block_rows
        valid, first = (
            min(block_rows, places - block * block_rows),
            int64_at(table, at + 1) + block * block_rows,
        )
        rows, request = stack_floats(row_floats), request_at(stack_floats(request_floats))
        request.rows = block * block_rows + valid
        request.blocks = blocks
        for k in range(0, args.cols, DEPTH):
            depth = min(DEPTH, args.cols - k)
            source, stride = args.x + first * args.x_stride + 4 * k, args.x_stride
            if args.order:
                for i in range(valid):
                    row = int64_at(args.order, first + i) // args.used
                    copy_floats(args.x + row * stride + 4 * k, rows + 4 * DEPTH * i, depth)
                source, stride = rows, 4 * DEPTH
            request.x = source - block * block_rows * stride
            request.x_stride = stride
            request.cols = depth
            request.packed = (
                args.packed + first_block * args.block_bytes + k // DEPTH * blocks * args.panel_bytes
            )
            call_kernel(args.kernel, request, block)

    return compile_kernel(pack_groups, PackGroupsArguments)


def grouped_matmul_kernel() -> bytes:
    """Task i is task i % tasks of the matmul of group i // tasks."""
    request_at, request_floats = arguments_at(MatmulArguments), size_of(MatmulArguments) // 4

    def grouped_matmul(args: GroupedMatmulArguments, task: int) -> None:
        table, group, shared = args.table, task // args.tasks, args.matmul
        if group >= int64_at(table, 0):
            return
        at = HEAD + GROUP * group
        expert, request = int64_at(table, at), request_at(stack_floats(request_floats))
        request.weights = int64_at(args.addresses, expert)
        request.row_bytes = shared.row_bytes
        request.rows = shared.rows
        request.cols = shared.cols
        request.packed = shared.packed + int64_at(table, at + 3) * args.block_bytes
        request.x_rows = int64_at(table, at + 2)
        request.addend = args.bias + expert * args.bias_stride
        request.addend_stride = 0
        request.y = shared.y + int64_at(table, at + 1) * shared.y_stride
        request.y_stride = shared.y_stride
        request.panel_kernel = shared.panel_kernel
        request.block_weights = shared.block_weights
        request.block_bytes = shared.block_bytes
        request.task_strips = shared.task_strips
        first = task % args.tasks * args.task_rows
        if args.read_first:
            # Into the L2 cache: with few activation rows the read dominates, and in one go it is twice as fast as by a
            # kernel
            # that goes from row to row.
            rows = min(shared.rows - first, args.task_rows)
            read_lines(request.weights + first * shared.row_bytes, rows * shared.row_bytes)
        call_kernel(args.kernel, request, task % args.tasks)

    return compile_kernel(grouped_matmul, GroupedMatmulArguments)
