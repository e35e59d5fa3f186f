"""Decode attention in registers: each warp of a program takes keys of its own, and they meet once, at the end.

The same work as attention_decode.py's kernel (one slice of one key-value head a program), for fp16 caches, heads of 64
or 128 and groups of up to 8. There, tiles pass through shared memory between barriers; here keys and values are loaded
as the operands of the matrix instruction (m16n8k16), 16 keys a warp at a time, in an order of columns that
makes every load 16 bytes: a sum over columns does not care about their order as long as both operands have it, and the
order of output columns is undone at the end. A thread is (warp, r, c), lane 4 r + c; its elements of an operand lie in
the last dimension of a tensor [threads, n].
Does not know: slices as a policy, or when this kernel is taken (attention_decode.py).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quengine.kernels.backend import BLOCK_SIZE, AttentionSpec
from quengine.kernels.cuda.activations import round_group
from quengine.kernels.cuda.half import HalfRows, store_half
from quengine.kernels.cuda.kv_store import BLOCK, BLOCK_BITS, KVStore
from quengine.kernels.cuda.mma import uses_assembly
from quengine.kernels.cuda.rope import rotation_arguments, rotation_constants, table_arguments

KEYS = 16
"""Keys of a warp at a time."""

_KEYS = gl.constexpr(KEYS)
_LOWEST = gl.constexpr(-1e30)
"""The score of a key that is not there: finite, so that differences of two of them are numbers."""


@dataclass(frozen=True)
class Slices:
    """Warps of a program, and how many keys a slice has at least: a multiple of what they read at once."""

    warps: int
    least: int


FINE = Slices(8, 128)
"""Of a single sequence. 4 warps are up to 0.5 us faster below 128 keys, and slower above: 25% at 16384."""

COARSE = Slices(4, 512)
"""In batches, where other sequences fill the device: two programs on a multiprocessor, and less to combine."""


def takes(qkv: Tensor, spec: AttentionSpec, q8_0: bool) -> bool:
    """Whether this kernel serves such heads, on a GPU: both elements of a rotated pair must lie in one thread."""
    rotates = 2 * spec.cos.shape[1] == spec.head_dim or spec.rope_layout == "pairs"
    aligned = qkv.dtype == torch.float32 and qkv.stride(0) % 4 == 0 and qkv.data_ptr() % 16 == 0
    shaped = spec.heads <= 8 * spec.kv_heads and spec.head_dim in (64, 128)
    return uses_assembly() and shaped and rotates and aligned and not q8_0


@gluon.jit
def _threads(N: gl.constexpr, WARPS: gl.constexpr):
    """(warp, r, c, m): which thread [threads, 1], and which of its N elements [1, N]."""
    L: gl.constexpr = gl.BlockedLayout([1, N], [32, 1], [WARPS, 1], [1, 0])
    t = gl.expand_dims(gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, L)), 1)
    m = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, L)), 0)
    return t >> 5, (t >> 2) & 7, t & 3, m


@gluon.jit
def _per_quad(x, WARPS: gl.constexpr):
    """[threads] -> [rows, 4]: the four threads of an operand's row side by side."""
    QUADS: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
    return gl.convert_layout(gl.reshape(x, [8 * WARPS, 4]), QUADS, assert_trivial=True)


@gluon.jit
def _each_thread(x, N: gl.constexpr, WARPS: gl.constexpr):
    """A value of each row [rows] as [threads]: a row of N elements' layout."""
    L: gl.constexpr = gl.BlockedLayout([1, N], [32, 1], [WARPS, 1], [1, 0])
    QUADS: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
    every = gl.expand_dims(x, 1) + gl.zeros([8 * WARPS, 4], x.dtype, QUADS)
    return gl.convert_layout(gl.reshape(every, [32 * WARPS]), gl.SliceLayout(1, L), assert_trivial=True)


@gluon.jit
def _beside(x, N: gl.constexpr, WARPS: gl.constexpr):
    """A value of each row [rows] as [threads, 1], beside N elements a thread."""
    return gl.expand_dims(_each_thread(x, N, WARPS), 1)


@gluon.jit
def _key_elements(row, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """Where a thread's elements of its warp's 16 keys lie, and the number of each one's key: [threads, HEAD_DIM / 2].

    m = (h, b, e): column 32 b + 8 c + e of key r + 8 h. row: that of the first key [threads, 1].
    """
    N: gl.constexpr = HEAD_DIM // 2
    _, r, c, m = _threads(N, WARPS)
    key = r + 8 * (m // (N // 2))
    return (row + r) * HEAD_DIM + 8 * c + (7 * HEAD_DIM * (m // (N // 2)) + 32 * (m // 8) + m % 8), key


@gluon.jit
def _value_elements(row, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """As `_key_elements`, for values: m = (h, e, j, i): column 64 j + 8 r + i of key 8 h + 2 c + e."""
    N: gl.constexpr = HEAD_DIM // 2
    _, r, c, m = _threads(N, WARPS)
    part = m // (N // 4)
    key = 8 * (part // 2) + 2 * c + part % 2
    return (row + key) * HEAD_DIM + 8 * r + (64 * (m // 8) - HEAD_DIM * part + m % 8), key


@gluon.jit
def _load(ptr, elements, key, first, begin, end):
    """Elements of cache rows, 0 where a key is not in begin .. end - 1; `first`: the warp's first key."""
    place = first + key
    return gl.load(ptr + elements, mask=(place >= begin) & (place < end), other=0.0)


@gluon.jit
def _key_operand(k, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, B: gl.constexpr):
    """What `_key_elements` names as the right operand [WARPS, HEAD_DIM, 16]: columns in the order (b, s, h, c, e)."""
    k = gl.reshape(k, [WARPS, 8, 4, 2, HEAD_DIM // 32, 2, 2, 2])  # warp, r, c, key half, b, s, h, e
    k = gl.reshape(gl.permute(k, [0, 4, 5, 6, 2, 7, 3, 1]), [WARPS, HEAD_DIM, 16])
    return gl.convert_layout(k, B, assert_trivial=True)


@gluon.jit
def _value_operand(v, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, B: gl.constexpr):
    """What `_value_elements` names as the right operand [WARPS, 16, HEAD_DIM]: columns in the order (j, i, r)."""
    v = gl.reshape(v, [WARPS, 8, 4, 2, 2, HEAD_DIM // 64, 8])  # warp, r, c, h, e, j, i
    v = gl.reshape(gl.permute(v, [0, 3, 2, 4, 5, 6, 1]), [WARPS, 16, HEAD_DIM])
    return gl.convert_layout(v, B, assert_trivial=True)


@gluon.jit
def _two_terms(x):
    """fp32 -> two fp16 that add up to 22 bits of it, side by side in a new last dimension."""
    value = x.to(gl.float16)
    return gl.join(value, (x - value.to(gl.float32)).to(gl.float16))


@gluon.jit
def _query_operand(q, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr):
    """fp32 [threads, HEAD_DIM / 4], row r's columns as `_key_elements` has them, as the left operand [WARPS, 16,
    HEAD_DIM]: rows are the value of each head, then the remainder of each."""
    q = gl.reshape(_two_terms(q), [WARPS, 8, 4, HEAD_DIM // 32, 2, 2, 2, 2])  # warp, r, c, b, s, h, e, term
    q = gl.reshape(gl.permute(q, [0, 7, 1, 3, 4, 5, 2, 6]), [WARPS, 16, HEAD_DIM])
    return gl.convert_layout(q, A, assert_trivial=True)


@gluon.jit
def _scores(q, k, WARPS: gl.constexpr, MMA: gl.constexpr):
    """Queries times keys, the terms added: fp32 [threads, 4], m = (h, e): row r and key 8 h + 2 c + e."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    s = mma_v2(q, k, gl.zeros([WARPS, 16, 16], gl.float32, MMA))
    s = gl.permute(gl.reshape(s, [WARPS, 2, 8, 2, 4, 2]), [0, 2, 4, 3, 5, 1])  # warp, r, c, h, e, term
    value, remainder = gl.split(s)
    return gl.convert_layout(gl.reshape(value + remainder, [32 * WARPS, 4]), L, assert_trivial=True)


@gluon.jit
def _weight_operand(p, WARPS: gl.constexpr, A: gl.constexpr):
    """Weights [threads, 4] as the left operand [WARPS, 16, 16]."""
    p = gl.reshape(_two_terms(p), [WARPS, 8, 4, 2, 2, 2])  # warp, r, c, h, e, term
    p = gl.reshape(gl.permute(p, [0, 5, 1, 3, 2, 4]), [WARPS, 16, 16])
    return gl.convert_layout(p, A, assert_trivial=True)


@gluon.jit
def _accumulated(p, v, mixed, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr):
    """mixed + weights times values. mixed: fp32 [threads, HEAD_DIM / 2], m = (term, j, i, e): column 64 j + 16 c + 8 e
    + i of row r, of either term."""
    L: gl.constexpr = mixed.type.layout
    mixed = gl.reshape(mixed, [WARPS, 8, 4, 2, HEAD_DIM // 64, 8, 2])  # warp, r, c, term, j, i, e
    mixed = gl.reshape(gl.permute(mixed, [0, 3, 1, 4, 5, 2, 6]), [WARPS, 16, HEAD_DIM])
    mixed = mma_v2(p, v, gl.convert_layout(mixed, MMA, assert_trivial=True))
    mixed = gl.reshape(mixed, [WARPS, 2, 8, HEAD_DIM // 64, 8, 4, 2])  # warp, term, r, j, i, c, e
    mixed = gl.reshape(gl.permute(mixed, [0, 2, 5, 1, 3, 4, 6]), [32 * WARPS, HEAD_DIM // 2])
    return gl.convert_layout(mixed, L, assert_trivial=True)


@gluon.jit
def _heads_of(mixed, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """The terms of `_accumulated`'s result added: fp32 [threads, HEAD_DIM / 4], m = (j, e, i)."""
    N: gl.constexpr = HEAD_DIM // 4
    L: gl.constexpr = gl.BlockedLayout([1, N], [32, 1], [WARPS, 1], [1, 0])
    x = gl.permute(gl.reshape(mixed, [32 * WARPS, 2, HEAD_DIM // 64, 8, 2]), [0, 2, 4, 3, 1])
    value, remainder = gl.split(x)
    return gl.convert_layout(gl.reshape(value + remainder, [32 * WARPS, N]), L, assert_trivial=True)


@gluon.jit
def _alone(v, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """One value fp32 [threads, HEAD_DIM / 4], as `_heads_of` has it, as what `_accumulated` takes."""
    L: gl.constexpr = gl.BlockedLayout([1, HEAD_DIM // 2], [32, 1], [WARPS, 1], [1, 0])
    terms = gl.reshape(gl.join(v, v * 0.0), [32 * WARPS, HEAD_DIM // 64, 2, 8, 2])
    terms = gl.reshape(gl.permute(terms, [0, 4, 1, 3, 2]), [32 * WARPS, HEAD_DIM // 2])
    return gl.convert_layout(terms, L, assert_trivial=True)


@gluon.jit
def _columns_of_heads(HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """The columns that `_heads_of` names."""
    _, _, c, m = _threads(HEAD_DIM // 4, WARPS)
    return 64 * (m // 16) + 16 * c + m % 16


@gluon.jit
def _rotated(
    head, live, cos_ptr, sin_ptr, norm_ptr, eps,
    HEAD_DIM: gl.constexpr, ROPE_DIM: gl.constexpr, HALVES: gl.constexpr, NORM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Heads at pointers `head` [threads, 1] as queries and keys are multiplied: fp32 [threads, HEAD_DIM / 4], m = (b,
    e): column 32 b + 8 c + e, normalised where NORM, rotated by one position's rows of the angle table."""
    N: gl.constexpr = HEAD_DIM // 4
    L: gl.constexpr = gl.BlockedLayout([1, N], [32, 1], [WARPS, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, N // 2], [32, 1], [WARPS, 1], [1, 0])
    _, _, c, m = _threads(N, WARPS)
    d = 32 * (m // 8) + 8 * c + m % 8
    x = gl.load(head + d, mask=live, other=0.0).to(gl.float32)
    if NORM:
        squares = gl.sum(_per_quad(gl.sum(x * x, 1), WARPS), 1)
        x *= _beside(gl.rsqrt(squares / HEAD_DIM + eps), N, WARPS)
        x *= gl.load(norm_ptr + d).to(gl.float32)
    _, _, c, m = _threads(N // 2, WARPS)
    if HALVES:
        # Both of a pair are the thread's own: columns d and d + HEAD_DIM / 2.
        angle = 32 * (m // 8) + 8 * c + m % 8
        pairs = gl.permute(gl.reshape(x, [32 * WARPS, 2, N // 2]), [0, 2, 1])
    else:
        angle = 16 * (m // 4) + 4 * c + m % 4
        pairs = gl.reshape(x, [32 * WARPS, N // 2, 2])
    cos = gl.load(cos_ptr + angle, mask=angle < ROPE_DIM // 2, other=1.0)
    sin = gl.load(sin_ptr + angle, mask=angle < ROPE_DIM // 2, other=0.0)
    near, far = gl.split(pairs)
    near = gl.convert_layout(near, PAIRS, assert_trivial=True)
    far = gl.convert_layout(far, PAIRS, assert_trivial=True)
    turned = gl.join(near * cos - far * sin, far * cos + near * sin)
    if HALVES:
        turned = gl.permute(turned, [0, 2, 1])
    return gl.convert_layout(gl.reshape(turned, [32 * WARPS, N]), L, assert_trivial=True)


@gluon.jit
def _merged(tops, totals, mixed, F: gl.constexpr):
    """Softmax-weighted sum of parts [P] of heads [P, 8], [P, 8], [P, 8, HEAD_DIM]: the first dimension gone."""
    HEADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, F))
    top = gl.max(tops, 0)
    weights = gl.exp2(tops - gl.expand_dims(top, 0))
    total = gl.convert_layout(gl.sum(totals * weights, 0), HEADS, assert_trivial=True)
    top = gl.convert_layout(top, HEADS, assert_trivial=True)
    return top, total, gl.sum(mixed * gl.expand_dims(weights, 2), 0)


@gluon.jit
def _load_slices(
    mixed_ptr, state_ptr, head, first, slices,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SLICES: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Slices first, first + 1, ... of a group's heads, which other programs have left: what `_merged` takes."""
    STATES: gl.constexpr = gl.SliceLayout(2, F)
    PARTS: gl.constexpr = F.size_per_thread[0]
    s = gl.expand_dims(first + gl.arange(0, PARTS, layout=gl.SliceLayout(1, STATES)), 1)
    member = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, STATES)), 0)
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, F)))
    live = (s < slices) & (member < GROUP)
    at = (head + member) * SLICES + s
    # .cg: other multiprocessors wrote these during this launch, so L1 must not answer
    tops = gl.load(state_ptr + at * 2, mask=live, other=_LOWEST, cache_modifier=".cg")
    totals = gl.load(state_ptr + at * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
    address = mixed_ptr + gl.expand_dims(at, 2) * HEAD_DIM + gl.expand_dims(gl.expand_dims(column, 0), 0)
    return tops, totals, gl.load(address, mask=gl.expand_dims(live, 2), other=0.0, cache_modifier=".cg")


@gluon.jit
def _merged_slices(
    mixed_ptr, state_ptr, head, slices,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SLICES: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """All slices of a group's heads: total [8] and fp32 [8, HEAD_DIM]."""
    HEADS: gl.constexpr = gl.SliceLayout(0, F)
    top = gl.full([8], _LOWEST, gl.float32, gl.SliceLayout(1, HEADS))
    total = gl.zeros([8], gl.float32, gl.SliceLayout(1, HEADS))
    out = gl.zeros([8, HEAD_DIM], gl.float32, HEADS)
    for s in range(0, slices, F.size_per_thread[0]):
        parts = _load_slices(mixed_ptr, state_ptr, head, s, slices, GROUP, HEAD_DIM, SLICES, F)
        new_top, new_total, new_out = _merged(parts[0], parts[1], parts[2], F)
        larger = gl.maximum(top, new_top)
        old = gl.exp2(top - larger)
        new = gl.exp2(new_top - larger)
        total = total * old + new_total * new
        out = out * gl.expand_dims(old, 1) + new_out * gl.expand_dims(new, 1)
        top = larger
    return total, out


@gluon.jit
def _store_heads(
    out, head, outputs, sequence, stride, copy,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROUND: gl.constexpr, FORM: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """fp32 [8, HEAD_DIM] as heads head, head + 1, ... of a sequence's output: fp32, rounded for the q-dot, or, where
    FORM is not negative, fp16 in row `sequence` of half rows of that form."""
    if ROUND:
        GROUPS: gl.constexpr = HEAD_DIM // 32
        L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
        x = gl.convert_layout(gl.reshape(out, [8 * GROUPS, 32]), L)
        high, low, scale, sums = round_group(x)
        n = gl.arange(0, 8 * GROUPS, layout=gl.SliceLayout(1, L))
        i = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, L)), 0)
        group = head * GROUPS + n
        inside = n < GROUP * GROUPS
        at = gl.expand_dims(group, 1) * 32 + i
        gl.store(outputs[0] + at, high, mask=gl.expand_dims(inside, 1))
        gl.store(outputs[1] + at, low, mask=gl.expand_dims(inside, 1))
        gl.store(outputs[2] + group, scale, mask=inside)
        S: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [gl.num_warps(), 1], [1, 0])
        n = gl.expand_dims(gl.arange(0, 8 * GROUPS, layout=gl.SliceLayout(1, S)), 1)
        half = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, S)), 0)
        at = (head * GROUPS + n) * 2 + half
        gl.store(outputs[3] + at, gl.convert_layout(sums, S), mask=n < GROUP * GROUPS)
    else:
        ROWS: gl.constexpr = gl.SliceLayout(0, F)
        member = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS)), 1)
        column = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ROWS)), 0)
        column += (head + member) * HEAD_DIM
        if FORM >= 0:
            store_half(outputs[0], sequence, column, stride, copy, out, member + column * 0 < GROUP, FORM)
        else:
            gl.store(outputs[0] + column, out, mask=member < GROUP)


@gluon.jit
def _cache_row(table_ptr, blocks, place, PAGED: gl.constexpr):
    """The row of the cache where position `place`, a multiple of 16 or the newest one, lies."""
    if PAGED:
        entry = gl.load(table_ptr + gl.minimum(place >> BLOCK_BITS, blocks - 1))
        return (entry << BLOCK_BITS) + (place & (BLOCK - 1))
    else:
        return place


@gluon.jit(do_not_specialize=["context", "blocks"])
def _attention_warps_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, query_scale_ptr, position_ptr, table_ptr, k_ptr, v_ptr,
    mixed_ptr, state_ptr, arrived_ptr, out_ptr, low_ptr, out_scale_ptr, sums_ptr,
    eps, scale, context, blocks, qkv_stride, out_stride, copy,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROPE_DIM: gl.constexpr,
    HALVES: gl.constexpr, NORM: gl.constexpr, QUERY_SCALE: gl.constexpr, WINDOW: gl.constexpr, PAGED: gl.constexpr,
    SLICES: gl.constexpr, LEAST: gl.constexpr, WARPS: gl.constexpr, ROUND: gl.constexpr, FORM: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HEADS: gl.constexpr = KV_HEADS * GROUP
    COLUMNS: gl.constexpr = HEAD_DIM // 4
    STEP: gl.constexpr = WARPS * _KEYS
    kv_head = gl.program_id(0)
    part = gl.program_id(1)
    sequence = gl.program_id(2).to(gl.int64)
    position = gl.load(position_ptr + sequence)
    # Keys before the new one, cut into `slices` slices of `per_slice`. A warp's 16 keys lie in one block of a pool.
    oldest = 0
    if WINDOW > 0:
        oldest = gl.maximum(position - (WINDOW - 1), 0)
    first = oldest // _KEYS * _KEYS
    per_slice = gl.maximum(gl.cdiv(gl.cdiv(position - first, SLICES), STEP) * STEP, LEAST)
    slices = gl.minimum(gl.maximum(gl.cdiv(position - first, per_slice), 1), gl.num_programs(1))
    if part < slices:
        if PAGED:
            head_rows = kv_head.to(gl.int64) * context
            table_ptr += sequence * blocks
        else:
            head_rows = (sequence * KV_HEADS + kv_head) * context
        k_ptr += head_rows * HEAD_DIM
        v_ptr += head_rows * HEAD_DIM
        begin = first + part * per_slice
        end = gl.minimum(begin + per_slice, position)
        # The first keys and values are on their way before the launch in front has delivered the queries.
        own = begin + _KEYS * _threads(HEAD_DIM // 2, WARPS)[0]
        row = _cache_row(table_ptr, blocks, own, PAGED)
        k_at, k_key = _key_elements(row, HEAD_DIM, WARPS)
        keys = _load(k_ptr, k_at, k_key, own, oldest, end)
        v_at, v_key = _value_elements(row, HEAD_DIM, WARPS)
        values = _load(v_ptr, v_at, v_key, own, oldest, end)
        row = _cache_row(table_ptr, blocks, own + STEP, PAGED)
        new_row = _cache_row(table_ptr, blocks, position, PAGED)
        if PDL:
            tl.extra.cuda.gdc_wait()

        qkv_ptr += sequence * qkv_stride
        angles = position.to(gl.int64) * (ROPE_DIM // 2)
        warp, r, c, m = _threads(COLUMNS, WARPS)
        # Slice 0 writes the new key and value, and its first warp attends to them; nobody reads them back here.
        owner = (warp == 0) & (part == 0)
        q = _rotated(
            qkv_ptr + (kv_head * GROUP + r) * HEAD_DIM, r < GROUP, cos_ptr + angles, sin_ptr + angles, q_norm_ptr, eps,
            HEAD_DIM, ROPE_DIM, HALVES, NORM, WARPS,
        )  # fmt: skip
        k_new = _rotated(
            qkv_ptr + (HEADS + kv_head) * HEAD_DIM + (r & 0), owner, cos_ptr + angles, sin_ptr + angles, k_norm_ptr,
            eps, HEAD_DIM, ROPE_DIM, HALVES, NORM, WARPS,
        )  # fmt: skip
        d = _columns_of_heads(HEAD_DIM, WARPS)
        v_new = gl.load(qkv_ptr + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + d, mask=owner, other=0.0).to(
            gl.float16
        )
        k_new = k_new.to(gl.float16)
        if QUERY_SCALE:
            scale *= gl.load(query_scale_ptr + position)
        room = blocks * BLOCK if PAGED else context
        write = owner & (r == 0) & (position < room)
        gl.store(k_ptr + new_row * HEAD_DIM + (32 * (m // 8) + 8 * c + m % 8), k_new, mask=write)
        gl.store(v_ptr + new_row * HEAD_DIM + d, v_new, mask=write)
        new_score = gl.sum(_per_quad(gl.sum(q * k_new.to(gl.float32), 1), WARPS), 1) * scale

        operand = _query_operand(q, HEAD_DIM, WARPS, A)
        owns = gl.max(_per_quad(gl.max(owner.to(gl.int32) + 0 * m, 1), WARPS), 1) > 0
        largest = gl.where(owns, new_score, _LOWEST)
        s_warp, _, s_c, s_m = _threads(4, WARPS)
        total = gl.max(gl.where((s_warp == 0) & (s_c == 0) & (part == 0) & (s_m == 0), 1.0, 0.0), 1)
        mixed = _alone(v_new.to(gl.float32), HEAD_DIM, WARPS)
        for start in range(begin, end, STEP):
            place = start + _KEYS * s_warp + (8 * (s_m // 2) + 2 * s_c + s_m % 2)
            s = _scores(operand, _key_operand(keys, HEAD_DIM, WARPS, B), WARPS, MMA) * scale
            # The next keys and values are asked for as soon as the registers of these are free.
            own += STEP
            k_at, k_key = _key_elements(row, HEAD_DIM, WARPS)
            keys = _load(k_ptr, k_at, k_key, own, oldest, end)
            s = gl.where((place >= oldest) & (place < end), s, _LOWEST)
            larger = gl.maximum(largest, gl.max(_per_quad(gl.max(s, 1), WARPS), 1))
            shrink = gl.exp2(largest - larger)
            largest = larger
            p = gl.exp2(s - _beside(largest, 4, WARPS))
            total = total * _each_thread(shrink, 4, WARPS) + gl.sum(p, 1)
            mixed *= _beside(shrink, HEAD_DIM // 2, WARPS)
            p = _weight_operand(p, WARPS, A)
            mixed = _accumulated(p, _value_operand(values, HEAD_DIM, WARPS, B), mixed, HEAD_DIM, WARPS, MMA)
            v_at, v_key = _value_elements(row, HEAD_DIM, WARPS)
            values = _load(v_ptr, v_at, v_key, own, oldest, end)
            row = _cache_row(table_ptr, blocks, own + STEP, PAGED)
        if PDL:
            # Not earlier: blocks of the next launch beside these would leave the multiprocessors unevenly filled.
            tl.extra.cuda.gdc_launch_dependents()

        totals = gl.sum(_per_quad(total, WARPS), 1)
        x = _heads_of(mixed, HEAD_DIM, WARPS)
        x = gl.permute(gl.reshape(x, [WARPS, 8, 4, HEAD_DIM // 64, 16]), [0, 1, 3, 2, 4])
        F: gl.constexpr = gl.BlockedLayout(
            [WARPS, 1, 4], [1, 128 // HEAD_DIM, HEAD_DIM // 4], [1, WARPS, 1], [2, 1, 0]
        )
        STATES: gl.constexpr = gl.SliceLayout(2, F)
        meeting = gl.allocate_shared_memory(
            gl.float32, [WARPS, 8, HEAD_DIM], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
        )
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        tops_there = gl.allocate_shared_memory(gl.float32, [WARPS, 8], flat)
        totals_there = gl.allocate_shared_memory(gl.float32, [WARPS, 8], flat)
        meeting.store(gl.reshape(x, [WARPS, 8, HEAD_DIM]))
        tops_there.store(gl.reshape(largest, [WARPS, 8]))
        totals_there.store(gl.reshape(totals, [WARPS, 8]))
        top, sum, out = _merged(tops_there.load(STATES), totals_there.load(STATES), meeting.load(F), F)

        if FORM < 0:
            out_ptr += sequence * (HEADS * HEAD_DIM)
        outputs = (
            out_ptr, low_ptr + sequence * (HEADS * HEAD_DIM),
            out_scale_ptr + sequence * (HEADS * HEAD_DIM // 32), sums_ptr + sequence * (HEADS * HEAD_DIM // 16),
        )  # fmt: skip
        head = kv_head * GROUP
        if slices == 1:
            out = out / gl.expand_dims(sum, 1)
            _store_heads(out, head, outputs, sequence, out_stride, copy, GROUP, HEAD_DIM, ROUND, FORM, F)
        else:
            mixed_ptr += sequence * (HEADS * SLICES * HEAD_DIM)
            state_ptr += sequence * (HEADS * SLICES * 2)
            member = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(0, F)))
            live = member < GROUP
            at = (head + member) * SLICES + part
            column = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, F))), 0)
            gl.store(mixed_ptr + gl.expand_dims(at, 1) * HEAD_DIM + column, out, mask=gl.expand_dims(live, 1))
            gl.store(state_ptr + at * 2, top, mask=live)
            gl.store(state_ptr + at * 2 + 1, sum, mask=live)
            tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
            arrived = arrived_ptr + sequence * KV_HEADS + kv_head
            if gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == slices - 1:
                gl.store(arrived, 0)
                sum, out = _merged_slices(mixed_ptr, state_ptr, head, slices, GROUP, HEAD_DIM, SLICES, F)
                out = out / gl.expand_dims(sum, 1)
                _store_heads(out, head, outputs, sequence, out_stride, copy, GROUP, HEAD_DIM, ROUND, FORM, F)


def launch_warps(
    qkv: Tensor,
    spec: AttentionSpec,
    cache: KVStore,
    positions: Tensor,
    left: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    rounds: bool,
    pdl: bool,
    block_tables: Tensor | None,
    coarse: bool,
    half: HalfRows | None,
) -> None:
    """The launch; arguments as those of attention_decode.py, `left` being mixed, state and arrived of its workspace.

    Numerics: keys and values as they are stored; queries, and the weights of the softmax, in two fp16 terms (22 bits);
    sums in fp32, in an order that follows from the position alone. Source: Dao et al. 2023 (Flash-Decoding).
    """
    kv_heads, context, head_dim = cache.k.shape[1:]
    slices, chosen = left[0].shape[2], COARSE if coarse else FINE
    table, blocks = table_arguments(cache, block_tables, positions)
    # No programs for slices that no sequence has here: each would take its turn to find that out.
    most = min(
        slices, triton.cdiv(context if block_tables is None else blocks * BLOCK_SIZE, chosen.least) + 1
    )
    _attention_warps_kernel[(kv_heads, most, qkv.shape[0])](
        qkv,
        *rotation_arguments(spec),
        positions,
        table,
        cache.k,
        cache.v,
        *left,
        *outputs,
        spec.eps,
        spec.scale * 1.4426950408889634,  # scores in base 2: exp2 is one instruction
        context,
        blocks,
        qkv.stride(0),
        0 if half is None else half.stride,
        0 if half is None else half.values.stride(0),
        KV_HEADS=kv_heads,
        GROUP=spec.heads // kv_heads,
        HEAD_DIM=head_dim,
        **rotation_constants(spec),
        WINDOW=spec.window or 0,
        PAGED=block_tables is not None,
        SLICES=slices,
        LEAST=chosen.least,
        WARPS=chosen.warps,
        ROUND=rounds,
        FORM=-1 if half is None else half.form,
        PDL=pdl,
        num_warps=chosen.warps,
        maxnreg=255,  # else ptxas may stop at 128 for two programs on a multiprocessor, and spill
        launch_pdl=pdl,
    )
