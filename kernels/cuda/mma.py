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
def _byte(word, i: tl.constexpr, SIGNED: tl.constexpr):
    if SIGNED:
        value = (word << (24 - 8 * i)) >> 24
    else:
        value = (word >> (8 * i)) & 255
    return value


@triton.jit
def _dot_bytes(a, b, A_SIGNED: tl.constexpr, B_SIGNED: tl.constexpr):
    total = _byte(a, 0, A_SIGNED) * _byte(b, 0, B_SIGNED)
    for i in tl.static_range(1, 4):
        total += _byte(a, i, A_SIGNED) * _byte(b, i, B_SIGNED)
    return total


@triton.jit
def _across_lanes(a_near, a_far, b0, b1, THREADS: tl.constexpr, A_SIGNED: tl.constexpr, B_SIGNED: tl.constexpr):
    """One half of the rows of m16n8k32: (D column 2q, D column 2q + 1), each [THREADS]."""
    WARPS: tl.constexpr = THREADS // 32
    rows = _dot_bytes(
        tl.reshape(a_near, [WARPS, 8, 1, 4]), tl.reshape(b0, [WARPS, 1, 8, 4]), A_SIGNED, B_SIGNED
    )
    rows += _dot_bytes(
        tl.reshape(a_far, [WARPS, 8, 1, 4]), tl.reshape(b1, [WARPS, 1, 8, 4]), A_SIGNED, B_SIGNED
    )
    even, odd = tl.split(tl.reshape(tl.sum(rows, axis=3), [WARPS, 8, 4, 2]))
    return tl.reshape(even, [THREADS]), tl.reshape(odd, [THREADS])


@triton.jit
def mma_int8(a, b0, b1, d, A_SIGNED: tl.constexpr, B_SIGNED: tl.constexpr, ASM: tl.constexpr):
    """d + A*B over bytes, m16n8k32: a and d are tuples of four int32 tensors, exact in int32."""
    if ASM:
        if A_SIGNED:
            if B_SIGNED:
                d = tl.inline_asm_elementwise(
                    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                    "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                    [a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]],
                    dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                    is_pure=True,
                    pack=1,
                )
            else:
                d = tl.inline_asm_elementwise(
                    "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 "
                    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                    "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                    [a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]],
                    dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                    is_pure=True,
                    pack=1,
                )
        elif B_SIGNED:
            d = tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
                "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                [a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        else:
            d = tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 "
                "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                [a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        return d
    THREADS: tl.constexpr = d[0].shape[0]
    e0, e1 = _across_lanes(a[0], a[2], b0, b1, THREADS, A_SIGNED, B_SIGNED)
    e2, e3 = _across_lanes(a[1], a[3], b0, b1, THREADS, A_SIGNED, B_SIGNED)
    return (d[0] + e0, d[1] + e1, d[2] + e2, d[3] + e3)


@triton.jit
def byte_permute(x, y, selector, ASM: tl.constexpr):
    """Byte i of the result is byte `selector nibble i` (0..7) of the eight bytes x, y. Words are int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    result = selector & 0
    for i in tl.static_range(4):
        pick = (selector >> (4 * i)) & 7
        word = tl.where(pick < 4, x, y)
        result |= ((word >> (8 * (pick & 3))) & 255) << (8 * i)
    return result
