"""The kernels of decode attention: one over KV splits of the visible positions, one that combines the splits."""

from __future__ import annotations

from quengine.kernels.cpu.attention.attention import (
    KV_SPLIT,
    PART_HEAD_BYTES,
    CombineArguments,
    SplitArguments,
    VisibleRow,
)
from quengine.kernels.cpu.ir.attention_ir import (
    HEADS_AT_ONCE,
    add_weighted_codes,
    add_weighted_halves,
    block_run,
    combine_parts,
    combine_parts_and_sink,
    dot_codes,
    dot_halves,
    softmax_weights,
)
from quengine.kernels.cpu.ir.cache_ir import hadamard_row
from quengine.kernels.cpu.ir.gate_ir import cap_floats
from quengine.kernels.cpu.ir.row_ir import float_at, int64_at
from quengine.kernels.cpu.ir.tile_ir import clear_floats, stack_floats
from quengine.kernels.cpu.runtime.argument_types import arguments_at
from quengine.kernels.cpu.runtime.arguments import size_of
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.kv.cache_types import CACHE_FORMATS, CacheType


def kv_split_kernel(cache_type: CacheType) -> bytes:
    """Task s * kv_heads + h: the query heads of key/value head h over KV split s, counted over all tokens."""
    visible_at, visible_bytes, at_once = arguments_at(VisibleRow), size_of(VisibleRow), HEADS_AT_ONCE
    is_coded = CACHE_FORMATS[cache_type].coded
    score_floats, score_bytes = HEADS_AT_ONCE * KV_SPLIT, 4 * KV_SPLIT

    def attend_split(args: SplitArguments, task: int) -> None:
        width, group, kv_heads, values = args.width, args.group, args.kv_heads, args.values
        split, head = task // kv_heads, task % kv_heads
        token = int64_at(args.owners, split)
        visible = visible_at(args.visible + visible_bytes * token)
        skipped = (split - visible.first_split) * KV_SPLIT
        start, count, table = visible.first + skipped, min(KV_SPLIT, visible.count - skipped), visible.table
        k = args.k.rows + head * args.k.head_stride
        v = args.v.rows + head * args.v.head_stride
        k_scale = args.k.scales + head * args.k.scale_head_stride
        v_scale = args.v.scales + head * args.v.scale_head_stride
        scores = stack_floats(score_floats)
        for first in range(head * group, (head + 1) * group, at_once):
            heads = min(at_once, (head + 1) * group - first)
            q = args.q + token * args.q_stride + first * 4 * width
            part = args.parts + (split * kv_heads * group + first) * args.part_bytes
            out = part + PART_HEAD_BYTES
            done = 0  # positions so far; each turn handles a run within one block
            while done < count:
                row, run = block_run(table, start + done, count - done)
                for position in range(run):
                    key, score = k + (row + position) * args.k.row_stride, scores + 4 * (done + position)
                    if is_coded:
                        key_scale = k_scale + (row + position) * args.k.scale_row_stride
                        dot_codes(cache_type, heads, key, key_scale, width, q, args.scale, score, score_bytes)
                    else:
                        dot_halves(heads, key, width, q, args.scale, score, score_bytes)
                done += run
            for i in range(heads):
                if args.cap > 0:
                    cap_floats(scores + i * score_bytes, 0, count, args.cap)
                softmax_weights(scores + i * score_bytes, count, part + i * args.part_bytes)
                clear_floats(out + i * args.part_bytes, values)
            done = 0
            while done < count:
                row, run = block_run(table, start + done, count - done)
                weights, rows = scores + 4 * done, v + row * args.v.row_stride
                if is_coded:
                    stride, scale_stride, out_stride = (
                        args.v.row_stride,
                        args.v.scale_row_stride,
                        args.part_bytes,
                    )
                    scales = v_scale + row * scale_stride
                    add_weighted_codes(
                        cache_type, heads, weights, score_bytes, run, rows, stride, scales, scale_stride,
                        values, out, out_stride,
                    )  # fmt: skip
                else:
                    add_weighted_halves(
                        *(heads, weights, score_bytes, run, rows, args.v.row_stride),
                        *(values, out, args.part_bytes),
                    )
                done += run

    return compile_kernel(attend_split, SplitArguments)


def combine_kernel(sinks: bool = False) -> bytes:
    """Task i * heads + h: combines the KV splits of query head h of token i, and its sink if there are sinks."""
    visible_at, visible_bytes = arguments_at(VisibleRow), size_of(VisibleRow)

    def combine_splits(args: CombineArguments, task: int) -> None:
        width, heads = args.width, args.heads
        visible = visible_at(args.visible + visible_bytes * (task // heads))
        splits = (visible.count + KV_SPLIT - 1) // KV_SPLIT
        parts = args.parts + (visible.first_split * heads + task % heads) * args.part_bytes
        out = args.out + task * 4 * width
        combine_parts(parts, splits, heads * args.part_bytes, width, out)
        if args.hadamard:
            hadamard_row(out, width, args.hadamard)

    def combine_splits_and_sink(args: CombineArguments, task: int) -> None:
        width, heads = args.width, args.heads
        visible = visible_at(args.visible + visible_bytes * (task // heads))
        splits = (visible.count + KV_SPLIT - 1) // KV_SPLIT
        parts = args.parts + (visible.first_split * heads + task % heads) * args.part_bytes
        sink, out = float_at(args.sinks, task % heads), args.out + task * 4 * width
        combine_parts_and_sink(parts, splits, heads * args.part_bytes, width, sink, out)
        if args.hadamard:
            hadamard_row(out, width, args.hadamard)

    return compile_kernel(combine_splits_and_sink if sinks else combine_splits, CombineArguments)
