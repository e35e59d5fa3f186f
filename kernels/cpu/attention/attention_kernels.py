"""The kernels of single tokens' attention: stretches of the visible positions, then what joins them (attention.py).

Each function here compiles a kernel for the thread team; its docstring lists the parameter slots. Addresses and
strides are bytes.

Does not know: tensors.
"""

from __future__ import annotations

from quengine.kernels.cpu.attention.attention import PART_HEAD_BYTES, STRETCH
from quengine.kernels.cpu.ir.attention_ir import (
    add_weighted_codes,
    add_weighted_halves,
    block_run,
    combine_parts,
    dot_codes,
    fill_floats,
    scale_f32,
    softmax_weights,
)
from quengine.kernels.cpu.ir.row_ir import dot_float_row, get, store_f32
from quengine.kernels.cpu.ir.tile_ir import stack_floats
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def stretch_kernel(q8_0: bool) -> bytes:
    """Task s * key/value heads + h: the query heads of key/value head h over stretch s of all tokens.

    0 q, 1 head_dim, 2 query heads per key/value head, 3 address of a `Visible`'s tokens; keys: 4 address, 5 bytes from
    row to row, 6 from head to head; values: 7, 8, 9; 10 parts, 11 bytes per part, 12 address of a `Visible`'s
    stretches, 13 scale (the bits of an fp32); scales of keys in a q8_0 cache: 14 address, 15 bytes from row to row, 16
    from head to head; of values: 17, 18, 19; 20 bytes from token to token of q, 21 key/value heads.
    """
    halves, stamp = "F16/row", "attention"

    def stretch_attention(context: int, task: int) -> None:
        width, group, kv_heads = get(context, 1), get(context, 2), get(context, 21)
        stretch, head = task // kv_heads, task % kv_heads
        token = get(get(context, 12), stretch)
        visible = get(context, 3) + 32 * token
        skipped = (stretch - get(visible, 2)) * STRETCH
        start, count, table = (
            get(visible, 0) + skipped,
            min(STRETCH, get(visible, 1) - skipped),
            get(visible, 3),
        )
        k = get(context, 4) + head * get(context, 6)
        v = get(context, 7) + head * get(context, 9)
        k_scale = get(context, 14) + head * get(context, 16)
        v_scale = get(context, 17) + head * get(context, 19)
        scores = stack_floats(STRETCH)
        for i in range(head * group, (head + 1) * group):
            q = get(context, 0) + token * get(context, 20) + i * 4 * width
            part = get(context, 10) + (stretch * kv_heads * group + i) * get(context, 11)
            # Positions in adjacent rows: all of them, or those of one block after the other.
            done, row, run = 0, start, count
            while done < count:
                if table:
                    row, run = block_run(table, start + done, count - done)
                for position in range(run):
                    key = k + (row + position) * get(context, 5)
                    if q8_0:
                        dot = dot_codes(stamp, key, k_scale + (row + position) * get(context, 15), width, q)
                    else:
                        dot = dot_float_row(halves, key, width, q)
                    store_f32(scale_f32(dot, context + 8 * 13), scores + 4 * (done + position))
                done += run
            softmax_weights(stamp, scores, count, part)
            out = part + PART_HEAD_BYTES
            fill_floats(stamp, out, width)
            done, row, run = 0, start, count
            while done < count:
                if table:
                    row, run = block_run(table, start + done, count - done)
                weights, rows = scores + 4 * done, v + row * get(context, 8)
                if q8_0:
                    scales = v_scale + row * get(context, 18)
                    add_weighted_codes(
                        stamp, weights, run, rows, get(context, 8), scales, get(context, 18), width, out
                    )
                else:
                    add_weighted_halves(stamp, weights, run, rows, get(context, 8), width, out)
                done += run

    return compile_kernel(stretch_attention)


def join_kernel() -> bytes:
    """Task i * query heads + h: joins the parts of query head h of token i.

    0 parts, 1 address of a `Visible`'s tokens, 2 bytes per part, 3 head_dim, 4 output (fp32), 5 query heads.
    """
    stamp = "attention"

    def join_stretches(context: int, task: int) -> None:
        part_bytes, width, heads = get(context, 2), get(context, 3), get(context, 5)
        visible = get(context, 1) + 32 * (task // heads)
        stretches = (get(visible, 1) + STRETCH - 1) // STRETCH
        parts = get(context, 0) + (get(visible, 2) * heads + task % heads) * part_bytes
        combine_parts(stamp, parts, stretches, heads * part_bytes, width, get(context, 4) + task * 4 * width)

    return compile_kernel(join_stretches)
