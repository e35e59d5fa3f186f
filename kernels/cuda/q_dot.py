"""The q-dot of one tile on the device: what `kernels/q_dot.py` defines, for 1 to 8 rows of activations.

A warp multiplies tiles of 16 weight rows with the integer matrix units. Activations are int16 in two byte planes, so
there is one product with the high bytes and one with the low ones; both are exact. The B operand is block-diagonal:
columns 2q and 2q + 1 hold two activation rows, and only the inner indices of quad lane q are not zero there. So four
groups (one a quad lane, see layout.py) are multiplied at once without being mixed, and D's columns 2q, 2q + 1 land in
lane q, which holds the scales of that group.

The fp32 order is fixed by the weight's shape: sets within a chunk, a warp's chunks, the quad's lanes, the K warps.

Does not know: where the rows go, or what is done with them (matvec.py).
"""

import triton
import triton.language as tl

from quengine.kernels.cuda.fragments import load_chunk, set_scales, step_codes, super_scales
from quengine.kernels.cuda.mma import mma_int8


@triton.jit
def _activation_words(plane, column, row_stride, T, lane, p: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr):
    """8 bytes at `column` of rows 2p, 2p + 1, for the lanes that hold this quad's part of B; zeros elsewhere."""
    row = 2 * p + ((lane >> 2) & 1)
    valid = (lane >> 3) == (lane & 3)
    if ROWS == 1:
        valid &= (lane & 4) == 0
    else:
        valid &= row < T
    if PADDED:
        valid &= column < K
    pointer = plane.to(tl.pointer_type(tl.int64), bitcast=True)
    wide = tl.load(pointer + (row * row_stride + column) // 8, mask=valid, other=0)
    return wide.to(tl.int32), (wide >> 32).to(tl.int32)


@triton.jit
def _group_value(pointer, row, group, groups, T, PADDED: tl.constexpr):
    """pointer[row, group]; rows past the last repeat it (their results are never stored)."""
    at = tl.minimum(row, T - 1) * groups + group
    if PADDED:
        value = tl.load(pointer + at, mask=group < groups, other=0)
    else:
        value = tl.load(pointer + at)
    return value


@triton.jit
def _sum_value(sums_ptr, row, group, groups, T, FMT: tl.constexpr, PADDED: tl.constexpr):
    """The sum of the integers of a group, as fp32: exact in int32, rounded once."""
    if FMT.group == 16:
        return _group_value(sums_ptr, row, group, groups, T, PADDED).to(tl.float32)
    both = _group_value(sums_ptr.to(tl.pointer_type(tl.int64), bitcast=True), row, group, groups, T, PADDED)
    return (both.to(tl.int32) + (both >> 32).to(tl.int32)).to(tl.float32)


@triton.jit
def _set_dots(
    codes, x_high, x_low, column, T, lane, p: tl.constexpr,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Integer dots of a set with activation rows 2p, 2p + 1: (row r, row r; rows r + 8, r + 8), as fp32."""
    SIGNED: tl.constexpr = FMT.offset > 0 or FMT.table > 0 or FMT.low == 8
    zero = lane & 0
    high = (zero, zero, zero, zero)
    low = (zero, zero, zero, zero)
    for j in tl.static_range(FMT.steps_per_set):
        h0, h1 = _activation_words(x_high, column + 8 * j, K, T, lane, p, ROWS, K, PADDED)
        l0, l1 = _activation_words(x_low, column + 8 * j, K, T, lane, p, ROWS, K, PADDED)
        high = mma_int8(codes[j], h0, h1, high, SIGNED, True, ASM)
        low = mma_int8(codes[j], l0, l1, low, SIGNED, False, ASM)
    dots = ()
    for i in tl.static_range(4):
        dots = dots + ((high[i] * 256 + low[i]).to(tl.float32),)
    return dots


@triton.jit
def _add_set(
    sums, words, x_high, x_low, t_ptr, sums_ptr, c, T, lane, s: tl.constexpr,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add set s of chunk c to `sums`: for each row 8*rh, each activation: (scaled dots, minimums)."""
    J: tl.constexpr = FMT.steps_per_set
    G: tl.constexpr = FMT.group
    # Codes of formats with an offset come shifted to the top of their bytes.
    UNSHIFT: tl.constexpr = 1.0 / (1 << (8 - FMT.bits)) if FMT.offset > 0 else 1.0
    codes = ()
    for j in tl.static_range(J):
        codes = codes + (step_codes(words, s * J + j, FMT, ASM),)
    s0, m0, s1, m1 = set_scales(words, s, FMT)
    quad = lane & 3
    column = c * FMT.chunk + s * 4 * G + quad * G
    group = c * (FMT.chunk // G) + s * 4 + quad
    ACTS: tl.constexpr = min(ROWS, 2)
    result = ()
    for p in tl.static_range((ROWS + 1) // 2):
        dots = _set_dots(codes, x_high, x_low, column, T, lane, p, FMT, ROWS, K, PADDED, ASM)
        for i in tl.static_range(ACTS):
            row = 2 * p + i
            t = _group_value(t_ptr, row, group // (32 // G), K // 32, T, PADDED) * UNSHIFT
            AT: tl.constexpr = 4 * (2 * p + i)
            result = result + (
                tl.fma(s0, t * dots[i], sums[AT]),
                tl.fma(s1, t * dots[2 + i], sums[AT + 1]),
            )
            if FMT.has_min:
                x_sum = t * _sum_value(sums_ptr, row, group, K // G, T, FMT, PADDED)
                result = result + (tl.fma(m0, x_sum, sums[AT + 2]), tl.fma(m1, x_sum, sums[AT + 3]))
            else:
                result = result + (sums[AT + 2], sums[AT + 3])
    return result


@triton.jit
def _add_chunk(
    totals, words, x_high, x_low, t_ptr, sums_ptr, c, T, lane,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add chunk c to `totals`, two (rows r and r + 8) for each activation row."""
    nothing = (lane & 0).to(tl.float32)
    sums = ()
    for i in tl.static_range(4 * ROWS):
        sums = sums + (nothing,)
    for s in tl.static_range(FMT.sets):
        sums = _add_set(sums, words, x_high, x_low, t_ptr, sums_ptr, c, T, lane, s, FMT, ROWS, K, PADDED, ASM)
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
def _tile_chunk(planes, tile, tiles, c, lane, FMT: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr):
    """Start reading chunk c of `tile`. Past the edge: zeros, whose scales are zero too."""
    valid = (c < CHUNKS) & (tile < tiles)
    return load_chunk(
        planes[0], planes[1], planes[2], planes[3], tile * CHUNKS + c, lane, valid, FMT, not EVEN
    )  # fmt: skip


@triton.jit
def tile_dots(
    planes, x_high, x_low, t_ptr, sums_ptr, tile, tiles, k_warp, T, lane,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, K_WARPS: tl.constexpr, AHEAD: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sums of this thread's share of K for weight rows r and r + 8 of its tile: 2*ROWS fp32, rows of x outermost.

    `planes`: the four plane pointers of the matrix. Warp `k_warp` of K_WARPS takes chunks k_warp, k_warp + K_WARPS,
    ...; AHEAD of them are read before they are used, the first ones before the previous kernel's results are waited for.
    EVEN: no tile and no chunk lies past the edge. ROWS is 1, 2, 4 or 8 and at least T.
    """
    CHUNKS: tl.constexpr = (K + FMT.chunk - 1) // FMT.chunk
    PADDED: tl.constexpr = CHUNKS * FMT.chunk != K
    ROUNDS: tl.constexpr = (CHUNKS + K_WARPS - 1) // K_WARPS
    queue = ()
    for i in tl.static_range(min(AHEAD, ROUNDS)):
        queue = queue + (_tile_chunk(planes, tile, tiles, k_warp + i * K_WARPS, lane, FMT, CHUNKS, EVEN),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    nothing = (lane & 0).to(tl.float32)
    totals = ()
    for i in tl.static_range(2 * ROWS):
        totals = totals + (nothing,)
    for i in tl.static_range(ROUNDS):
        if i + AHEAD < ROUNDS:
            c = k_warp + (i + AHEAD) * K_WARPS
            queue = queue + (_tile_chunk(planes, tile, tiles, c, lane, FMT, CHUNKS, EVEN),)
        c = k_warp + i * K_WARPS
        # Past the edge the codes are zero; the activations read there must still exist.
        c = c if CHUNKS % K_WARPS == 0 else tl.minimum(c, CHUNKS - 1)
        totals = _add_chunk(
            totals, queue[i], x_high, x_low, t_ptr, sums_ptr, c, T, lane, FMT, ROWS, K, PADDED, ASM
        )
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
