"""Embedding on CUDA: the rows of given tokens from a packed matrix, dequantized, in one launch.

It reads the planes that the matmul reads, so a model whose embedding is also its output matrix keeps one copy. Of a
tile of 16 rows only the four lanes that hold the wanted row run, and a lane stores four columns at a time.
"""

import torch
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
from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart, PackedWeight

_MAX_CHUNKS = 32
"""Chunks per program: 128 lanes of work."""


@triton.jit
def _byte(word, at: tl.constexpr, SIGNED: tl.constexpr):
    """Byte `at` of an int32 as fp32."""
    value = (word << (24 - 8 * at)) >> 24 if SIGNED else (word >> (8 * at)) & 255
    return value.to(tl.float32)


@triton.jit
def _embedding_kernel(
    id_ptr, low_ptr, high_ptr, scale_ptr, super_ptr, out_ptr, rows, chunks,
    K: tl.constexpr, SCALE: tl.constexpr, FMT: tl.constexpr, CHUNKS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(id_ptr + token).to(tl.int64)
    # an id outside the vocabulary gives a row of NaN, never an invalid read
    known = (row >= 0) & (row < rows)
    row = tl.where(known, row, 0)
    tile = row // 16
    far = (row % 16) >= 8
    # Lane 4r + q of a tile's chunk holds rows r and r + 8, 32 columns of each block (see layout.py).
    i = tl.arange(0, 4 * CHUNKS)
    quad = i % 4
    lane = (row % 8).to(tl.int32) * 4 + quad
    chunk = tl.program_id(1) * CHUNKS + i // 4
    valid = chunk < chunks
    planes = (low_ptr, high_ptr, scale_ptr, super_ptr)
    words = load_chunk(planes, tile * chunks + chunk, 0, lane, valid, FMT, True)
    d0, dmin0, d1, dmin1 = super_scales(words, FMT)
    SIGNED: tl.constexpr = FMT.signed
    NEAR: tl.constexpr = 1.0 / (1 << FMT.near_shift)
    FAR: tl.constexpr = 1.0 / (1 << FMT.far_shift)
    STEPS: tl.constexpr = FMT.steps
    PER_SET: tl.constexpr = FMT.steps_per_set
    for step in tl.static_range(STEPS):
        codes = step_codes(words, step, FMT, ASM)
        s0, m0, s1, m1 = set_scales(words, step // PER_SET, FMT)
        scale = tl.where(far, d1 * s1 * FAR, d0 * s0 * NEAR)
        near_minimum = dmin0 * m0 if FMT.super_bytes > 0 else m0
        far_minimum = dmin1 * m1 if FMT.super_bytes > 0 else m1
        minimum = tl.where(far, far_minimum, near_minimum)
        column = chunk * FMT.chunk + quad * LANE_COLUMNS + step_column(step)
        for half in tl.static_range(2):
            word = tl.where(far, codes[2 * half + 1], codes[2 * half])
            # Byte b of a word is column b of four: joined by the bits of b, the high one first.
            even = tl.join(_byte(word, 0, SIGNED), _byte(word, 2, SIGNED))
            odd = tl.join(_byte(word, 1, SIGNED), _byte(word, 3, SIGNED))
            value = tl.reshape(tl.join(even, odd), [4 * CHUNKS, 4]) * scale[:, None]
            if FMT.has_min:
                value -= minimum[:, None]
            if SCALE != 1.0:
                value *= SCALE
            value = tl.where(known, value, float("nan"))
            at = column[:, None] + 4 * half + tl.arange(0, 4)[None, :]
            tl.store(out_ptr + token * K + at, value, mask=valid[:, None] & (at < K))


@triton.jit
def _float_rows_kernel(
    id_ptr, weight_ptr, out_ptr, rows,
    K: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(id_ptr + token).to(tl.int64)
    known = (row >= 0) & (row < rows)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < K
    value = tl.load(weight_ptr + row * K + column, mask=inside & known, other=float("nan")).to(tl.float32)
    if SCALE != 1.0:
        value *= SCALE
    tl.store(out_ptr + token * K + column, value, mask=inside)


def embedding(weight: PackedWeight, ids: torch.Tensor, scale: float = 1.0, pdl: bool = False) -> torch.Tensor:
    """Rows `ids` of a matrix of one part: fp32 [T, K], dequantized (kernels/block_formats.py), times `scale`.

    ids: int32 or int64 [T] on the device; an id outside the matrix gives a row of NaN. Raises ValueError for a
    merged matrix.
    """
    if len(weight.parts) != 1 or weight.paired:
        raise ValueError(f"embedding takes a matrix of one part, not {len(weight.parts)}")
    part = weight.parts[0]
    result = torch.empty(len(ids), part.cols, dtype=torch.float32, device=ids.device)
    assert ids.is_contiguous()
    if isinstance(part, FloatPart):
        _launch_float(part, ids, scale, result, pdl)
    else:
        _launch_packed(part, ids, scale, result, pdl)
    return result


def _launch_float(part: FloatPart, ids: torch.Tensor, scale: float, out: torch.Tensor, pdl: bool) -> None:
    assert part.weight.is_contiguous()
    block = min(1024, triton.next_power_of_2(part.cols))
    _float_rows_kernel[(len(ids), triton.cdiv(part.cols, block))](
        ids, part.weight, out, part.rows,
        K=part.cols, SCALE=scale, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _launch_packed(part: PackedPart, ids: torch.Tensor, scale: float, out: torch.Tensor, pdl: bool) -> None:
    chunks = min(_MAX_CHUNKS, max(8, triton.next_power_of_2(part.chunks)))
    _embedding_kernel[(len(ids), triton.cdiv(part.chunks, chunks))](
        ids, part.low, part.high, part.scales, part.supers, out, part.rows, part.chunks,
        K=part.cols, SCALE=scale, FMT=part.layout, CHUNKS=chunks, ASM=uses_assembly(), PDL=pdl,
        num_warps=max(1, chunks * 4 // 32), launch_pdl=pdl,
    )  # fmt: skip
