"""The machine instructions of the matmul kernels, each with an equivalent in plain Triton.

Tensors here are one-dimensional with one element per thread (32 * num_warps of them): only then is element i in thread
i, as instructions that work across the lanes of a warp require. `ASM` selects the NVIDIA instruction (sm_80 and
later); the equivalent serves Triton's interpreter, which runs no inline assembly, and other vendors' GPUs.

Lane 4r + q of a warp holds, for m16n8k32 (integers): A rows r (a0, a2) and r + 8 (a1, a3), inner indices 4q..4q+3 (a0,
a1) and 16+4q.. (a2, a3); B column r, the same inner indices (b0, b1); D rows r (d0, d1) and r + 8 (d2, d3), columns 2q
and 2q + 1. m16n8k16 (fp16) is alike with two values per word: inner 2q, 2q+1 and 8+2q, 9+2q. Reference: PTX ISA,
"Matrix multiply-accumulate operation using mma instruction".
"""

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.launch.gpu import current_gpu

SUBNORMALS = tl.constexpr(16777216.0)
"""A byte b in the low bits of an fp16 has the value b / SUBNORMALS."""

E2M1 = tl.constexpr(16384.0)
"""A 4-bit float moved into fp16's exponent and mantissa bits has its value divided by E2M1."""


def uses_assembly() -> bool:
    """Whether kernels may use NVIDIA instructions: not in the interpreter, not on other vendors' GPUs."""
    return current_gpu() is not None and torch.version.hip is None


@triton.jit
def prefetch(pointers, ASM: tl.constexpr):
    """Prefetches what `pointers` point at into the L2 cache, which occupies no registers. Does nothing without ASM."""
    if ASM:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


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
def _products(a, b):
    """A*B of m16n8k32 (bytes) or m16n8k16 (fp16) for every warp, spread over the lanes as by the instruction: four
    [threads]. a: the N elements of each word of A, [threads, 2, 2, N]; b: those of B, [threads, 2, N].
    """
    THREADS: tl.constexpr = a.shape[0]
    WARPS: tl.constexpr = THREADS // 32
    DEPTH: tl.constexpr = 8 * a.shape[3]
    rows = tl.reshape(a, [WARPS, 8, 4, 2, DEPTH // 4])  # [warp, r, q, rh, element]
    rows = tl.reshape(tl.permute(rows, [0, 3, 1, 2, 4]), [WARPS, 16, 1, DEPTH])
    columns = tl.reshape(b, [WARPS, 1, 8, DEPTH])
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
        both = tl.join(tl.join(a[0], a[1]), tl.join(a[2], a[3]))  # [thread, rh, half]
        e = _products(_bytes(both, A_SIGNED), _bytes(tl.join(b0, b1), B_SIGNED))
        return (d[0] + e[0], d[1] + e[1], d[2] + e[2], d[3] + e[3])


_LOAD_GLOBAL = tl.constexpr(
    "{ .reg .b64 at; mad.wide.u32 at, $1, 1, $2; ld.global.nc.L1::evict_last.b32 $0, [at]; }"
)
_LOAD_SHARED = tl.constexpr("{ .reg .b32 at; add.u32 at, $1, $2; ld.shared.b32 $0, [at]; }")


@triton.jit
def load_entry(table, offset, ASM: tl.constexpr):
    """The int32 of `table` at byte `offset`, a multiple of 4. The table is a small one: in shared memory (an address),
    or in global memory (a pointer), where the L1 cache is to keep it while weights pass through it.
    """
    if not ASM:
        return tl.load(table + offset // 4)
    elif table.dtype.is_ptr():
        return tl.inline_asm_elementwise(
            _LOAD_GLOBAL, "=r,r,l", [offset, table.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _LOAD_SHARED, "=r,r,r", [offset, table], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def byte_permute(x, y, selector, ASM: tl.constexpr):
    """Byte i of the result is byte `nibble i of selector` (0..7) of the eight bytes x, y; if the nibble has
    bit 3 set, that byte's sign in all bits. Words are int32.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        result = selector & 0
        for i in tl.static_range(4):
            pick = (selector >> (4 * i)) & 15
            byte = tl.where((pick & 4) == 0, x, y) >> (8 * (pick & 3))
            sign = 0 - ((byte >> 7) & 1)
            result |= (tl.where(pick < 8, byte, sign) & 255) << (8 * i)
        return result


@triton.jit
def in_register(constant, ASM: tl.constexpr):
    """An int32 constant kept in a register, for instructions that take only one literal: the assembler would
    reload a second one each time. A product whose upper half is 0, which the assembler cannot see, hides the
    constant.
    """
    if ASM:
        constant = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.u32 zero, %laneid; mul.hi.u32 zero, zero, 196611; or.b32 $0, zero, $1; }",
            "=r,r",
            [constant],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return constant


@triton.constexpr_function
def _zeros_assembly(count: int) -> str:
    """Assembly for `count` zeros that depend on as many values, as far as the assembler can see."""
    lines = ["{ .reg .b32 zero, all; mov.u32 zero, %laneid; mul.hi.u32 zero, zero, 196611; mov.b32 all, 0;"]
    lines += [f"or.b32 all, all, ${count + i};" for i in range(count)]
    lines += ["and.b32 all, all, zero;", *(f"mov.b32 ${i}, all;" for i in range(count)), "}"]
    return " ".join(lines)


@triton.jit
def zeros_behind(values, ASM: tl.constexpr):
    """fp32 zeros that depend on each 16 of a thread's fp32 `values`, for work that has to wait for their loads.

    Otherwise the assembler would start that work early and, to save registers, keep few volatile loads in flight.
    """
    if ASM:
        OPERANDS: tl.constexpr = "=f," * 16 + "f," * 15 + "f"
        zeros = tl.inline_asm_elementwise(
            _zeros_assembly(16), OPERANDS, [values], dtype=tl.float32, is_pure=True, pack=16
        )
    else:
        zeros = tl.zeros(values.shape, tl.float32)
    return zeros


@triton.jit
def _half_pair(word):
    """The two fp16 of each int32 along a new last axis, as fp32."""
    shifts = tl.arange(0, 2) * 16
    bits = (tl.reshape(word, word.shape + [1]) >> shifts).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def mma_half(a, b0, b1, d, ASM: tl.constexpr):
    """d + A*B, m16n8k16: a is four int32 of two fp16 each, b0 and b1 likewise, d four fp32 tensors."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        both = tl.join(tl.join(a[0], a[1]), tl.join(a[2], a[3]))  # [thread, rh, half]
        e = _products(_half_pair(both), _half_pair(tl.join(b0, b1)))
        return (d[0] + e[0], d[1] + e[1], d[2] + e[2], d[3] + e[3])


@triton.jit
def mma_half_step(first, last, x_first, x_last, d, ASM: tl.constexpr):
    """d + both m16n8k16 products of a step: A words `first` and `last` as in `mma_half`, each with the four
    fp16 of B in an int64.
    """
    b0, b1 = x_first.to(tl.int32), (x_first >> 32).to(tl.int32)
    c0, c1 = x_last.to(tl.int32), (x_last >> 32).to(tl.int32)
    if ASM:
        # Both instructions in one piece of assembly, which halves the compiler's work.
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$16,$17,$18,$19};"
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0,$1,$2,$3}, {$10,$11,$12,$13}, {$14,$15}, {$0,$1,$2,$3};",
            "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
            [
                first[0],
                first[1],
                first[2],
                first[3],
                b0,
                b1,
                last[0],
                last[1],
                last[2],
                last[3],
                c0,
                c1,
                d[0],
                d[1],
                d[2],
                d[3],
            ],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        return mma_half(last, c0, c1, mma_half(first, b0, b1, d, ASM), ASM)


@triton.jit
def pack_halves(low, high):
    """Two fp32 tensors rounded to fp16, in one int32 tensor."""
    bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _byte(word, i: tl.constexpr, SIGNED: tl.constexpr):
    """Byte i of a word, as int32."""
    if SIGNED:
        byte = (word << (24 - 8 * i)) >> 24
    else:
        byte = (word >> (8 * i)) & 255
    return byte


@triton.jit
def scale_bytes(word, scale, minimum, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """scale*byte - minimum in fp16 for the four bytes of a word: (bytes 0 and 1, bytes 2 and 3), two fp16 per word.

    `scale` and `minimum` are fp32, rounded to fp16 first; bytes are exact.
    """
    if ASM:
        s = pack_halves(scale, scale)
        m = pack_halves(-minimum, -minimum)
        # A byte b below 0x64 is the fp16 1024 + b; signed bytes are first made unsigned by adding 128.
        if SIGNED:
            biased = word ^ -2139062144
            bias = (word & 0) + 0x64806480
        else:
            biased = word
            bias = (word & 0) + 0x64006400
        return tl.inline_asm_elementwise(
            "{ .reg .b32 lo, hi; prmt.b32 lo, $2, 0x64646464, 0x4140; prmt.b32 hi, $2, 0x64646464, 0x4342;"
            " sub.rn.f16x2 lo, lo, $5; sub.rn.f16x2 hi, hi, $5;"
            " fma.rn.f16x2 $0, lo, $3, $4; fma.rn.f16x2 $1, hi, $3, $4; }",
            "=&r,=&r,r,r,r,r",
            [biased, s, m, bias],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        s = scale.to(tl.float16).to(tl.float32)
        m = minimum.to(tl.float16).to(tl.float32)
        values = ()
        for i in tl.static_range(4):
            values = values + (_byte(word, i, SIGNED).to(tl.float32) * s - m,)
        return (pack_halves(values[0], values[1]), pack_halves(values[2], values[3]))


@triton.jit
def scale_bytes_once(word, scale, minimum, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """`scale_bytes`, computed in fp32 and rounded to fp16 once: six instructions for two weights instead of
    three. `scale` is multiplied by SUBNORMALS; signed bytes have no minimum.
    """
    if ASM:
        # A byte alone in 16 bits is a subnormal fp16; signed bytes are first made unsigned by adding 128.
        if SIGNED:
            biased = word ^ -2139062144
            minimum = scale * (128.0 / SUBNORMALS)
        else:
            biased = word
        return tl.inline_asm_elementwise(
            "{ .reg .b32 lo, hi; .reg .b16 a, b, c, d; .reg .f32 e, f, g, h;"
            " prmt.b32 lo, $2, 0, 0x4140; prmt.b32 hi, $2, 0, 0x4342; mov.b32 {a, b}, lo; mov.b32 {c, d}, hi;"
            " cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 h, d;"
            " fma.rn.f32 e, e, $3, $4; fma.rn.f32 f, f, $3, $4; fma.rn.f32 g, g, $3, $4; fma.rn.f32 h, h, $3, $4;"
            " cvt.rn.f16x2.f32 $0, f, e; cvt.rn.f16x2.f32 $1, h, g; }",
            "=&r,=&r,r,f,f",
            [biased, scale, -minimum],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        values = ()
        for i in tl.static_range(4):
            values = values + (_byte(word, i, SIGNED).to(tl.float32) * (scale / SUBNORMALS) - minimum,)
        return (pack_halves(values[0], values[1]), pack_halves(values[2], values[3]))


@triton.jit
def scale_small(word, scale, minimum):
    """scale*byte/SUBNORMALS + minimum in fp16 for the four unsigned bytes of a word: (bytes 0 and 1, bytes 2 and 3).

    `scale`, `minimum`: two equal fp16 per word. A byte alone in 16 bits is a subnormal fp16, which can be multiplied
    directly: no bias has to be subtracted first, as in `scale_bytes`. NVIDIA only.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 lo, hi; prmt.b32 lo, $2, 0, 0x4140; prmt.b32 hi, $2, 0, 0x4342;"
        " fma.rn.f16x2 $0, lo, $3, $4; fma.rn.f16x2 $1, hi, $3, $4; }",
        "=&r,=&r,r,r,r",
        [word, scale, minimum],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def scale_e2m1(word, near, far):
    """MXFP4 weights in fp16: from a word of eight 4-bit floats, four of row r in its low half and four of row r + 8
    above, the words (first two of r, first two of r + 8, last two of r, last two of r + 8), two fp16 each.

    `near`, `far`: the scales of the two rows times E2M1, two equal fp16 per word. A float's sign, exponent and
    mantissa bits are moved to fp16's, which divides its value by E2M1, also for exponent 0: no table is needed, and
    nothing rounds. NVIDIA only.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, d, e, f;"
        " shl.b32 a, $4, 1; shl.b32 b, $4, 4; shr.u32 c, $4, 3; and.b32 a, a, 0x0e0e0e0e; and.b32 c, c, 0x0e0e0e0e;"
        " lop3.b32 a, b, 0x80808080, a, 0xea; lop3.b32 c, $4, 0x80808080, c, 0xea;"  # the high bytes of fp16
        " prmt.b32 d, a, c, 0x5140; prmt.b32 e, a, c, 0x7362;"
        " prmt.b32 a, d, 0, 0x1404; prmt.b32 b, e, 0, 0x1404; prmt.b32 c, d, 0, 0x3424; prmt.b32 f, e, 0, 0x3424;"
        " mul.rn.f16x2 $0, a, $5; mul.rn.f16x2 $1, b, $6; mul.rn.f16x2 $2, c, $5; mul.rn.f16x2 $3, f, $6; }",
        "=&r,=&r,=&r,=&r,r,r,r",
        [word, near, far],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
