"""The inner loop of the matmuls on Hopper's warp-group matrix instruction: weights are dequantized while the matrix
units multiply the ones before, and the copy engine brings the rows of x some sets of columns ahead.

Does not know: which weights and rows a program multiplies, and what becomes of the sums (matmul_wgmma.py).
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from quengine.kernels.cuda.gemm.fragments import load_chunk
from quengine.kernels.cuda.gemm.wgmma_operand import weights_operand


@gluon.jit
def copy_set(
    x_rows, stages, ready, n, slot, begin, count, token0, TB: gl.constexpr, SET: gl.constexpr
):  # fmt: skip
    """Start copying set number n of this program's `count` to its slot, n modulo the stages; the first set is number
    `begin` of the rows from token0."""
    on = n < count
    bar = ready.index(slot)
    mbarrier.expect(bar, TB * SET * 2, pred=on)
    tma.async_copy_global_to_shared(x_rows, [token0, (begin + n) * SET], bar, stages.index(slot), pred=on)


@gluon.jit
def multiply(
    planes, words, x_rows, stages, ready, tile, lane, begin, first, last, end, token0, gain,
    FMT: gl.constexpr, CHUNKS: gl.constexpr, TB: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    SET: gl.constexpr, ASYNC: gl.constexpr, EXACT: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Chunks first .. last - 1 of a program's begin .. end - 1: fp32 [16*WARPS, TB], and the words of the chunk behind.

    `words`: those of chunk `first`. All shares of a program are one queue of copied sets.
    """
    SETS: gl.constexpr = FMT.chunk // SET
    HALVES: gl.constexpr = SET // 128
    first_set = begin * SETS
    count = (end - begin) * SETS
    acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
    n = (first - begin) * SETS
    slot, turn, before = n % STAGES, (n // STAGES) & 1, (n + STAGES - 1) % STAGES
    for c in range(first, last):
        # The last chunk is read twice: as cheap as a mask is not, whose zeros are an instruction a word.
        later = load_chunk(planes, tile * CHUNKS + gl.minimum(c + 1, end - 1), 0, lane, True, FMT, False)
        for number in gl.static_range(SETS):
            rows = stages.index(slot)
            for half in gl.static_range(HALVES):
                a = weights_operand(words, number * HALVES + half, gain, FMT, WARPS, A, EXACT)
                if half == 0:
                    mbarrier.wait(ready.index(slot), turn)
                x = rows if HALVES == 1 else rows.slice(half * 128, 128, 1)
                acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=ASYNC)
                if ASYNC:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    if half == 0:
                        tl.debug_barrier()  # all warps have read the set before this, which the next is copied over
                        if n > 0:
                            copy_set(
                                x_rows, stages, ready, n - 1 + STAGES, before, first_set, count, token0, TB, SET
                            )  # fmt: skip
            if not ASYNC:
                tl.debug_barrier()
                copy_set(x_rows, stages, ready, n + STAGES, slot, first_set, count, token0, TB, SET)
            n += 1
            before = slot
            if STAGES & (STAGES - 1) == 0:
                slot, turn = n % STAGES, (n // STAGES) & 1
            else:  # cheaper than a remainder
                turn = gl.where(slot == STAGES - 1, turn ^ 1, turn)
                slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        words = later
    if ASYNC:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, words
