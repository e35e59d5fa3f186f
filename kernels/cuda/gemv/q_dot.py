"""The q-dot of one tile on the device: what `kernels/q_dot.py` defines, for 1 to 8 rows of activations.

A warp multiplies tiles of 16 weight rows with the integer matrix units. Activations are int16 in two planes of signed
bytes, and one product takes both: column 2q of the B operand holds high bytes and column 2q + 1 low bytes, for the
inner indices of quad lane q alone (block-diagonal). So four groups (one a quad lane, see layout.py) are multiplied at
once without being mixed, and D's columns 2q, 2q + 1 land in lane q, which holds the scales of that group. Exact.

The fp32 order follows from the weight's shape alone: sets within a chunk, a warp's chunks, the quad's lanes, the K
warps.
"""

import triton
import triton.language as tl

from quengine.kernels.cuda.gemm.fragments import (
    LANE_COLUMNS,
    load_chunk,
    set_scales,
    step_codes,
    step_column,
    super_scales,
)
from quengine.kernels.cuda.gemm.mma import mma_int8

MOST_UNROLLED = tl.constexpr(8)
"""Chunks a warp up to which one or two rows are unrolled: each takes some seconds to compile."""


@triton.jit
def _activation_words(
    plane, column, ON: tl.constexpr, T, lane, row: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """8 bytes at `column + ON` of row `row`, for the lanes that hold this quad's part of B; zeros elsewhere."""
    valid = (lane >> 3) == (lane & 3)
    if row > 0:
        valid &= row < T
    if PADDED:
        valid &= column < K - ON
    return tl.load(plane + column // 8 + (row * K + ON) // 8, mask=valid, other=0)


@triton.jit
def _group_value(
    pointer, row: tl.constexpr, group, ON: tl.constexpr, groups: tl.constexpr, T, PADDED: tl.constexpr
):
    """pointer[row, group + ON]; rows past the last repeat it (their results are never stored)."""
    if row == 0:
        at = pointer + group
    else:
        at = pointer + (tl.minimum(T - 1, row) * groups + group)
    if PADDED:
        value = tl.load(at + ON, mask=group < groups - ON, other=0)
    else:
        value = tl.load(at + ON)
    return value


@triton.jit
def _sum_value(
    sums_ptr, row: tl.constexpr, group, ON: tl.constexpr, groups: tl.constexpr, T, s: tl.constexpr,
    FMT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The sum of the integers of a group of 32, or of set s's half of it, as fp32: exact in int32, rounded once."""
    pairs = sums_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    both = _group_value(pairs, row, group, ON, groups, T, PADDED)
    if FMT.group == 32:
        total = both.to(tl.int32) + (both >> 32).to(tl.int32)
    elif s % 2 == 0:
        total = both.to(tl.int32)
    else:
        total = (both >> 32).to(tl.int32)
    return total.to(tl.float32)


@triton.jit
def _load_set(
    x, t_ptr, sums_ptr, c, ON: tl.constexpr, T, lane, s: tl.constexpr,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Everything that set s of chunk c + ON needs of the activations, read before any of it is used.

    For each row: a word a step, of high or low bytes by lane; then for each row: t, t * sum (0 without minimums).
    """
    STEPS: tl.constexpr = FMT.steps_per_set
    quad = lane & 3
    column = c * FMT.chunk + quad * LANE_COLUMNS
    group = c * (FMT.chunk // 32) + quad
    AT: tl.constexpr = ON * FMT.chunk + step_column(s * STEPS)
    words = ()
    for row in tl.static_range(ROWS):
        for j in tl.static_range(STEPS):
            words = words + (_activation_words(x, column, AT + 8 * j, T, lane, row, K, PADDED),)
    for row in tl.static_range(ROWS):
        t = _group_value(t_ptr, row, group, AT // 32, K // 32, T, PADDED)
        if FMT.has_min:
            words = words + (t, t * _sum_value(sums_ptr, row, group, AT // 32, K // 32, T, s, FMT, PADDED))
        else:
            words = words + (t, 0.0)
    return words


@triton.jit
def _set_dots(codes, x, row: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):
    """Integer dots of a set with activation row `row`: weight rows r, r + 8, as fp32."""
    SIGNED: tl.constexpr = FMT.offset > 0 or FMT.table > 0 or FMT.low == 8
    STEPS: tl.constexpr = FMT.steps_per_set
    zero = codes[0][0] & 0
    d = (zero, zero, zero, zero)
    for j in tl.static_range(STEPS):
        word = x[row * STEPS + j]
        d = mma_int8(codes[j], word.to(tl.int32), (word >> 32).to(tl.int32), d, SIGNED, True, ASM)
    return (d[0] * 256 + d[1]).to(tl.float32), (d[2] * 256 + d[3]).to(tl.float32)


@triton.jit
def _add_set(sums, words, x, s: tl.constexpr, FMT: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """Add set s to `sums`, four for each activation row: scaled dots of rows r, r + 8, minimums of r, r + 8."""
    STEPS: tl.constexpr = FMT.steps_per_set
    WORDS: tl.constexpr = STEPS * ROWS
    codes = ()
    for j in tl.static_range(STEPS):
        codes = codes + (step_codes(words, s * STEPS + j, FMT, ASM),)
    s0, m0, s1, m1 = set_scales(words, s, FMT)
    # The codes stand further left in their bytes; powers of two round nothing.
    NEAR: tl.constexpr = 1.0 / (1 << FMT.near_shift)
    FAR: tl.constexpr = 1.0 / (1 << FMT.far_shift)
    result = ()
    for row in tl.static_range(ROWS):
        near_dot, far_dot = _set_dots(codes, x, row, FMT, ASM)
        t = x[WORDS + 2 * row]
        near = tl.fma(s0, t * NEAR * near_dot, sums[4 * row])
        far = tl.fma(s1, t * FAR * far_dot, sums[4 * row + 1])
        if FMT.has_min:
            x_sum = x[WORDS + 2 * row + 1]
            near_min = tl.fma(m0, x_sum, sums[4 * row + 2])
            far_min = tl.fma(m1, x_sum, sums[4 * row + 3])
        else:
            near_min = sums[4 * row + 2]
            far_min = sums[4 * row + 3]
        result = result + (near, far, near_min, far_min)
    return result


@triton.jit
def _load_activations(
    plane, t_ptr, sums_ptr, k_warp, T, lane, i: tl.constexpr, CHUNKS: tl.constexpr, K_WARPS: tl.constexpr,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """`_load_set` for every set of the warp's chunk number i."""
    SETS: tl.constexpr = FMT.sets
    x = ()
    for s in tl.static_range(SETS):
        if (i + 1) * K_WARPS <= CHUNKS:
            x = x + (
                _load_set(plane, t_ptr, sums_ptr, k_warp, i * K_WARPS, T, lane, s, FMT, ROWS, K, PADDED),
            )
        else:
            # Past the edge the codes are zero; the activations read there must still exist.
            c = tl.minimum(k_warp + i * K_WARPS, CHUNKS - 1)
            x = x + (_load_set(plane, t_ptr, sums_ptr, c, 0, T, lane, s, FMT, ROWS, K, PADDED),)
    return x


@triton.jit
def _add_chunk(totals, words, x, FMT: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """Add a chunk to `totals`, two (rows r and r + 8) for each activation row."""
    SETS: tl.constexpr = FMT.sets
    nothing = tl.zeros_like(totals[0])
    sums = ()
    for i in tl.static_range(4 * ROWS):
        sums = sums + (nothing,)
    for s in tl.static_range(SETS):
        sums = _add_set(sums, words, x[s], s, FMT, ROWS, ASM)
    d0, m0, d1, m1 = super_scales(words, FMT)
    result = ()
    for row in tl.static_range(ROWS):
        if FMT.super_bytes == 0:
            near = totals[2 * row] + (sums[4 * row] - sums[4 * row + 2])
            far = totals[2 * row + 1] + (sums[4 * row + 1] - sums[4 * row + 3])
        else:
            near = tl.fma(d0, sums[4 * row], totals[2 * row])
            far = tl.fma(d1, sums[4 * row + 1], totals[2 * row + 1])
            if FMT.has_min:
                near = tl.fma(-m0, sums[4 * row + 2], near)
                far = tl.fma(-m1, sums[4 * row + 3], far)
        result = result + (near, far)
    return result


@triton.jit
def _tile_chunk(
    planes,
    tile,
    tiles,
    c,
    ON: tl.constexpr,
    lane,
    FMT: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Start reading chunk c + ON of `tile`. Past the edge: zeros, whose scales are zero too."""
    valid = (c < CHUNKS - ON) & (tile < tiles)
    return load_chunk(planes, tile * CHUNKS + c, ON, lane, valid, FMT, not EVEN)


@triton.jit
def start_tile(
    planes, tile, tiles, k_warp, lane,
    FMT: tl.constexpr, K: tl.constexpr, K_WARPS: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Start reading the first AHEAD chunks of this thread's columns: what a launch can do before it waits for its
    activations. Parameters: see `tile_dots`."""
    CHUNKS: tl.constexpr = (K + FMT.chunk - 1) // FMT.chunk
    ROUNDS: tl.constexpr = (CHUNKS + K_WARPS - 1) // K_WARPS
    queue = ()
    for i in tl.static_range(min(AHEAD, ROUNDS)):
        queue = queue + (_tile_chunk(planes, tile, tiles, k_warp, i * K_WARPS, lane, FMT, CHUNKS, EVEN),)
    return queue


@triton.jit
def tile_dots(
    queue, planes, x_high, x_low, t_ptr, sums_ptr, tile, tiles, k_warp, T, lane,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, K_WARPS: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sums of this thread's part of K for weight rows r and r + 8 of its tile: 2*ROWS fp32, rows of x outermost.

    `planes`: the four plane pointers of the matrix. Warp `k_warp` of K_WARPS takes chunks k_warp, k_warp + K_WARPS,
    ...; AHEAD of them are read before they are used, the first ones by `start_tile`, whose result is `queue`.
    EARLY: the activations of the next chunk are loaded before the weights after them. Loads come back in order, so
    near ones issued after far ones wait; but they take 20 registers, which can cost more.
    More than two rows, or more than MOST_UNROLLED chunks a warp, run as a loop, one chunk ahead, whatever AHEAD and
    EARLY say.
    EVEN: no tile and no chunk lies past the edge. ROWS is 1, 2, 4 or 8 and at least T.
    """
    CHUNKS: tl.constexpr = (K + FMT.chunk - 1) // FMT.chunk
    PADDED: tl.constexpr = CHUNKS * FMT.chunk != K
    ROUNDS: tl.constexpr = (CHUNKS + K_WARPS - 1) // K_WARPS
    plane = tl.where((lane & 4) == 0, x_high.to(tl.int64), x_low.to(tl.int64)).to(tl.pointer_type(tl.int64))
    nothing = (lane & 0).to(tl.float32)
    totals = ()
    for i in tl.static_range(2 * ROWS):
        totals = totals + (nothing,)
    if ROWS > 2 or ROUNDS > MOST_UNROLLED:
        return _in_a_loop(
            totals, queue[0], planes, plane, t_ptr, sums_ptr, tile, tiles, k_warp, T, lane, FMT, ROWS, K, K_WARPS, ASM
        )  # fmt: skip
    if EARLY:
        x = _load_activations(
            plane, t_ptr, sums_ptr, k_warp, T, lane, 0, CHUNKS, K_WARPS, FMT, ROWS, K, PADDED
        )  # fmt: skip
    for i in tl.static_range(ROUNDS):
        if EARLY:
            x_now = x
            if i + 1 < ROUNDS:
                x = _load_activations(
                    plane, t_ptr, sums_ptr, k_warp, T, lane, i + 1, CHUNKS, K_WARPS, FMT, ROWS, K, PADDED
                )  # fmt: skip
        if i + AHEAD < ROUNDS:
            queue = queue + (
                _tile_chunk(planes, tile, tiles, k_warp, (i + AHEAD) * K_WARPS, lane, FMT, CHUNKS, EVEN),
            )
        if not EARLY:
            x_now = _load_activations(
                plane, t_ptr, sums_ptr, k_warp, T, lane, i, CHUNKS, K_WARPS, FMT, ROWS, K, PADDED
            )  # fmt: skip
        totals = _add_chunk(totals, queue[i], x_now, FMT, ROWS, ASM)
    return totals


@triton.jit
def _in_a_loop(
    totals, words, planes, plane, t_ptr, sums_ptr, tile, tiles, k_warp, T, lane,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, K_WARPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`tile_dots` as a loop, one chunk ahead, its first one being `words`: unrolled, more than two rows compile for
    minutes, and ten chunks for one."""
    CHUNKS: tl.constexpr = (K + FMT.chunk - 1) // FMT.chunk
    PADDED: tl.constexpr = CHUNKS * FMT.chunk != K
    ROUNDS: tl.constexpr = (CHUNKS + K_WARPS - 1) // K_WARPS
    SETS: tl.constexpr = FMT.sets
    for i in range(ROUNDS):
        c = k_warp + i * K_WARPS
        later = _tile_chunk(planes, tile, tiles, c + K_WARPS, 0, lane, FMT, CHUNKS, False)
        # Past the edge the codes are zero; the activations read there must still exist.
        inside = tl.minimum(c, CHUNKS - 1)
        x = ()
        for s in tl.static_range(SETS):
            x = x + (_load_set(plane, t_ptr, sums_ptr, inside, 0, T, lane, s, FMT, ROWS, K, PADDED),)
        totals = _add_chunk(totals, words, x, FMT, ROWS, ASM)
        words = later
    return totals


@triton.jit
def reduce_tile(totals, ROWS: tl.constexpr, TILES: tl.constexpr, K_WARPS: tl.constexpr):
    """Add up what a program's threads hold: fp32 [TILES, 8, 2, ROWS], weight row 8*rh + r of a tile at [r, rh].

    Activation rows lie in the order of `row_order`.
    """
    if ROWS == 1:
        both = tl.join(totals[0], totals[1])
    else:
        pairs = ()
        for p in tl.static_range(ROWS // 2):
            near = tl.join(totals[4 * p], totals[4 * p + 1])
            pairs = pairs + (tl.join(near, tl.join(totals[4 * p + 2], totals[4 * p + 3])),)
        if ROWS == 2:
            both = pairs[0]
        elif ROWS == 4:
            both = tl.join(pairs[0], pairs[1])
        else:
            both = tl.join(tl.join(pairs[0], pairs[1]), tl.join(pairs[2], pairs[3]))
    split = tl.reshape(both, [TILES, K_WARPS, 8, 4, 2, ROWS])
    return tl.sum(tl.sum(split, axis=3), axis=1)


@triton.jit
def row_order(ROWS: tl.constexpr):
    """Which activation row is at each place of `reduce_tile`'s last axis: the bits of the place, reversed."""
    place = tl.arange(0, ROWS)
    if ROWS == 4:
        place = (place >> 1) | ((place & 1) << 1)
    elif ROWS == 8:
        place = (place >> 2) | (place & 2) | ((place & 1) << 2)
    return place
