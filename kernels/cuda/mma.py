"""The machine instructions of the matmul kernels, each with a twin in plain Triton.

A tensor here is one-dimensional with one element a thread (32 * num_warps of them): only then is element i thread
i, which is what an instruction that works across the lanes of a warp needs. `ASM` picks the NVIDIA instruction
(sm_80 and later); the twin serves Triton's interpreter, which runs no inline assembly, and other machines.

Lane 4r + q of a warp holds, for m16n8k32 (integers): A rows r (a0, a2) and r + 8 (a1, a3), inner indices 4q..4q+3
(a0, a1) and 16+4q.. (a2, a3); B column r, the same inner indices (b0, b1); D rows r (d0, d1) and r + 8 (d2, d3),
columns 2q and 2q + 1. m16n8k16 (fp16) is alike with two values a word: inner 2q, 2q+1 and 8+2q, 9+2q.
Reference: PTX ISA, "Matrix multiply-accumulate operation using mma instruction".
"""

import triton
import triton.language as tl


@triton.jit
def _bytes(words, SIGNED: tl.constexpr):
    """The four bytes of each word along a new last axis, as int32."""
    shifts = tl.arange(0, 4) * 8
    wide = tl.reshape(words, words.shape + [1])
    if SIGNED:
        value = (wide << (24 - shifts)) >> 24
    else:
        value = (wide >> shifts) & 255
    return value


@triton.jit
def _mma_int8_twin(a, b0, b1, A_SIGNED: tl.constexpr, B_SIGNED: tl.constexpr):
    """A*B of m16n8k32 for every warp, spread over the lanes as the instruction does."""
    THREADS: tl.constexpr = b0.shape[0]
    WARPS: tl.constexpr = THREADS // 32
    both = tl.join(tl.join(a[0], a[1]), tl.join(a[2], a[3]))  # [thread, rh, half]
    rows = tl.reshape(_bytes(both, A_SIGNED), [WARPS, 8, 4, 2, 8])  # [warp, r, q, rh, byte]
    rows = tl.reshape(tl.permute(rows, [0, 3, 1, 2, 4]), [WARPS, 16, 1, 32])
    columns = tl.reshape(_bytes(tl.join(b0, b1), B_SIGNED), [WARPS, 1, 8, 32])
    product = tl.reshape(tl.sum(rows * columns, axis=3), [WARPS, 2, 8, 4, 2])  # [warp, rh, r, q, column]
    even, odd = tl.split(product)
    d0, d2 = tl.split(tl.permute(even, [0, 2, 3, 1]))
    d1, d3 = tl.split(tl.permute(odd, [0, 2, 3, 1]))
    return (
        tl.reshape(d0, [THREADS]),
        tl.reshape(d1, [THREADS]),
        tl.reshape(d2, [THREADS]),
        tl.reshape(d3, [THREADS]),
    )


@triton.jit
def mma_int8(a, b0, b1, d, A_SIGNED: tl.constexpr, B_SIGNED: tl.constexpr, ASM: tl.constexpr):
    """d + A*B over bytes, m16n8k32: a and d are tuples of four int32 tensors; exact."""
    if ASM:
        A_TYPE: tl.constexpr = "s8" if A_SIGNED else "u8"
        B_TYPE: tl.constexpr = "s8" if B_SIGNED else "u8"
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32."
            + A_TYPE
            + "."
            + B_TYPE
            + ".s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        e = _mma_int8_twin(a, b0, b1, A_SIGNED, B_SIGNED)
        return (d[0] + e[0], d[1] + e[1], d[2] + e[2], d[3] + e[3])


@triton.jit
def byte_permute(x, y, selector, ASM: tl.constexpr):
    """Byte i of the result is byte `selector nibble i` (0..7) of the eight bytes x, y. Words are int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        result = selector & 0
        for i in tl.static_range(4):
            pick = (selector >> (4 * i)) & 7
            word = tl.where(pick < 4, x, y)
            result |= ((word >> (8 * (pick & 3))) & 255) << (8 * i)
        return result
