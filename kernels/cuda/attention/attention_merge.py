"""Combines parts of attention in registers, of a program's warps or a sequence's KV splits, and stores the result.

A part of a group's heads has row_max (base 2), row_sum, and acc, the weighted sum of values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.cuda.gemm.fp16_operand import store_operand
from quengine.kernels.cuda.gemv.activations import quantize_group

LOWEST = gl.constexpr(-1e30)
"""The score of a masked key: finite, so that the difference of two is a number."""


@gluon.jit
def merged(row_max, row_sum, acc, F: gl.constexpr):
    """Combines parts of heads, [parts, HEADS], [parts, HEADS], [parts, HEADS, HEAD_DIM], by softmax weights;
    the first dimension is reduced.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, F))
    all_max = gl.max(row_max, 0)
    weights = gl.exp2(row_max - gl.expand_dims(all_max, 0))
    all_sum = gl.convert_layout(gl.sum(row_sum * weights, 0), ROWS, assert_trivial=True)
    all_max = gl.convert_layout(all_max, ROWS, assert_trivial=True)
    return all_max, all_sum, gl.sum(acc * gl.expand_dims(weights, 2), 0)


@gluon.jit
def _load_splits(
    acc_ptr, state_ptr, head, first, splits,
    HEADS: gl.constexpr, SHAPE: gl.constexpr, SPLITS: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Loads splits first, first + 1, ... of a group's heads, stored by other programs, as arguments of
    `merged`. Heads and splits out of range are loads of the last ones, with weight 0.
    """
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    STATES: gl.constexpr = gl.SliceLayout(2, F)
    PARTS: gl.constexpr = F.size_per_thread[0]
    s = gl.expand_dims(first + gl.arange(0, PARTS, layout=gl.SliceLayout(1, STATES)), 1)
    member = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(0, STATES)), 0)
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, F)))
    at = (head + gl.minimum(member, SHAPE.group - 1)) * SPLITS + gl.minimum(s, splits - 1)
    # .cg: other multiprocessors wrote these during this launch, so L1 must be bypassed
    state = gl.load(state_ptr.to(gl.pointer_type(gl.int64)) + at, cache_modifier=".cg")
    address = acc_ptr + gl.expand_dims(at, 2) * HEAD_DIM + gl.expand_dims(gl.expand_dims(column, 0), 0)
    acc = gl.load(address, cache_modifier=".cg")
    row_max = gl.where(s < splits, state.to(gl.int32).to(gl.float32, bitcast=True), LOWEST)
    return row_max, (state >> 32).to(gl.int32).to(gl.float32, bitcast=True), acc


@gluon.jit
def merged_splits(
    acc_ptr, state_ptr, head, splits,
    PARTS: gl.constexpr, HEADS: gl.constexpr, SHAPE: gl.constexpr, SPLITS: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Combines all KV splits of a group's heads, PARTS at a time: row_sum [HEADS] and acc fp32 [HEADS, HEAD_DIM]."""
    ROWS: gl.constexpr = gl.SliceLayout(0, F)
    STATE: gl.constexpr = gl.SliceLayout(1, ROWS)
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    G: gl.constexpr = gl.BlockedLayout(
        [PARTS, 1, F.size_per_thread[2]], F.threads_per_warp, F.warps_per_cta, F.order
    )
    row_max = gl.full([HEADS], LOWEST, gl.float32, STATE)
    row_sum = gl.zeros([HEADS], gl.float32, STATE)
    acc = gl.zeros([HEADS, HEAD_DIM], gl.float32, ROWS)
    for s in range(0, splits, PARTS):
        parts = _load_splits(acc_ptr, state_ptr, head, s, splits, HEADS, SHAPE, SPLITS, G)
        part_max, part_sum, part_acc = merged(parts[0], parts[1], parts[2], G)
        part_max = gl.convert_layout(part_max, STATE, assert_trivial=True)
        part_sum = gl.convert_layout(part_sum, STATE, assert_trivial=True)
        part_acc = gl.convert_layout(part_acc, ROWS, assert_trivial=True)
        new_max = gl.maximum(row_max, part_max)
        old = gl.exp2(row_max - new_max)
        new = gl.exp2(part_max - new_max)
        row_sum = row_sum * old + part_sum * new
        acc = acc * gl.expand_dims(old, 1) + part_acc * gl.expand_dims(new, 1)
        row_max = new_max
    return row_sum, acc


@gluon.jit
def store_heads(
    out, head, outputs, sequence, stride,
    SHAPE: gl.constexpr, HEADS: gl.constexpr, QUANTIZE: gl.constexpr, FORM: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Stores fp32 [HEADS, HEAD_DIM] as heads head, head + 1, ... of a sequence's output: fp32, quantized for
    q-dot, or, if FORM is not negative, fp16 in row `sequence` of an operand of that layout.
    """
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    if QUANTIZE:
        GROUPS: gl.constexpr = HEAD_DIM // 32
        L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
        x = gl.convert_layout(gl.reshape(out, [HEADS * GROUPS, 32]), L)
        high, low, scale, sums = quantize_group(x)
        n = gl.arange(0, HEADS * GROUPS, layout=gl.SliceLayout(1, L))
        i = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, L)), 0)
        group = head * GROUPS + n
        inside = n < SHAPE.group * GROUPS
        at = gl.expand_dims(group, 1) * 32 + i
        gl.store(outputs[0] + at, high, mask=gl.expand_dims(inside, 1))
        gl.store(outputs[1] + at, low, mask=gl.expand_dims(inside, 1))
        gl.store(outputs[2] + group, scale, mask=inside)
        S: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [gl.num_warps(), 1], [1, 0])
        n = gl.expand_dims(gl.arange(0, HEADS * GROUPS, layout=gl.SliceLayout(1, S)), 1)
        half = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, S)), 0)
        at = (head * GROUPS + n) * 2 + half
        gl.store(outputs[3] + at, gl.convert_layout(sums, S), mask=n < SHAPE.group * GROUPS)
    else:
        ROWS: gl.constexpr = gl.SliceLayout(0, F)
        member = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS)), 1)
        column = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ROWS)), 0)
        column += (head + member) * HEAD_DIM
        if FORM >= 0:
            store_operand(outputs[0], sequence, column, stride, out, member + column * 0 < SHAPE.group, FORM)
        else:
            gl.store(outputs[0] + column, out, mask=member < SHAPE.group)
