"""Packed weights dequantized to fp16 in memory, for cuBLAS to multiply: the matmul of many rows."""

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fragments import LANE_COLUMNS, chunk_scales, load_chunk, step_codes
from quengine.kernels.cuda.gemm.mma import pack_halves, uses_assembly
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.weights.packed import PackedPart


@triton.jit
def _byte_values(word, scale, minimum, SIGNED: tl.constexpr):
    """scale*byte - minimum for the four bytes of a word, in fp32, rounded to four fp16 in an int64."""
    values = ()
    for i in tl.static_range(4):
        if SIGNED:
            byte = (word << (24 - 8 * i)) >> 24
        else:
            byte = (word >> (8 * i)) & 255
        values = values + (byte.to(tl.float32) * scale - minimum,)
    low = pack_halves(values[0], values[1]).to(tl.int64) & 0xFFFFFFFF
    return low | (pack_halves(values[2], values[3]).to(tl.int64) << 32)


@triton.jit
def _store_run(pointer, values, inside):
    """Stores 32 columns of a row, 8 words of fp16, from every thread, with adjacent words, so that stores coalesce."""
    first = tl.join(tl.join(values[0], values[1]), tl.join(values[2], values[3]))
    last = tl.join(tl.join(values[4], values[5]), tl.join(values[6], values[7]))
    run = tl.reshape(tl.permute(tl.join(first, last), [0, 3, 2, 1]), [values[0].shape[0], 8])
    tl.store(pointer[:, None] + tl.arange(0, 8)[None, :], run, mask=inside[:, None])


@DirectLaunch
@triton.jit
def _dequantize_kernel(
    low, high, scales, supers, out_ptr, chunk_count, first_tile, rows, weight_scale,
    FMT: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, PAIRED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """fp16 [rows, K] of a part, from tile first_tile on; one warp per chunk. Row 0 of `out` is that tile's first."""
    CHUNKS: tl.constexpr = (K + FMT.chunk - 1) // FMT.chunk
    BLOCKS: tl.constexpr = FMT.blocks
    SETS: tl.constexpr = FMT.sets_per_block
    STEPS: tl.constexpr = FMT.steps_per_set
    SIGNED: tl.constexpr = FMT.signed
    thread = tl.arange(0, 32 * WARPS)
    lane = thread & 31
    chunk = tl.program_id(0) * WARPS + (thread >> 5)
    valid = chunk < chunk_count
    words = load_chunk(
        (low, high, scales, supers), chunk + first_tile * CHUNKS, 0, lane, valid, FMT, True
    )  # fmt: skip
    tile = chunk // CHUNKS
    column = (chunk % CHUNKS) * FMT.chunk + (lane & 3) * LANE_COLUMNS
    if PAIRED:
        near_row = tile * 8 + (lane >> 2)
        far_row = near_row + rows // 2
        inside = valid & (near_row < rows // 2)
        far_inside = inside
    else:
        near_row = tile * 16 + (lane >> 2)
        far_row = near_row + 8
        inside = valid & (near_row < rows)
        far_inside = valid & (far_row < rows)
    pointer = out_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    near_at = pointer + (near_row.to(tl.int64) * K + column) // 4
    far_at = pointer + (far_row.to(tl.int64) * K + column) // 4
    for block in tl.static_range(BLOCKS):
        near_values = ()
        far_values = ()
        for s in tl.static_range(SETS):
            near, near_min, far, far_min = chunk_scales(words, block * SETS + s, weight_scale, FMT)
            for j in tl.static_range(STEPS):
                codes = step_codes(words, (block * SETS + s) * STEPS + j, FMT, ASM)
                for half in tl.static_range(2):
                    near_values = near_values + (_byte_values(codes[2 * half], near, near_min, SIGNED),)
                    far_values = far_values + (_byte_values(codes[2 * half + 1], far, far_min, SIGNED),)
        fits = column + block * 128 < K
        _store_run(near_at + block * 32, near_values, inside & fits)
        _store_run(far_at + block * 32, far_values, far_inside & fits)


def dequantize_part(
    part: PackedPart,
    paired: bool,
    out: Tensor,
    first_tile: int = 0,
    tiles: int | None = None,
    weight_scale: float | None = None,
) -> Tensor:
    """Writes weight_scale * weights (by default the part's own scale) as fp16 to out [rows, K]: all rows, or those of
    some tiles.

    For a paired part, the gate rows of these tiles come first, then their up rows.
    """
    count = part.tiles - first_tile if tiles is None else tiles
    chunk_count, warps = count * part.chunks, 4
    rows = min(part.rows - 16 * first_tile, 16 * count)
    _dequantize_kernel[(-(-chunk_count // warps),)](
        part.low, part.high, part.scales, part.supers, out, chunk_count, first_tile, rows,
        part.weight_scale if weight_scale is None else weight_scale,
        FMT=part.layout, K=part.cols, WARPS=warps, PAIRED=paired, ASM=uses_assembly(), num_warps=warps,
    )  # fmt: skip
    return out
