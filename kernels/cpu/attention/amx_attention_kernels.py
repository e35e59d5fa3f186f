"""The products of prefill attention on AMX tiles of two bf16 terms (gemm/amx.py), in place of the fp32 ones.

Query rows and their softmax weights are the rows of tiles, where ir/amx_ir.py has weights. Keys and values are the
columns, where it has activations.
"""

from __future__ import annotations

from quengine.kernels.cpu.attention.prefill_attention import (
    TILES,
    PrefillArguments,
    WorkArguments,
)
from quengine.kernels.cpu.gemm.amx import BLOCK, HALF_BYTES, STEP, TILE_BYTES
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.ir.amx_bytes_ir import add_floats
from quengine.kernels.cpu.ir.amx_ir import (
    configure_tiles,
    multiply_amx_tiles,
    pack_tile,
    pair_rows,
    release_tiles,
    split_row,
)
from quengine.kernels.cpu.ir.attention_ir import block_run
from quengine.kernels.cpu.ir.prefill_attention_ir import cache_row
from quengine.kernels.cpu.ir.tile_ir import clear_floats, stack_floats
from quengine.kernels.cpu.runtime.argument_types import arguments_at
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.kv.cache_types import CacheType

_HALF = BLOCK // 2  # rows of a tile


def amx_scores_kernel(cache_type: CacheType) -> bytes:
    """Scores of a task's rows and positions; blocks whose rows all precede the positions are skipped.

    The width of a head is a multiple of STEP, at most DEPTH.
    """
    rows_most = TILES * host_tile().rows
    query_floats = -(-rows_most // BLOCK) * 2 * HALF_BYTES // 4
    row_floats, key_floats = BLOCK * DEPTH, BLOCK * DEPTH
    two, line, memory_floats = 2, 4 * DEPTH, 16
    args_at = arguments_at(PrefillArguments)

    def score_block(work: WorkArguments, _task: int) -> None:
        args = args_at(work.call)
        keys, width = args.k, args.width
        queries, rows, panel = (
            stack_floats(query_floats),
            stack_floats(row_floats),
            stack_floats(key_floats),
        )
        configure_tiles(stack_floats(memory_floats))
        for r in range(work.rows):
            split_row(work.queries + r * 4 * DEPTH, width, queries + r // _HALF * HALF_BYTES + r % _HALF * 64)
        unseen = max(0, args.start + work.first_row // args.group + 1 - args.window - work.first)
        for strip in range(unseen // BLOCK * BLOCK, work.positions, BLOCK):
            # A strip begins at a multiple of its length and lies in one block.
            position = work.first + strip
            slot, run = block_run(args.table, position, BLOCK)
            count = min(run, work.positions - strip)
            row = keys.rows + slot * keys.row_stride + work.head * keys.head_stride
            scales = keys.scales + slot * keys.scale_row_stride + work.head * keys.scale_head_stride
            for i in range(BLOCK):
                j = min(i, count - 1)
                cache_row(
                    cache_type,
                    row + j * keys.row_stride,
                    scales + j * keys.scale_row_stride,
                    0,
                    width,
                    rows + 4 * DEPTH * i,
                )
            for k in range(0, width, STEP):
                for half in range(2):
                    place = panel + (k // STEP * 2 + half) * 2 * TILE_BYTES
                    pack_tile(rows + 4 * DEPTH * _HALF * half + 4 * k, 4 * DEPTH, place)
            for t in range(0, work.rows, BLOCK):
                last = work.first_row + min(t + BLOCK, work.rows) - 1
                if args.start + last // args.group >= position:
                    # Also of rows past the last one, for which there is room.
                    target = work.scores + 4 * (DEPTH * t + strip)
                    multiply_amx_tiles(
                        two, two, queries + t // _HALF * HALF_BYTES, width, panel, target, line, 1
                    )
        release_tiles()

    return compile_kernel(score_block, WorkArguments)


def amx_sums_kernel(cache_type: CacheType) -> bytes:
    """Adds the weighted values of a task's positions to its sums. The width of a value is a multiple of STEP."""
    rows_most = TILES * host_tile().rows
    weight_floats = -(-rows_most // BLOCK) * 2 * HALF_BYTES // 4
    row_floats, value_floats = DEPTH * BLOCK, DEPTH * BLOCK
    two, line, sum_floats, memory_floats = 2, 64, TILE_BYTES, 16
    args_at = arguments_at(PrefillArguments)

    def add_values(work: WorkArguments, _task: int) -> None:
        args, base = args_at(work.call), work.first
        values, positions = args.v, work.positions
        weights, rows = stack_floats(weight_floats), stack_floats(row_floats)
        panel, sums = stack_floats(value_floats), stack_floats(sum_floats)
        configure_tiles(stack_floats(memory_floats))
        whole = (positions + STEP - 1) // STEP * STEP
        for r in range(work.rows):
            scores = work.scores + r * 4 * DEPTH
            # Softmax weights are written for whole vectors of visible positions.
            clear_floats(scores + 4 * positions, whole - positions)
            split_row(scores, whole, weights + r // _HALF * HALF_BYTES + r % _HALF * 64)
        first_rows = values.rows + work.head * values.head_stride
        first_scales = values.scales + work.head * values.scale_head_stride
        unseen = max(0, args.start + work.first_row // args.group + 1 - args.window - base)
        for strip in range(0, args.values, BLOCK):
            # Values that no row sees may have been freed or reused: zeros.
            clear_floats(rows, unseen * BLOCK)
            clear_floats(rows + 4 * BLOCK * positions, (whole - positions) * BLOCK)
            done = unseen
            while done < positions:
                slot, run = block_run(args.table, base + done, positions - done)
                for i in range(run):
                    row = first_rows + (slot + i) * values.row_stride
                    scales = first_scales + (slot + i) * values.scale_row_stride
                    cache_row(cache_type, row, scales, strip, strip + BLOCK, rows + 4 * BLOCK * (done + i))
                done += run
            for k in range(0, whole, STEP):
                for half in range(2):
                    place = panel + (k // STEP * 2 + half) * 2 * TILE_BYTES
                    pair_rows(rows + 4 * (BLOCK * k + _HALF * half), 4 * BLOCK, place)
            for t in range(0, work.rows, BLOCK):
                last = work.first_row + min(t + BLOCK, work.rows) - 1
                seen = min(positions, args.start + last // args.group + 1 - base)
                if seen > 0:
                    depth = (seen + STEP - 1) // STEP * STEP
                    multiply_amx_tiles(
                        two, two, weights + t // _HALF * HALF_BYTES, depth, panel, sums, line, 1
                    )
                    for i in range(min(BLOCK, work.rows - t)):
                        source = sums + i // _HALF * 2 * TILE_BYTES + i % _HALF * 64
                        target = work.sums + 4 * (DEPTH * (t + i) + strip)
                        add_floats(source, target, target, _HALF)
                        add_floats(source + TILE_BYTES, target + 4 * _HALF, target + 4 * _HALF, _HALF)
        release_tiles()

    return compile_kernel(add_values, WorkArguments)
