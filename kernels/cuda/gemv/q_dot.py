"""The q-dot of one tile on the device, as `kernels/q_dot.py` defines it, for one row of activations.

A warp multiplies tiles of 16 weight rows on the integer matrix units. Activations are int16 in two planes of signed
bytes, and one product takes both: column 2q of the B operand holds high bytes and column 2q + 1 low bytes, nonzero
only at the inner indices of quad lane q (block-diagonal). So four groups (one per quad lane, see layout.py) are
multiplied at a time without mixing, and D's columns 2q and 2q + 1 arrive in lane q, which holds that group's scales.
The products are exact.

The fp32 order follows from the weight's shape alone: sets within a chunk, a warp's chunks, the quad's lanes, the K
warps.
"""

import triton
import triton.language as tl

from quengine.kernels.cuda.gemm.fragments import (
    LANE_COLUMNS,
    UPPER_SIGN,
    dot_codes,
    dot_shift,
    load_words,
    magnitudes,
    set_scales,
    step_column,
    super_scales,
    table_sizes,
    with_book,
)
from quengine.kernels.cuda.gemm.mma import mma_int8

MOST_UNROLLED = tl.constexpr(8)
"""Chunks per warp up to which the loop may be unrolled: each takes some seconds to compile."""

_FEW = tl.constexpr(4)
"""With more chunks, a loop that reads one chunk ahead is as fast."""


@triton.jit
def _activation_words(plane, column, ON: tl.constexpr, lane, P: tl.constexpr):
    """Two words of 8 bytes, from `column + ON` on, for the lanes that hold this quad's part of B; zeros elsewhere.

    One load for both saves instructions and registers, except in table and 8-bit formats, where it measured slower:
    they are short of registers, and two words need four adjacent ones.
    """
    valid = (lane >> 3) == (lane & 3)
    if P.padded:
        valid &= column < P.cols - ON
    first = tl.multiple_of(plane + (column // 8 + ON // 8), 16)
    FMT: tl.constexpr = P.layout
    if FMT.table > 0 or FMT.low + FMT.high == 8:
        return tl.load(first, mask=valid, other=0), tl.load(first + 1, mask=valid, other=0)
    else:
        both = tl.load(first[:, None] + tl.arange(0, 2)[None, :], mask=valid[:, None], other=0)
        return tl.split(both)


@triton.jit
def _group_value(pointer, group, ON: tl.constexpr, P: tl.constexpr):
    """pointer[group + ON], a value per group of 32."""
    if P.padded:
        value = tl.load(pointer + group + ON, mask=group < P.cols // 32 - ON, other=0)
    else:
        value = tl.load(pointer + group + ON)
    return value


@triton.jit
def _sum_value(sums_ptr, group, ON: tl.constexpr, s: tl.constexpr, P: tl.constexpr):
    """The sum of a group's 32 integers, or of set s's half of them, as fp32: exact in int32, rounded once."""
    pairs = sums_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    both = _group_value(pairs, group, ON, P)
    if P.layout.group == 32:
        total = both.to(tl.int32) + (both >> 32).to(tl.int32)
    elif s % 2 == 0:
        total = both.to(tl.int32)
    else:
        total = (both >> 32).to(tl.int32)
    return total.to(tl.float32)


@triton.jit
def _load_set(plane, x, c, ON: tl.constexpr, lane, s: tl.constexpr, P: tl.constexpr):
    """All activation data for set s of chunk c + ON, loaded before any is used: a word per step, of high or
    low bytes by lane; then t, and t * sum (0 without minimums).
    """
    FMT: tl.constexpr = P.layout
    STEPS: tl.constexpr = FMT.steps_per_set
    quad = lane & 3
    column = c * FMT.chunk + quad * LANE_COLUMNS
    group = c * (FMT.chunk // 32) + quad
    AT: tl.constexpr = ON * FMT.chunk + step_column(s * STEPS)
    words = ()
    for j in tl.static_range(STEPS // 2):
        both = _activation_words(plane, column, AT + 16 * j, lane, P)
        words = words + (both[0], both[1])
    t = _group_value(x.scale, group, AT // 32, P)
    if FMT.has_min:
        words = words + (t, t * _sum_value(x.sums, group, AT // 32, s, P))
    else:
        words = words + (t, 0.0)
    return words


@triton.jit
def _products(codes, x, SIGNED: tl.constexpr, P: tl.constexpr):
    """Integer dot products of a set's codes with the activations: weight rows r, r + 8."""
    STEPS: tl.constexpr = P.layout.steps_per_set
    zero = codes[0][0] & 0
    d = (zero, zero, zero, zero)
    for j in tl.static_range(STEPS):
        d = mma_int8(codes[j], x[j].to(tl.int32), (x[j] >> 32).to(tl.int32), d, SIGNED, True, P.asm)
    return d[0] * 256 + d[1], d[2] * 256 + d[3]


@triton.jit
def _set_dots(words, x, s: tl.constexpr, P: tl.constexpr):
    """Integer dot products of set s with the activations: fp32, weight rows r, r + 8, times 2 to the power
    `dot_shift`.
    """
    FMT: tl.constexpr = P.layout
    STEPS: tl.constexpr = FMT.steps_per_set
    if FMT.book > 0 and FMT.table > 0:
        sizes = ()
        negative = ()
        for j in tl.static_range(STEPS):
            of_step = magnitudes(words, s * STEPS + j, FMT, P.asm)
            sizes = sizes + (of_step[0],)
            negative = negative + (of_step[1],)
        near, far = _products(sizes, x, False, P)
        near_negative, far_negative = _products(negative, x, False, P)
        near, far = near - 2 * near_negative, far - 2 * far_negative
    elif FMT.table > 0:
        # The matrix units add up both halves of the table, which is cheaper than merging them byte by byte.
        lower = ()
        upper = ()
        for j in tl.static_range(STEPS):
            both = table_sizes(words, s * STEPS + j, FMT, P.asm)
            lower = lower + (both[0],)
            upper = upper + (both[1],)
        near, far = _products(lower, x, False, P)
        near_upper, far_upper = _products(upper, x, False, P)
        SIGN: tl.constexpr = UPPER_SIGN[FMT.table]
        if SIGN > 0:
            near, far = near_upper - near, far_upper - far
        else:
            near, far = near - near_upper, far - far_upper
    else:
        codes = ()
        for j in tl.static_range(STEPS):
            codes = codes + (dot_codes(words, s * STEPS + j, FMT, P.asm),)
        near, far = _products(codes, x, FMT.signed, P)
    return near.to(tl.float32), far.to(tl.float32)


@triton.jit
def _add_set(sums, words, x, s: tl.constexpr, P: tl.constexpr):
    """Adds set s to `sums`: scaled dot products of rows r and r + 8, then minimums of r and r + 8."""
    FMT: tl.constexpr = P.layout
    STEPS: tl.constexpr = FMT.steps_per_set
    s0, m0, s1, m1 = set_scales(words, s, FMT)
    # The codes are shifted left in their bytes; powers of two do not round.
    NEAR: tl.constexpr = 1.0 / (1 << dot_shift(FMT, s * STEPS, 0))
    FAR: tl.constexpr = 1.0 / (1 << dot_shift(FMT, s * STEPS, 1))
    near_dot, far_dot = _set_dots(words, x, s, P)
    t = x[STEPS]
    near = tl.fma(s0, t * NEAR * near_dot, sums[0])
    far = tl.fma(s1, t * FAR * far_dot, sums[1])
    if FMT.has_min:
        x_sum = x[STEPS + 1]
        return near, far, tl.fma(m0, x_sum, sums[2]), tl.fma(m1, x_sum, sums[3])
    else:
        return near, far, sums[2], sums[3]


@triton.jit
def _load_activations(plane, x, k_warp, lane, i: tl.constexpr, P: tl.constexpr):
    """`_load_set` for every set of the warp's chunk number i."""
    SETS: tl.constexpr = P.layout.sets
    loaded = ()
    for s in tl.static_range(SETS):
        if (i + 1) * P.k_warps <= P.chunks:
            loaded = loaded + (_load_set(plane, x, k_warp, i * P.k_warps, lane, s, P),)
        else:
            # Past the edge codes are zero, but the activations read there must exist.
            c = tl.minimum(k_warp + i * P.k_warps, P.chunks - 1)
            loaded = loaded + (_load_set(plane, x, c, 0, lane, s, P),)
    return loaded


@triton.jit
def _add_chunk(acc, words, x, P: tl.constexpr):
    """Adds a chunk to `acc`: rows r and r + 8."""
    FMT: tl.constexpr = P.layout
    SETS: tl.constexpr = FMT.sets
    nothing = tl.zeros_like(acc[0])
    sums = (nothing, nothing, nothing, nothing)
    for s in tl.static_range(SETS):
        sums = _add_set(sums, words, x[s], s, P)
    d0, m0, d1, m1 = super_scales(words, FMT)
    if not FMT.scaled_twice:
        near = acc[0] + (sums[0] - sums[2])
        far = acc[1] + (sums[1] - sums[3])
    else:
        near = tl.fma(d0, sums[0], acc[0])
        far = tl.fma(d1, sums[1], acc[1])
        if FMT.has_min:
            near = tl.fma(-m0, sums[2], near)
            far = tl.fma(-m1, sums[3], far)
    return near, far


@triton.jit
def _tile_chunk(matrix, tile, c, ON: tl.constexpr, lane, EVEN: tl.constexpr, P: tl.constexpr):
    """Starts reading chunk c + ON of `tile`. Past the edge: zeros, whose scales are zero too."""
    valid = (c < P.chunks - ON) & (tile < matrix.tiles)
    FMT: tl.constexpr = P.layout
    return load_words(matrix.planes, tile * P.chunks + c, ON, lane, valid, FMT, not EVEN)


@triton.jit
def start_tile(matrix, tile, k_warp, lane, P: tl.constexpr):
    """Starts reading this thread's first P.ahead chunks, before a launch waits for its activations.
    Parameters: see `tile_dots`.
    """
    COUNT: tl.constexpr = min(P.ahead, P.rounds)
    queue = ()
    for i in tl.static_range(COUNT):
        queue = queue + (_tile_chunk(matrix, tile, k_warp, i * P.k_warps, lane, P.even, P),)
    return queue


@triton.jit
def tile_dots(queue, book, matrix, x, tile, k_warp, lane, P: tl.constexpr):
    """Sums over this thread's part of the columns for weight rows r and r + 8 of its tile, fp32. book: the matrix's
    codebook (staged_book.py), of formats that have one.

    Warp `k_warp` of P.k_warps takes chunks k_warp, k_warp + P.k_warps, ...; P.ahead of them are loaded ahead, the
    first ones by `start_tile`, whose result is `queue`.
    P.early: the next chunk's activations are loaded before the weights after them. Loads complete in order, so
    activations, which are near, would wait for weights; but loading them early takes 20 registers, which can cost
    more.
    With more than MOST_UNROLLED chunks per warp, or more than four when P.ahead is 1, a loop reads one chunk ahead,
    whatever P.early is.
    """
    ROUNDS: tl.constexpr = P.rounds
    FMT: tl.constexpr = P.layout
    plane = tl.where((lane & 4) == 0, x.high.to(tl.int64), x.low.to(tl.int64)).to(tl.pointer_type(tl.int64))
    nothing = (lane & 0).to(tl.float32)
    acc = (nothing, nothing)
    if ROUNDS > MOST_UNROLLED or (P.ahead == 1 and ROUNDS > _FEW):
        return _in_a_loop(acc, queue[0], book, matrix, plane, x, tile, k_warp, lane, P)
    if P.early:
        loaded = _load_activations(plane, x, k_warp, lane, 0, P)
    for i in tl.static_range(ROUNDS):
        if P.early:
            now = loaded
            if i + 1 < ROUNDS:
                loaded = _load_activations(plane, x, k_warp, lane, i + 1, P)
        if i + P.ahead < ROUNDS:
            queue = queue + (_tile_chunk(matrix, tile, k_warp, (i + P.ahead) * P.k_warps, lane, P.even, P),)
        if not P.early:
            now = _load_activations(plane, x, k_warp, lane, i, P)
        acc = _add_chunk(acc, with_book(queue[i], book, FMT), now, P)
    return acc


@triton.jit
def _in_a_loop(acc, words, book, matrix, plane, x, tile, k_warp, lane, P: tl.constexpr):
    """`tile_dots` as a loop, one chunk ahead, starting from `words`: unrolled, ten chunks take minutes to compile."""
    FMT: tl.constexpr = P.layout
    c = k_warp
    for _ in range(P.rounds - 1):
        # Before the weights, which arrive later: loads complete in order.
        loaded = _chunk_activations(plane, x, c, lane, P)
        later = _tile_chunk(matrix, tile, c + P.k_warps, 0, lane, P.even, P)
        acc = _add_chunk(acc, with_book(words, book, FMT), loaded, P)
        words = later
        c += P.k_warps
    # Past the edge codes are zero, but the activations read there must exist.
    loaded = _chunk_activations(plane, x, tl.minimum(c, P.chunks - 1), lane, P)
    return _add_chunk(acc, with_book(words, book, FMT), loaded, P)


@triton.jit
def _chunk_activations(plane, x, c, lane, P: tl.constexpr):
    """`_load_set` for every set of chunk c."""
    SETS: tl.constexpr = P.layout.sets
    loaded = ()
    for s in tl.static_range(SETS):
        loaded = loaded + (_load_set(plane, x, c, 0, lane, s, P),)
    return loaded


@triton.jit
def reduce_tile(acc, P: tl.constexpr):
    """Adds up a program's threads: fp32 [tiles, 8, 2, 1], weight row 8*rh + r of a tile at [r, rh]."""
    split = tl.reshape(tl.join(acc[0], acc[1]), [P.tiles, P.k_warps, 8, 4, 2, 1])
    return tl.sum(tl.sum(split, axis=3), axis=1)
