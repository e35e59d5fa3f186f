"""Operands of attention in registers: which elements of the cache a thread loads, and their place in an instruction.

The matrix instruction is m16n8k16. Its rows are keys, in the scores, and columns of the head, in the sum of values;
its 8 columns are 4 query heads, each in two fp16 terms (value and remainder, 22 bits) side by side, so that groups of 4
heads leave none of it idle; 8 heads are two. Keys and values are loaded as operands, in an order of columns that
makes every load 16 bytes: a sum over columns is the same in any order that both operands share, and the order of output
columns is undone when heads are stored. A thread is (warp, r, c), lane 4 r + c; its elements of an operand lie in the
last dimension of a tensor [threads, n]. `HEADS`: 4 or 8, heads there is room for.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def threads(N: gl.constexpr, WARPS: gl.constexpr):
    """(warp, r, c, m): which thread [threads, 1], and which of its N elements [1, N]."""
    L: gl.constexpr = gl.BlockedLayout([1, N], [32, 1], [WARPS, 1], [1, 0])
    t = gl.expand_dims(gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, L)), 1)
    m = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, L)), 0)
    return t >> 5, (t >> 2) & 7, t & 3, m


@gluon.jit
def key_words(row, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """Where a thread's words (two columns each) of its warp's KEYS keys lie, and the number of each one's key:
    [threads, KEYS * HEAD_DIM / 64].

    m = (g, b, e / 2): columns 32 b + 8 c + e of key r + 8 g. row: that of the first key [threads, 1].
    """
    ROW: gl.constexpr = HEAD_DIM // 2
    _, r, c, m = threads(KEYS * ROW // 32, WARPS)
    group = m // (ROW // 4)
    return (row + r) * ROW + 4 * c + (7 * ROW * group + 16 * (m // 4) + m % 4), r + 8 * group


@gluon.jit
def value_words(row, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """As `key_words`, for values: m = (g, e, j, i / 2): columns 64 j + 8 r + i of key 8 g + 2 c + e."""
    ROW: gl.constexpr = HEAD_DIM // 2
    _, r, c, m = threads(KEYS * ROW // 32, WARPS)
    part = m // (ROW // 8)
    key = 8 * (part // 2) + 2 * c + part % 2
    return (row + key) * ROW + 4 * r + (32 * (m // 4) - ROW * part + m % 4), key


@gluon.jit
def _halves(words):
    """int32 of two fp16 each: fp16, side by side in a new last dimension. A loop carries words: carried as single
    fp16, they take more registers."""
    near = words.to(gl.int16).to(gl.float16, bitcast=True)
    far = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.join(near, far)


@gluon.jit
def key_operand(k, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr):
    """What `key_words` names as the left operand [WARPS, KEYS, HEAD_DIM]: columns in the order (b, s, h, c, e)."""
    k = gl.reshape(_halves(k), [WARPS, 8, 4, KEYS // 8, HEAD_DIM // 32, 2, 2, 2])  # warp, r, c, g, b, s, h, e
    k = gl.reshape(gl.permute(k, [0, 3, 1, 4, 5, 6, 2, 7]), [WARPS, KEYS, HEAD_DIM])
    return gl.convert_layout(k, A, assert_trivial=True)


@gluon.jit
def _shared_rows(shared, WARPS: gl.constexpr):
    """Rows of a head in shared memory, fp16 [8, HEAD_DIM] or one, as [WARPS, 8, columns in the order (b, s, h,
    c, e)]: thread (r, c) has row r's columns as `key_words` has a key's."""
    L: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    HEAD_DIM: gl.constexpr = shared.shape[1]
    x = gl.expand_dims(shared.load(gl.SliceLayout(0, L)), 0) + gl.zeros([WARPS, 8, HEAD_DIM], gl.float16, L)
    x = gl.reshape(x, [WARPS, 8, HEAD_DIM // 32, 4, 2, 2, 2])  # warp, r, b, c, s, h, e
    return gl.reshape(gl.permute(x, [0, 1, 2, 4, 5, 3, 6]), [WARPS, 8, HEAD_DIM])


@gluon.jit
def one_key_operand(shared, WARPS: gl.constexpr, A: gl.constexpr):
    """A key in shared memory, fp16 [1, HEAD_DIM], as each of the rows of a left operand [WARPS, 16, HEAD_DIM]."""
    k = _shared_rows(shared, WARPS)
    k = gl.reshape(gl.permute(gl.join(k, k), [0, 3, 1, 2]), [WARPS, 16, shared.shape[1]])
    return gl.convert_layout(k, A, assert_trivial=True)


@gluon.jit
def value_operand(v, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr):
    """What `value_words` names as the left operand [WARPS, HEAD_DIM, KEYS]: columns in the order (j, i, r)."""
    v = gl.reshape(_halves(v), [WARPS, 8, 4, KEYS // 8, 2, HEAD_DIM // 64, 8])  # warp, r, c, g, e, j, i
    v = gl.reshape(gl.permute(v, [0, 5, 6, 1, 3, 2, 4]), [WARPS, HEAD_DIM, KEYS])
    return gl.convert_layout(v, A, assert_trivial=True)


@gluon.jit
def two_terms(q):
    """Heads fp32 [HEADS, HEAD_DIM] as fp16 [2 * HEADS, HEAD_DIM]: each one's value, then its remainder."""
    value = q.to(gl.float16)
    both = gl.join(value, (q - value.to(gl.float32)).to(gl.float16))
    return gl.reshape(gl.permute(both, [0, 2, 1]), [2 * q.shape[0], q.shape[1]])


@gluon.jit
def query_operand(shared, WARPS: gl.constexpr, B: gl.constexpr):
    """`two_terms` in shared memory as the right operand [WARPS, HEAD_DIM, 2 * HEADS]."""
    q = gl.permute(_shared_rows(shared.slice(0, 8), WARPS), [0, 2, 1])
    if shared.shape[0] == 16:
        far = gl.permute(_shared_rows(shared.slice(8, 8), WARPS), [0, 2, 1])
        q = gl.reshape(gl.permute(gl.join(q, far), [0, 1, 3, 2]), [WARPS, shared.shape[1], 16])
    return gl.convert_layout(q, B, assert_trivial=True)


@gluon.jit
def terms_added(x):
    """[WARPS, N, 2 * HEADS] of the instruction's result -> [WARPS, N, HEADS]."""
    value, remainder = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
    return value + remainder


@gluon.jit
def of_both_terms(x, MMA: gl.constexpr):
    """A number of each head [WARPS, HEADS], for both of its terms: [WARPS, 1, 2 * HEADS]."""
    x = gl.reshape(gl.join(x, x), [x.shape[0], 2 * x.shape[1]])
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, MMA), assert_trivial=True), 1)


@gluon.jit
def weight_operand(p, B: gl.constexpr):
    """Weights fp32 [WARPS, KEYS, HEADS], as scores lie, as the right operand [WARPS, KEYS, 2 * HEADS] of the values.

    Where scores leave a thread (key r, head c), the operand wants (column r, keys 2 c and 2 c + 1): the matrix of both
    terms, 8 by 8, transposed.
    """
    WARPS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    HEADS: gl.constexpr = p.shape[2]
    words = tl.inline_asm_elementwise(
        """{ .reg .b16 h; .reg .f32 f; .reg .b32 w;
        cvt.rn.f16.f32 h, $1;
        cvt.f32.f16 f, h;
        sub.f32 f, $1, f;
        cvt.rn.f16x2.f32 w, f, $1;
        movmatrix.sync.aligned.m8n8.trans.b16 $0, w; }""",
        "=r,f",
        [p],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    p = gl.reshape(_halves(words), [WARPS, KEYS // 8, 8, HEADS // 4, 4, 2])  # warp, g, r, t, c, e
    p = gl.reshape(gl.permute(p, [0, 1, 4, 5, 3, 2]), [WARPS, KEYS, 2 * HEADS])
    return gl.convert_layout(p, B, assert_trivial=True)


@gluon.jit
def single_value(v, HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr):
    """One value as a sum of values: fp32 [threads, HEAD_DIM / 8], m = (j, i), column 64 j + 8 r + i -> [WARPS,
    HEAD_DIM, 2 * HEADS] of every head, in its first term."""
    v = gl.reshape(v, [WARPS, 8, 4, HEAD_DIM // 64, 8])  # warp, r, c, j, i
    if HEADS == 8:
        v = gl.join(v, v)
    v = gl.join(v, v * 0.0)
    v = gl.reshape(v, [WARPS, 8, 4, HEAD_DIM // 64, 8, HEADS // 4, 2])
    v = gl.reshape(gl.permute(v, [0, 3, 4, 1, 5, 2, 6]), [WARPS, HEAD_DIM, 2 * HEADS])
    return gl.convert_layout(v, MMA, assert_trivial=True)


@gluon.jit
def columns_in_order(x, HEAD_DIM: gl.constexpr):
    """[WARPS, HEAD_DIM in the order (j, i, r), HEADS] -> [WARPS, HEADS, HEAD_DIM]."""
    WARPS: gl.constexpr = x.shape[0]
    HEADS: gl.constexpr = x.shape[2]
    x = gl.reshape(x, [WARPS, HEAD_DIM // 64, 8, 8, HEADS])  # warp, j, i, r, head
    return gl.reshape(gl.permute(x, [0, 4, 1, 3, 2]), [WARPS, HEADS, HEAD_DIM])
