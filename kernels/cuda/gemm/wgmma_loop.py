"""The inner loop of the wgmma matmuls: weights are dequantized while the matrix units multiply the previous
ones, and TMA copies the rows of x a few sets of columns ahead.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from quengine.kernels.cuda.gemm.fragments import load_chunk
from quengine.kernels.cuda.gemm.wgmma_operand import weights_operand


@gluon.jit
def copy_set(x_rows, stages, ready, n, slot, begin, count, token0, P: gl.constexpr):
    """Starts copying set number n of this program's `count` to its slot, n modulo the stages; set 0 is number
    `begin` of the rows from token0 on.
    """
    on = n < count
    bar = ready.index(slot)
    mbarrier.expect(bar, P.block * P.columns * 2, pred=on)
    tma.async_copy_global_to_shared(
        x_rows, [token0, (begin + n) * P.columns], bar, stages.index(slot), pred=on
    )  # fmt: skip


@gluon.jit
def load_turn(planes, tile, chunk, end, lane, P: gl.constexpr):
    """The words of one iteration's chunks, from number `chunk` of a tile on. Past the end the last chunk is
    loaded again: unlike a mask, whose zeros take an instruction per word, it is free.
    """
    FMT: gl.constexpr = P.layout
    TOGETHER: gl.constexpr = P.together
    words = ()
    for i in gl.static_range(TOGETHER):
        at = tile * P.chunks + gl.minimum(chunk + i, end - 1)
        words = words + load_chunk(planes, at, 0, lane, True, FMT, False)
    return words


@gluon.jit
def of_chunk(words, i: gl.constexpr, P: gl.constexpr):
    """The words of chunk i of an iteration."""
    COUNT: gl.constexpr = len(words) // P.together
    one = ()
    for number in gl.static_range(COUNT):
        one = one + (words[i * COUNT + number],)
    return one


@gluon.jit
def _multiply_turn(
    acc, words, c, n, slot, turn, x_rows, stages, ready, last, first_set, count, token0, weight_scale,
    P: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """One iteration of `multiply`, of chunk c, or of two: acc with its products, then the number, slot and turn of the
    set behind it. n, slot, turn: of its first set."""
    SETS: gl.constexpr = P.sets
    HALVES: gl.constexpr = P.columns // 128
    TOGETHER: gl.constexpr = P.together
    before = gl.where(slot == 0, P.stages, slot) - 1
    for number in gl.static_range(TOGETHER * SETS):
        chunk = of_chunk(words, number // SETS, P)
        live, scale, copied, at = True, weight_scale, count, slot
        if number >= SETS:
            live = c + 1 < last
            scale = gl.where(live, weight_scale, 0.0)
            copied = gl.where(live, count, 0)
            at = gl.where(live, slot, before)
        rows = stages.index(at)
        for half in gl.static_range(HALVES):
            a = weights_operand(chunk, number % SETS * HALVES + half, scale, P, A)
            if half == 0:
                mbarrier.wait(ready.index(at), turn, pred=live)
            x = rows if HALVES == 1 else rows.slice(half * 128, 128, 1)
            acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=P.overlap)
            if P.overlap:
                acc = warpgroup_mma_wait(1, deps=[acc])
                if half == 0:
                    # all warps have read the previous set, which the next copy overwrites
                    tl.debug_barrier()
                    if n > 0:
                        copy_set(
                            x_rows, stages, ready, n - 1 + P.stages, before, first_set, copied, token0, P
                        )
        if not P.overlap:
            tl.debug_barrier()
            copy_set(x_rows, stages, ready, n + P.stages, slot, first_set, copied, token0, P)
        n += 1
        before = slot
        if P.stages & (P.stages - 1) == 0:
            slot, turn = n % P.stages, (n // P.stages) & 1
        else:  # cheaper than a remainder
            turn = gl.where(slot == P.stages - 1, turn ^ 1, turn)
            slot = gl.where(slot == P.stages - 1, 0, slot + 1)
    return acc, n, slot, turn


@gluon.jit
def multiply(
    planes, words, x_rows, stages, ready, tile, lane, begin, first, last, end, token0, weight_scale,
    P: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr, EVEN: gl.constexpr = False,
):  # fmt: skip
    """The sums of chunks first .. last - 1 of a program's begin .. end - 1: fp32 [16*P.warps, P.block], and the words
    of the next iteration.

    `words`: those of the iteration that begins at chunk `first`. The splits of a program share one queue of copied
    sets. In an iteration of two chunks the second may be past the end: its scale is zero, it is multiplied with the
    previous set, and it copies nothing. EVEN: see WgmmaProgram.
    """
    TOGETHER: gl.constexpr = P.together
    first_set = begin * P.sets
    count = (end - begin) * P.sets
    WARPS: gl.constexpr = P.warps
    TB: gl.constexpr = P.block
    acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
    n = (first - begin) * P.sets
    slot, turn = n % P.stages, (n // P.stages) & 1
    if EVEN:
        for c in range(first, last, 2):
            later = load_turn(planes, tile, c + 1, end, lane, P)
            acc, n, slot, turn = _multiply_turn(
                acc, words, c, n, slot, turn, x_rows, stages, ready, last, first_set, count, token0, weight_scale, P, A
            )  # fmt: skip
            words = load_turn(planes, tile, c + 2, end, lane, P)
            acc, n, slot, turn = _multiply_turn(
                acc, later, c + 1, n, slot, turn, x_rows, stages, ready, last, first_set, count, token0, weight_scale,
                P, A,
            )  # fmt: skip
    else:
        for c in range(first, last, TOGETHER):
            later = load_turn(
                planes, tile, c + 1 if TOGETHER == 1 else gl.minimum(c + TOGETHER, last), end, lane, P
            )
            acc, n, slot, turn = _multiply_turn(
                acc, words, c, n, slot, turn, x_rows, stages, ready, last, first_set, count, token0, weight_scale, P, A
            )  # fmt: skip
            words = later
    if P.overlap:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, words


@gluon.jit
def copy_sets(x_rows, stages, ready, free, begin, end, token0, P: gl.constexpr):
    """The producer warp of `multiply_alone`: copies all sets of chunks begin .. end - 1, each when its slot is free."""
    for n in range((end - begin) * P.sets):
        slot = n % P.stages
        mbarrier.wait(free.index(slot), ((n // P.stages) & 1) ^ 1)
        copy_set(x_rows, stages, ready, n, slot, begin * P.sets, (end - begin) * P.sets, token0, P)


@gluon.jit
def multiply_alone(
    planes, words, stages, ready, free, tile, lane, begin, end, weight_scale,
    P: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """The sums of chunks begin .. end - 1 of a warp group's weights: fp32 [16*P.warps, P.block]. It does not
    overlap products with its own dequantization: the program's other warp group, which shares the sets of x,
    fills the gap.
    """
    SETS: gl.constexpr = P.sets
    HALVES: gl.constexpr = P.columns // 128
    WARPS: gl.constexpr = P.warps
    TB: gl.constexpr = P.block
    acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
    slot, turn = begin * 0, begin * 0
    for c in range(begin, end):
        later = load_turn(planes, tile, c + 1, end, lane, P)
        for number in gl.static_range(SETS):
            rows = stages.index(slot)
            for half in gl.static_range(HALVES):
                a = weights_operand(words, number * HALVES + half, weight_scale, P, A)
                if half == 0:
                    mbarrier.wait(ready.index(slot), turn)
                x = rows if HALVES == 1 else rows.slice(half * 128, 128, 1)
                acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(slot), count=1)
            turn = gl.where(slot == P.stages - 1, turn ^ 1, turn)
            slot = gl.where(slot == P.stages - 1, 0, slot + 1)
        words = later
    return acc
