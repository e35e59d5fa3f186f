"""Parts of attention in registers put together: warps of a program, slices of a sequence, and the result stored.

Knows what a part is (its largest score, its sum of weights, its weighted sum of values, for each head of a group) and
the forms of a result; not how a part comes about.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.cuda.gemm.fp16_operand import store_operand
from quengine.kernels.cuda.gemv.activations import quantize_group

LOWEST = gl.constexpr(-1e30)
"""The score of a key that is not there: finite, so that differences of two of them are numbers."""


@gluon.jit
def merged(tops, totals, mixed, F: gl.constexpr):
    """Softmax-weighted sum of parts of heads [parts, HEADS], [parts, HEADS], [parts, HEADS, HEAD_DIM]: the first
    dimension gone."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, F))
    top = gl.max(tops, 0)
    weights = gl.exp2(tops - gl.expand_dims(top, 0))
    total = gl.convert_layout(gl.sum(totals * weights, 0), ROWS, assert_trivial=True)
    top = gl.convert_layout(top, ROWS, assert_trivial=True)
    return top, total, gl.sum(mixed * gl.expand_dims(weights, 2), 0)


@gluon.jit
def _load_slices(
    mixed_ptr, state_ptr, head, first, slices,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, SLICES: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Slices first, first + 1, ... of a group's heads, which other programs have left: what `_merged` takes."""
    STATES: gl.constexpr = gl.SliceLayout(2, F)
    PARTS: gl.constexpr = F.size_per_thread[0]
    s = gl.expand_dims(first + gl.arange(0, PARTS, layout=gl.SliceLayout(1, STATES)), 1)
    member = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(0, STATES)), 0)
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, F)))
    live = (s < slices) & (member < GROUP)
    at = (head + member) * SLICES + s
    # .cg: other multiprocessors wrote these during this launch, so L1 must not answer
    tops = gl.load(state_ptr + at * 2, mask=live, other=LOWEST, cache_modifier=".cg")
    totals = gl.load(state_ptr + at * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
    address = mixed_ptr + gl.expand_dims(at, 2) * HEAD_DIM + gl.expand_dims(gl.expand_dims(column, 0), 0)
    return tops, totals, gl.load(address, mask=gl.expand_dims(live, 2), other=0.0, cache_modifier=".cg")


@gluon.jit
def merged_slices(
    mixed_ptr, state_ptr, head, slices,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, SLICES: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """All slices of a group's heads: total [HEADS] and fp32 [HEADS, HEAD_DIM]."""
    ROWS: gl.constexpr = gl.SliceLayout(0, F)
    top = gl.full([HEADS], LOWEST, gl.float32, gl.SliceLayout(1, ROWS))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, ROWS))
    out = gl.zeros([HEADS, HEAD_DIM], gl.float32, ROWS)
    for s in range(0, slices, F.size_per_thread[0]):
        parts = _load_slices(mixed_ptr, state_ptr, head, s, slices, GROUP, HEADS, HEAD_DIM, SLICES, F)
        new_top, new_total, new_out = merged(parts[0], parts[1], parts[2], F)
        larger = gl.maximum(top, new_top)
        old = gl.exp2(top - larger)
        new = gl.exp2(new_top - larger)
        total = total * old + new_total * new
        out = out * gl.expand_dims(old, 1) + new_out * gl.expand_dims(new, 1)
        top = larger
    return total, out


@gluon.jit
def store_heads(
    out, head, outputs, sequence, stride,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROUND: gl.constexpr, FORM: gl.constexpr,
    F: gl.constexpr,
):  # fmt: skip
    """fp32 [HEADS, HEAD_DIM] as heads head, head + 1, ... of a sequence's output: fp32, rounded for the q-dot, or,
    where FORM is not negative, fp16 in row `sequence` of half rows of that form."""
    if ROUND:
        GROUPS: gl.constexpr = HEAD_DIM // 32
        L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
        x = gl.convert_layout(gl.reshape(out, [HEADS * GROUPS, 32]), L)
        high, low, scale, sums = quantize_group(x)
        n = gl.arange(0, HEADS * GROUPS, layout=gl.SliceLayout(1, L))
        i = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, L)), 0)
        group = head * GROUPS + n
        inside = n < GROUP * GROUPS
        at = gl.expand_dims(group, 1) * 32 + i
        gl.store(outputs[0] + at, high, mask=gl.expand_dims(inside, 1))
        gl.store(outputs[1] + at, low, mask=gl.expand_dims(inside, 1))
        gl.store(outputs[2] + group, scale, mask=inside)
        S: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [gl.num_warps(), 1], [1, 0])
        n = gl.expand_dims(gl.arange(0, HEADS * GROUPS, layout=gl.SliceLayout(1, S)), 1)
        half = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, S)), 0)
        at = (head * GROUPS + n) * 2 + half
        gl.store(outputs[3] + at, gl.convert_layout(sums, S), mask=n < GROUP * GROUPS)
    else:
        ROWS: gl.constexpr = gl.SliceLayout(0, F)
        member = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, ROWS)), 1)
        column = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ROWS)), 0)
        column += (head + member) * HEAD_DIM
        if FORM >= 0:
            store_operand(outputs[0], sequence, column, stride, out, member + column * 0 < GROUP, FORM)
        else:
            gl.store(outputs[0] + column, out, mask=member < GROUP)
