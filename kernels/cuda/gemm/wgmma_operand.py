"""Packed weights as wgmma's left operand: dequantized in registers.

Every warp takes a tile of 16 rows. The stored order of the weights fixes which columns meet in an instruction
(fp16_operand.py, WGMMA), so that a thread reads exactly the weights that it must hold.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.cuda.gemm.fragments import chunk_scales, step_codes, super_scales
from quengine.kernels.cuda.gemm.mma import (
    E2M1,
    SUBNORMALS,
    in_register,
    pack_halves,
    scale_bytes_once,
    scale_e2m1,
    scale_small,
)
from quengine.kernels.cuda.weights.layout import ScaleKind

_BYTE_MIN = gl.constexpr(int(ScaleKind.BYTE_MIN))


@gluon.jit
def _fp16_pairs(words, COUNT: gl.constexpr):
    """COUNT int32 tensors [thread] of two fp16, as fp16 [thread, COUNT, 2]."""
    for level in gl.static_range(8):
        if 1 << level < COUNT:
            pairs = ()
            for i in gl.static_range(COUNT >> (level + 1)):
                pairs = pairs + (gl.join(words[i], words[i + (COUNT >> (level + 1))]),)
            words = pairs
    all_words = words[0]
    near = all_words.to(gl.int16).to(gl.float16, bitcast=True)
    far = (all_words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.join(near, far)


@gluon.jit
def _twice(x):
    """fp32 rounded to fp16, twice in an int32: one instruction, where `pack_halves` takes two and a slow conversion."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _below_128(scales):
    """-128 / SUBNORMALS times each fp16 of an int32, rounded to fp16."""
    factors = -2139062144 + 0 * scales  # twice the fp16 -2^-17
    return tl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [scales, factors], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _fp16_scales(scale, minimum, SIGNED: gl.constexpr, OVERLAP: gl.constexpr):
    """Scale and minimum for `scale_small`. Signed bytes become unsigned by adding 128, which the minimum
    subtracts again: exactly, since it is computed from the rounded scale.
    """
    if SIGNED and not OVERLAP:
        scale = _twice(scale)
        return scale, _below_128(scale)
    elif SIGNED:
        # Not `_twice`: with it, Q6_K kernels take 20 registers more, and those of 128 rows do not overlap.
        rounded = scale.to(gl.float16).to(gl.float32)
        minimum = rounded * (128.0 / SUBNORMALS)
        return pack_halves(rounded, rounded), pack_halves(-minimum, -minimum)
    else:
        return _twice(scale), _twice(-minimum)


@gluon.jit
def _fp16_factors(scale, minimum):
    """Two fp32 rounded to fp16, in an int32; to the largest number where that is exceeded, so that 0 times it is 0."""
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;",
        "=r,f,f",
        [scale, minimum],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _times_bytes(factors, word, magic, BYTES: gl.constexpr):
    """A scale and a minimum, twice in an int32 each: two bytes of `word` times `factors`.

    A byte in the last bits of the fp16 1024 makes 1024 + scale, in those of 16 it makes 16 + minimum / 64. The
    assembler takes both results from one register.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 both, less; .reg .b16 a, b; mov.b32 less, 0xCC00E400; prmt.b32 both, $2, $3, "
        + BYTES
        + "; add.rn.f16x2 both, both, less; mul.rn.f16x2 both, both, $4;"
        " mov.b32 {a, b}, both; mov.b32 $0, {a, a}; mov.b32 $1, {b, b}; }",
        "=r,=r,r,r,r",
        [word, magic, factors],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _fp16_scales_of_bytes(words, s: gl.constexpr, weight_scale, FMT: gl.constexpr):
    """`_fp16_scales` of `chunk_scales` where both are bytes below 64, without a conversion for each. The bits are the
    same, as 11 bits times 6 are rounded once, but where a minimum is 2^-9 of the largest weight or less, or where a
    set's weights are 2^-19 of it.
    """
    d0, m0, d1, m1 = super_scales(words, FMT)
    down = weight_scale * -64.0
    near = _fp16_factors(d0 * (weight_scale * (SUBNORMALS / (1 << FMT.near_shift))), m0 * down)
    far = _fp16_factors(d1 * (weight_scale * (SUBNORMALS / (1 << FMT.far_shift))), m1 * down)
    word = words[FMT.code_words + s]
    magic = in_register(gl.full(word.shape, 0x4C64, gl.int32, word.type.layout), True)
    scale, minimum = _times_bytes(near, word, magic, "0x5140")
    far_scale, far_minimum = _times_bytes(far, word, magic, "0x5342")
    return scale, minimum, far_scale, far_minimum


@gluon.jit
def words_operand(words, WARPS: gl.constexpr, A: gl.constexpr):
    """32 int32 tensors [thread] of two fp16 as the left operand, fp16 [16*WARPS, 128]: word number
    4 * block + 2 * pair + rh is of a block of 16 places and of row r or r + 8 of the warp's tile."""
    apart = _fp16_pairs(words, 32)  # [thread, 8 blocks of 16 places, pair, rh, e]
    apart = gl.reshape(apart, [WARPS, 8, 4, 8, 2, 2, 2])  # warp, r, q, block, pair, rh, e
    return gl.convert_layout(
        gl.reshape(gl.permute(apart, [0, 5, 1, 3, 4, 2, 6]), [16 * WARPS, 128]), A, assert_trivial=True
    )


@gluon.jit
def weights_operand(
    words, half: gl.constexpr, weight_scale, P: gl.constexpr, A: gl.constexpr
):  # fmt: skip
    """128 columns of this program's weights, half `half` of a chunk: fp16 [16*P.warps, 128] as wgmma's left operand.

    exact: rounded to fp16 once; else scales and minimums are rounded too, which takes a third of the instructions and
    has three times the error.
    """
    FMT: gl.constexpr = P.layout
    EXACT: gl.constexpr = P.flags.exact
    # NVFP4's scales are no powers of two: rounded to fp16 here.
    E2M1_CODES: gl.constexpr = FMT.table == 2 and (FMT.format == "MXFP4" or not EXACT)
    BYTES: gl.constexpr = FMT.scales == _BYTE_MIN and not EXACT
    WARPS: gl.constexpr = P.warps
    STEPS: gl.constexpr = FMT.steps_per_set
    SETS: gl.constexpr = FMT.sets_per_block
    SIGNED: gl.constexpr = FMT.signed
    operand = ()
    for s in gl.static_range(SETS):
        if BYTES:
            scales = _fp16_scales_of_bytes(words, half * SETS + s, weight_scale, FMT)
        else:
            # The table of E2M1 is doubled, and its scales are halved.
            scales = chunk_scales(
                words, half * SETS + s, weight_scale, FMT, 2 * E2M1 if E2M1_CODES else SUBNORMALS
            )
        near, near_min, far, far_min = scales
        if E2M1_CODES:
            near, far = _twice(near), _twice(far)
        elif not EXACT and not BYTES:
            near, near_min = _fp16_scales(near, near_min, SIGNED, P.overlap)
            far, far_min = _fp16_scales(far, far_min, SIGNED, P.overlap)
        for j in gl.static_range(STEPS):
            if E2M1_CODES:
                step = words[(half * SETS + s) * STEPS + j]
                operand = operand + scale_e2m1(step.to(gl.int32), near, far)
                operand = operand + scale_e2m1((step >> 32).to(gl.int32), near, far)
            else:
                codes = step_codes(words, (half * SETS + s) * STEPS + j, FMT, True)
                for part in gl.static_range(2):
                    near_codes = codes[2 * part]
                    far_codes = codes[2 * part + 1]
                    if EXACT:
                        near_low, near_high = scale_bytes_once(near_codes, near, near_min, SIGNED, True)
                        far_low, far_high = scale_bytes_once(far_codes, far, far_min, SIGNED, True)
                    else:
                        if SIGNED:
                            near_codes = near_codes ^ -2139062144
                            far_codes = far_codes ^ -2139062144
                        near_low, near_high = scale_small(near_codes, near, near_min)
                        far_low, far_high = scale_small(far_codes, far, far_min)
                    operand = operand + (near_low, far_low, near_high, far_high)
    return words_operand(operand, WARPS, A)
