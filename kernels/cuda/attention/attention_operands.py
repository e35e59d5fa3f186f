"""Operands of attention in registers: the cache elements that a thread loads, and their place in a matrix instruction.

The matrix instruction is m16n8k16. Its rows are keys in the score product, and columns of the head in the value
product; its 8 columns are 4 query heads, each in two fp16 terms (value and remainder, 22 bits) side by side. A group of
4 heads fills one instruction, and 8 heads take two. Keys and values are loaded directly as operands, with columns
permuted so that every load is 16 bytes: a sum over columns is the same in any order that both operands share, and the
output columns are put in order when heads are stored. BITS: bits of a stored value. fp16 is multiplied as loaded. Codes
of 8 bits are multiplied as fp16, 32 columns with one scale at a time. Codes of 4 bits, of which a load has columns of
one group, become exact values first. A thread is (warp, r, c), lane 4 r + c; its elements of an operand are the last
dimension of a tensor [threads, n]. `HEADS`: 4 or 8, the padded group size.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def threads(N: gl.constexpr, WARPS: gl.constexpr):
    """(warp, r, c, m): the thread's coordinates [threads, 1], and the index of each of its N elements [1, N]."""
    L: gl.constexpr = gl.BlockedLayout([1, N], [32, 1], [WARPS, 1], [1, 0])
    t = gl.expand_dims(gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, L)), 1)
    m = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, L)), 0)
    return t >> 5, (t >> 2) & 7, t & 3, m


@gluon.jit
def key_words(row, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, BITS: gl.constexpr):
    """Offsets of a thread's words (two columns each, four or eight codes) of its warp's KEYS keys, and each word's key
    index: [threads, KEYS * HEAD_DIM * BITS / 1024]; for q8_0 of the first 32 columns, [threads, KEYS / 4], the next 32
    being 8 words on.

    m = (g, b, e's word): columns 32 b + 8 c + e of key r + 8 g; for q4_0 the c-th quarter of the key's words. row: the
    first key's row [threads, 1].
    """
    ROW: gl.constexpr = HEAD_DIM * BITS // 32
    PART: gl.constexpr = 8 if BITS == 8 else ROW
    WORDS: gl.constexpr = 2 if BITS == 8 else 4 if BITS == 16 else ROW // 4
    _, r, c, m = threads(KEYS * PART // 32, WARPS)
    group = m // (PART // 4)
    at = (8 * ROW - PART) * group + 4 * WORDS * (m // WORDS) + m % WORDS
    row = gl.convert_layout(row, r.type.layout, assert_trivial=True)
    return (row + r) * ROW + WORDS * c + at, r + 8 * group


@gluon.jit
def value_words(row, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, BITS: gl.constexpr):
    """As `key_words`, for values: m = (g, e, j, i's word): columns 64 j + 8 r + i, for q8_0 4 r + i, for q4_0 the r-th
    eighth of the words, of key 8 g + 2 c + e.
    """
    ROW: gl.constexpr = HEAD_DIM * BITS // 32
    PART: gl.constexpr = 8 if BITS == 8 else ROW
    WORDS: gl.constexpr = 1 if BITS == 8 else 4 if BITS == 16 else ROW // 8
    _, r, c, m = threads(KEYS * PART // 32, WARPS)
    part = m // (PART // 8)
    key = 8 * (part // 2) + 2 * c + part % 2
    row = gl.convert_layout(row, r.type.layout, assert_trivial=True)
    return (row + key) * ROW + WORDS * r + (8 * WORDS * (m // WORDS) - PART * part + m % WORDS), key


@gluon.jit
def scale_words(row, KEYS: gl.constexpr, WARPS: gl.constexpr):
    """As `key_words`, for the scales of keys or values in a q8_0 cache, one word per cache row: [threads,
    KEYS / 8], of key r + 8 m.
    """
    _, r, _, m = threads(KEYS // 8, WARPS)
    row = gl.convert_layout(row, r.type.layout, assert_trivial=True)
    return row + (r + 8 * m), r + 8 * m


@gluon.jit
def key_scales(row, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """As `key_words`, for the scales of a q4_0 cache: of the thread's group of key r + 8 m, [threads, KEYS / 8]."""
    _, r, c, m = threads(KEYS // 8, WARPS)
    row = gl.convert_layout(row, r.type.layout, assert_trivial=True)
    return (row + (r + 8 * m)) * (HEAD_DIM // 32) + c * (HEAD_DIM // 32) // 4, r + 8 * m


@gluon.jit
def value_scales(row, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """As `key_scales`, for values: of key 8 g + 2 c + e, m = (g, e): [threads, KEYS / 4]."""
    _, r, c, m = threads(KEYS // 4, WARPS)
    key = 8 * (m // 2) + 2 * c + m % 2
    row = gl.convert_layout(row, r.type.layout, assert_trivial=True)
    return (row + key) * (HEAD_DIM // 32) + r * (HEAD_DIM // 32) // 8, key


@gluon.jit
def _halves(words):
    """int32 words to their two fp16, in a new last dimension. Loops carry words: carried as single fp16 they
    take more registers.
    """
    near = words.to(gl.int16).to(gl.float16, bitcast=True)
    far = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.join(near, far)


@gluon.jit
def _codes(words):
    """int32 words of four int8 to fp16, in two new last dimensions of two. 0x6400 is the fp16 1024, whose
    last eight bits count ones, so the byte `code + 128` in their place makes 1152 + code.
    """
    near, far = tl.inline_asm_elementwise(
        """{ .reg .b32 t, m;
        xor.b32 t, $2, 0x80808080;
        mov.b32 m, 0x64806480;
        prmt.b32 $0, t, 0x64646464, 0x4140;
        prmt.b32 $1, t, 0x64646464, 0x4342;
        sub.rn.f16x2 $0, $0, m;
        sub.rn.f16x2 $1, $1, m; }""",
        "=&r,=&r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return _halves(gl.join(near, far))


@gluon.jit
def _key_values(words, scale):
    """int32 words of eight codes of 4 bits [threads, n] times the scale of each, int16: fp16 [threads, n, 2, 2, 2].

    The last dimensions are (h, s, e): the code in half byte 4 e + 2 s + h. A code in the last bits of the fp16 1024, or
    four bits further in 64, makes 1024 or 64 + code.
    """
    near, second, third, far = tl.inline_asm_elementwise(
        """{ .reg .b32 t, s;
        prmt.b32 s, $5, $5, 0x1010;
        shr.b32 t, $4, 8;
        lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $1, $4, 0x00f000f0, 0x54005400, 0xea;
        lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $3, t, 0x00f000f0, 0x54005400, 0xea;
        mov.b32 t, 0x64086408;
        sub.rn.f16x2 $0, $0, t;
        sub.rn.f16x2 $2, $2, t;
        mov.b32 t, 0x54805480;
        sub.rn.f16x2 $1, $1, t;
        sub.rn.f16x2 $3, $3, t;
        mul.rn.f16x2 $0, $0, s;
        mul.rn.f16x2 $1, $1, s;
        mul.rn.f16x2 $2, $2, s;
        mul.rn.f16x2 $3, $3, s; }""",
        "=&r,=&r,=&r,=&r,r,r",
        [words, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return _halves(gl.join(gl.join(near, second), gl.join(third, far)))


@gluon.jit
def _value_values(words, other, scales):
    """As `_key_values`, for words of two keys and their scales, the second's in the upper half: fp16 [threads, n, m, 2,
    2, 2, 2]. The last dimensions are (h, s, q, e): the code in half byte 4 q + 2 s + h of the e-th key's word.
    """
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        """{ .reg .b32 t, u, v;
        prmt.b32 u, $8, $9, 0x5410;
        prmt.b32 v, $8, $9, 0x7632;
        shr.b32 t, u, 8;
        lop3.b32 $0, u, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $1, u, 0x00f000f0, 0x54005400, 0xea;
        lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $3, t, 0x00f000f0, 0x54005400, 0xea;
        shr.b32 t, v, 8;
        lop3.b32 $4, v, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $5, v, 0x00f000f0, 0x54005400, 0xea;
        lop3.b32 $6, t, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $7, t, 0x00f000f0, 0x54005400, 0xea;
        mov.b32 t, 0x64086408;
        mov.b32 u, 0x54805480;
        sub.rn.f16x2 $0, $0, t;
        sub.rn.f16x2 $1, $1, u;
        sub.rn.f16x2 $2, $2, t;
        sub.rn.f16x2 $3, $3, u;
        sub.rn.f16x2 $4, $4, t;
        sub.rn.f16x2 $5, $5, u;
        sub.rn.f16x2 $6, $6, t;
        sub.rn.f16x2 $7, $7, u;
        mul.rn.f16x2 $0, $0, $10;
        mul.rn.f16x2 $1, $1, $10;
        mul.rn.f16x2 $2, $2, $10;
        mul.rn.f16x2 $3, $3, $10;
        mul.rn.f16x2 $4, $4, $10;
        mul.rn.f16x2 $5, $5, $10;
        mul.rn.f16x2 $6, $6, $10;
        mul.rn.f16x2 $7, $7, $10; }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [words, other, scales],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    low = gl.join(gl.join(a, b), gl.join(c, d))
    return _halves(gl.join(low, gl.join(gl.join(e, f), gl.join(g, h))))


@gluon.jit
def key_operand(k, scale, KEYS: gl.constexpr, WARPS: gl.constexpr, BITS: gl.constexpr, A: gl.constexpr):
    """Words loaded by `key_words` as the left operand [WARPS, KEYS, WIDTH], WIDTH being a head's columns or
    32: columns in the order (b, s, h, c, e), for q4_0 (w, s, h, c, e), w being a thread's word of a key. scale: loaded
    by `key_scales`, for q4_0.
    """
    WORDS: gl.constexpr = 8 * k.shape[1] // KEYS  # of a key
    WIDTH: gl.constexpr = 4 * WORDS * (32 // BITS)
    if BITS == 4:
        k = gl.reshape(k, [k.shape[0], KEYS // 8, WORDS])
        if WORDS == 4:
            scale = gl.join(scale, scale)
            scale = gl.reshape(scale, [k.shape[0], KEYS // 4])
        scale = gl.reshape(gl.join(scale, scale), [k.shape[0], KEYS // 8, WORDS])
        scale = gl.convert_layout(scale, k.type.layout, assert_trivial=True)
        k = _key_values(k, scale)
        k = gl.reshape(k, [WARPS, 8, 4, KEYS // 8, WORDS, 2, 2, 2])  # warp, r, c, g, w, h, s, e
        k = gl.permute(k, [0, 3, 1, 4, 6, 5, 2, 7])
    else:
        k = _codes(k) if BITS == 8 else _halves(k)
        k = gl.reshape(k, [WARPS, 8, 4, KEYS // 8, WIDTH // 32, 2, 2, 2])  # warp, r, c, g, b, s, h, e
        k = gl.permute(k, [0, 3, 1, 4, 5, 6, 2, 7])
    return gl.convert_layout(gl.reshape(k, [WARPS, KEYS, WIDTH]), A, assert_trivial=True)


@triton.constexpr_function
def _code_rows(head_dim: int, warps: int) -> gl.DistributedLinearLayout:
    """The layout [warps, 8, head_dim] in which thread (r, c) has the columns of row r of its codes of 4 bits: bit by
    bit from the lowest, columns are (s, e, w, c's lower part, h, c's upper part)."""
    words = head_dim // 32
    own = [1, 2, *(4 * w for w in (1, 2) if w < words), 16]
    across = [
        column for column in (1 << bit for bit in range(head_dim.bit_length() - 1)) if column not in own
    ]
    return gl.DistributedLinearLayout(
        [[0, 0, column] for column in own],
        [*([0, 0, column] for column in across), [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)],
        [],
        [warps, 8, head_dim],
    )


@gluon.jit
def _shared_rows(shared, WARPS: gl.constexpr, BITS: gl.constexpr):
    """Rows of a head in shared memory, fp16 [8, HEAD_DIM] or one, as [WARPS, 8, columns in the order of
    `key_operand`]: thread (r, c) has the columns of row r that `key_words` gives it of a key.
    """
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    HEAD_DIM: gl.constexpr = shared.shape[1]
    L: gl.constexpr = _code_rows(HEAD_DIM, WARPS) if BITS == 4 else BLOCKED
    x = gl.expand_dims(shared.load(gl.SliceLayout(0, L)), 0) + gl.zeros([WARPS, 8, HEAD_DIM], gl.float16, L)
    if BITS == 4:
        W: gl.constexpr = HEAD_DIM // 32
        x = gl.reshape(
            x, [WARPS, 8, W, 2, 4 // W, W, 2, 2]
        )  # warp, r, c's upper part, h, its lower part, w, e, s
        x = gl.permute(x, [0, 1, 5, 7, 3, 2, 4, 6])
    else:
        x = gl.reshape(x, [WARPS, 8, HEAD_DIM // 32, 4, 2, 2, 2])  # warp, r, b, c, s, h, e
        x = gl.permute(x, [0, 1, 2, 4, 5, 3, 6])
    return gl.reshape(x, [WARPS, 8, HEAD_DIM])


@gluon.jit
def value_operand(v, scale, KEYS: gl.constexpr, WARPS: gl.constexpr, BITS: gl.constexpr, A: gl.constexpr):
    """Words loaded by `value_words` as the left operand [WARPS, WIDTH, KEYS]: columns in the order (j, i, r), for q4_0
    (w, q, s, h, r). scale: loaded by `value_scales`, for q4_0.
    """
    WORDS: gl.constexpr = 4 * v.shape[1] // KEYS  # of a key
    WIDTH: gl.constexpr = 8 * WORDS * (32 // BITS)
    if BITS == 4:
        first, second = gl.split(gl.reshape(scale, [v.shape[0], KEYS // 8, 2]))
        scale = (first.to(gl.int32) & 0xFFFF) | (second.to(gl.int32) << 16)
        v = gl.permute(gl.reshape(v, [v.shape[0], KEYS // 8, 2, WORDS]), [0, 1, 3, 2])
        first, second = gl.split(v)
        scale = gl.join(scale, scale) if WORDS == 2 else gl.reshape(scale, [v.shape[0], KEYS // 8, 1])
        scale = gl.convert_layout(scale, first.type.layout, assert_trivial=True)
        v = _value_values(first, second, scale)
        v = gl.reshape(v, [WARPS, 8, 4, KEYS // 8, WORDS, 2, 2, 2, 2])  # warp, r, c, g, w, h, s, q, e
        v = gl.permute(v, [0, 4, 7, 6, 5, 1, 3, 2, 8])
    else:
        SIDE: gl.constexpr = 4 if BITS == 8 else 8
        v = _codes(v) if BITS == 8 else _halves(v)
        v = gl.reshape(v, [WARPS, 8, 4, KEYS // 8, 2, WIDTH // (8 * SIDE), SIDE])  # warp, r, c, g, e, j, i
        v = gl.permute(v, [0, 5, 6, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(v, [WARPS, WIDTH, KEYS]), A, assert_trivial=True)


@gluon.jit
def two_terms(q, FACTOR: gl.constexpr = 1.0):
    """fp32 heads [HEADS, HEAD_DIM] as fp16 [2 * HEADS, HEAD_DIM]: each one's value, then its remainder times FACTOR."""
    value = q.to(gl.float16)
    both = gl.join(value, ((q - value.to(gl.float32)) * FACTOR).to(gl.float16))
    return gl.reshape(gl.permute(both, [0, 2, 1]), [2 * q.shape[0], q.shape[1]])


@gluon.jit
def query_operand(shared, WARPS: gl.constexpr, BITS: gl.constexpr, B: gl.constexpr):
    """The result of `two_terms`, in shared memory, as the right operand [WARPS, HEAD_DIM, 2 * HEADS]."""
    q = gl.permute(_shared_rows(shared.slice(0, 8), WARPS, BITS), [0, 2, 1])
    if shared.shape[0] == 16:
        far = gl.permute(_shared_rows(shared.slice(8, 8), WARPS, BITS), [0, 2, 1])
        q = gl.reshape(gl.permute(gl.join(q, far), [0, 1, 3, 2]), [WARPS, shared.shape[1], 16])
    return gl.convert_layout(q, B, assert_trivial=True)


@gluon.jit
def terms_added(x):
    """Adds the two terms of each head: the instruction's result [WARPS, N, 2 * HEADS] to [WARPS, N, HEADS]."""
    value, remainder = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
    return value + remainder


@gluon.jit
def of_both_terms(x, MMA: gl.constexpr):
    """Repeats a number of each head [WARPS, HEADS] for both of its terms: [WARPS, 1, 2 * HEADS]."""
    x = gl.reshape(gl.join(x, x), [x.shape[0], 2 * x.shape[1]])
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, MMA), assert_trivial=True), 1)


@gluon.jit
def weight_operand(p, B: gl.constexpr):
    """Softmax weights fp32 [WARPS, KEYS, HEADS], in the layout of scores, as the right operand [WARPS, KEYS, 2 *
    HEADS] of the value product.

    Scores give a thread (key r, head c); the operand needs (column r, keys 2 c and 2 c + 1): the 8 by 8 matrix of both
    terms, transposed.
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
def scale_of(words, b: gl.constexpr):
    """Scale b of each word, int64 of four fp16 or int32 of two: fp32."""
    return (words >> (16 * b)).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def of_keys(x, KEYS: gl.constexpr, S: gl.constexpr, HEADS: gl.constexpr, WARPS: gl.constexpr):
    """A number of each key r + 8 g, [threads, KEYS / 8], in the layout of scores, [WARPS, KEYS, HEADS]."""
    x = gl.permute(gl.reshape(x, [WARPS, 8, 4, KEYS // 8]), [0, 3, 1, 2])  # warp, g, r, c
    x = gl.reshape(x, [WARPS, KEYS, 4])
    if HEADS == 8:
        x = gl.permute(gl.join(x, x), [0, 1, 3, 2])
    return gl.convert_layout(gl.reshape(x, [WARPS, KEYS, HEADS]), S, assert_trivial=True)


@gluon.jit
def columns_in_order(x, BITS: gl.constexpr):
    """Puts columns in order: [WARPS, WIDTH in the order of `value_operand`, HEADS] to [WARPS, HEADS, WIDTH]."""
    WARPS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    HEADS: gl.constexpr = x.shape[2]
    if BITS == 4:
        W: gl.constexpr = WIDTH // 64
        x = gl.reshape(x, [WARPS, W, 2, 2, 2, 2 * W, 4 // W, HEADS])  # warp, w, q, s, h, r's parts, head
        x = gl.permute(x, [0, 7, 5, 4, 6, 1, 2, 3])
    else:
        SIDE: gl.constexpr = 4 if BITS == 8 else 8
        x = gl.reshape(x, [WARPS, WIDTH // (8 * SIDE), SIDE, 8, HEADS])  # warp, j, i, r, head
        x = gl.permute(x, [0, 4, 1, 3, 2])
    return gl.reshape(x, [WARPS, HEADS, WIDTH])
