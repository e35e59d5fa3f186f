"""The inner loop of the matmuls on Hopper's warp-group matrix instruction: weights are dequantized while the matrix
units multiply the ones before, and TMA brings the rows of x some sets of columns ahead."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from quengine.kernels.cuda.gemm.fragments import load_chunk
from quengine.kernels.cuda.gemm.wgmma_operand import weights_operand


@gluon.jit
def copy_set(x_rows, stages, ready, n, slot, begin, count, token0, P: gl.constexpr):
    """Start copying set number n of this program's `count` to its slot, n modulo the stages; the first set is number
    `begin` of the rows from token0."""
    on = n < count
    bar = ready.index(slot)
    mbarrier.expect(bar, P.block * P.columns * 2, pred=on)
    tma.async_copy_global_to_shared(
        x_rows, [token0, (begin + n) * P.columns], bar, stages.index(slot), pred=on
    )  # fmt: skip


@gluon.jit
def multiply(
    planes, words, x_rows, stages, ready, tile, lane, begin, first, last, end, token0, weight_scale,
    P: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Chunks first .. last - 1 of a program's begin .. end - 1: fp32 [16*P.warps, P.block], and the words of the chunk
    that follows.

    `words`: those of chunk `first`. All splits of a program are one queue of copied sets.
    """
    SETS: gl.constexpr = P.sets
    FMT: gl.constexpr = P.layout
    HALVES: gl.constexpr = P.columns // 128
    first_set = begin * SETS
    count = (end - begin) * SETS
    WARPS: gl.constexpr = P.warps
    TB: gl.constexpr = P.block
    acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
    n = (first - begin) * SETS
    slot, turn, before = n % P.stages, (n // P.stages) & 1, (n + P.stages - 1) % P.stages
    for c in range(first, last):
        # The last chunk is read twice: as cheap as a mask is not, whose zeros are an instruction a word.
        at = tile * P.chunks + gl.minimum(c + 1, end - 1)
        later = load_chunk(planes, at, 0, lane, True, FMT, False)
        for number in gl.static_range(SETS):
            rows = stages.index(slot)
            for half in gl.static_range(HALVES):
                a = weights_operand(words, number * HALVES + half, weight_scale, P, A)
                if half == 0:
                    mbarrier.wait(ready.index(slot), turn)
                x = rows if HALVES == 1 else rows.slice(half * 128, 128, 1)
                acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=P.overlap)
                if P.overlap:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    if half == 0:
                        tl.debug_barrier()  # all warps have read the set before this, which the next is copied over
                        if n > 0:
                            copy_set(
                                x_rows, stages, ready, n - 1 + P.stages, before, first_set, count, token0, P
                            )
            if not P.overlap:
                tl.debug_barrier()
                copy_set(x_rows, stages, ready, n + P.stages, slot, first_set, count, token0, P)
            n += 1
            before = slot
            if P.stages & (P.stages - 1) == 0:
                slot, turn = n % P.stages, (n // P.stages) & 1
            else:  # cheaper than a remainder
                turn = gl.where(slot == P.stages - 1, turn ^ 1, turn)
                slot = gl.where(slot == P.stages - 1, 0, slot + 1)
        words = later
    if P.overlap:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, words
