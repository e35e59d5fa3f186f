"""RMSNorm to fp16 operands in the WGMMA layout (fp16_operand.py) on Hopper, for matmul_wgmma.py.

A program takes a row, and a thread takes columns that are adjacent in the layout. So a thread writes 16 bytes at a time
and a warp whole cache lines; the kernel of rms_norm.py, which serves every layout, writes 2 bytes at a time. The sum of
squares and the largest value are found in one pass. The order of a row's sum follows from its width alone, so rows are
batch-invariant.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, fp16_row_scale
from quengine.kernels.cuda.launch.kernel import DirectLaunch


@gluon.jit
def _sum_and_largest(sum_a, largest_a, sum_b, largest_b):
    return sum_a + sum_b, gl.maximum(largest_a, largest_b)


@gluon.jit
def row_columns(PADDED: gl.constexpr, WARPS: gl.constexpr):
    """The columns of a row of PADDED blocks of 128, in a program's register order: [block, bits 1 to 3 of a
    column, bits 4 to 6, bit 0].
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1, 8, 2], [4, 8, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    B: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    P: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    H: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    E: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    block = gl.arange(0, PADDED, layout=B)[:, None, None, None]
    column = block * 128 + gl.arange(0, 8, layout=P)[None, :, None, None] * 2
    column += (
        gl.arange(0, 8, layout=H)[None, None, :, None] * 16 + gl.arange(0, 2, layout=E)[None, None, None, :]
    )
    return column


@gluon.jit
def normed_row(x, weight, eps, WIDTH: gl.constexpr, PADDED: gl.constexpr):
    """The norm of a row, with columns in the order of `row_columns` and zeros from column WIDTH on: scaled
    fp16, and the row's scale.
    """
    y = x * weight
    size = y.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    squares, largest = gl.reduce(
        (gl.reshape(x * x, [PADDED * 128]), gl.reshape(size, [PADDED * 128])), 0, _sum_and_largest
    )
    inverse_rms = gl.rsqrt(squares / WIDTH + eps)
    largest = (largest.to(gl.float32, bitcast=True) * inverse_rms).to(gl.int32, bitcast=True)
    scale, row_scale = fp16_row_scale(largest)
    return (y * inverse_rms * scale).to(gl.float16), row_scale


@DirectLaunch
@gluon.jit
def _norm_wgmma_kernel(
    x_ptr, splits_ptr, weight_ptr, out_ptr, row_scale_ptr, x_stride, eps,
    WIDTH: gl.constexpr, BLOCKS: gl.constexpr, PADDED: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The norm of rows x; with SPLITS above 0 of their sums with a product's rows [SPLITS, programs, WIDTH], which are
    stored in their place."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = gl.program_id(0).to(gl.int64)
    column = row_columns(PADDED, WARPS)
    live = column < WIDTH
    weight = gl.load(weight_ptr + column, mask=live, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_ptr += row * x_stride
    x = gl.load(x_ptr + column, mask=live, other=0.0)
    if SPLITS > 0:
        splits_ptr += row * WIDTH
        total = gl.load(splits_ptr + column, mask=live, other=0.0)
        for split in gl.static_range(1, SPLITS):
            at = splits_ptr + (split * WIDTH) * gl.num_programs(0).to(gl.int64)
            total += gl.load(at + column, mask=live, other=0.0)
        x += total
        gl.store(x_ptr + column, x, mask=live)
    y, row_scale = normed_row(x, weight, eps, WIDTH, PADDED)
    gl.store(row_scale_ptr + row, row_scale)
    store_wgmma_layout(out_ptr + row * (BLOCKS * 128), y, BLOCKS, WARPS)


@gluon.jit
def store_wgmma_layout(out_ptr, y, BLOCKS: gl.constexpr, WARPS: gl.constexpr):
    """Stores a row, y fp16 [block, 8 (bits 3, 2, 1 of a column), 8 (bits 6, 5, 4), 2 (bit 0)]
    (`operand_offset`): 8 adjacent values are bits 6, 5 and 0, and bit 1 selects one of two such runs.
    """
    PADDED: gl.constexpr = y.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 1, 2, 8], [4, 8, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    y = gl.permute(gl.reshape(y, [PADDED, 8, 4, 2, 2]), [0, 1, 3, 2, 4])
    y = gl.convert_layout(gl.reshape(y, [PADDED, 8, 2, 8]), L, assert_trivial=True)
    block = gl.arange(0, PADDED, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    low = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    high = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    near = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    low = (low & 1) * 8 + (low >> 1) * 16
    block = block[:, None, None, None]
    place = (
        block * 128 + low[None, :, None, None] + high[None, None, :, None] * 64 + near[None, None, None, :]
    )
    gl.store(out_ptr + place, y, mask=block < BLOCKS)


def row_geometry(width: int) -> tuple[int, int, int]:
    """The number of a row's blocks of 128 columns; that of a program's blocks, a power of two; and of its warps."""
    blocks = -(-width // 128)
    padded = max(4, int(triton.next_power_of_2(blocks)))
    return blocks, padded, min(32, padded // 4)


def launch_norm_wgmma(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: Fp16Operand,
    pdl: bool = False,
    product: torch.Tensor | None = None,
    splits: int = 0,
) -> None:
    """RMSNorm of fp32 rows x [T, D] with fp32 weights [D], to the WGMMA layout, padded with zeros.

    product: a buffer that starts with rows fp32 [splits, T, D]. These are first added in order, and their sum to x, in
    place.
    """
    blocks, padded, warps = row_geometry(x.shape[1])
    assert out.is_wgmma and x.dtype == weight.dtype == torch.float32
    _norm_wgmma_kernel[(x.shape[0],)](
        x, x if product is None else product, weight, out.values, out.row_scale, x.stride(0), eps,
        WIDTH=x.shape[1], BLOCKS=blocks, PADDED=padded, WARPS=warps, SPLITS=splits, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
