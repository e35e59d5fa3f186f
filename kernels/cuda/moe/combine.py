"""Gated linear units on grouped products, and each row's weighted sum over its experts, with the residual and the next
norm.

Defined in kernels/glu.py, kernels/moe/experts.py, kernels/rms_norm.py. A program takes one row, whose bits follow from
its width alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    fp16_row_scale,
    padded_cols,
    store_row,
)
from quengine.kernels.cuda.gemm.mma import uses_assembly, zeros_behind
from quengine.kernels.cuda.glu import EPILOGUES, RELU2, gated_at
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.moe.grouped_program import Blocks
from quengine.kernels.cuda.moe.groups import PairBlocks
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.cuda.rms_norm import geometry
from quengine.kernels.glu import Activation, glu_width
from quengine.kernels.rms_norm import RMSNorm

_AT_ONCE = tl.constexpr(8)
"""Experts of a row whose products are read at a time: 16 registers each."""


@triton.constexpr_function
def _end(first: int, used: int) -> int:
    """The end of the run of a row's experts, from `first` on, that are read at a time."""
    return min(used, first + int(_AT_ONCE.value))


@DirectLaunch
@triton.jit(do_not_specialize=["first_block"])
def _grouped_glu_rows_kernel(
    x_ptr, of_block_ptr, out_ptr, row_scale_ptr, width, padded, stride, first_block,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, LAYOUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_then_wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    if first_block + tl.program_id(0) // ROWS < tl.load(of_block_ptr):
        PARTS: tl.constexpr = 1 if ACTIVATION >= RELU2 else 2
        row_ptr = x_ptr + place * PARTS * width
        peak = tl.zeros([BLOCK], tl.int32)
        for start in range(0, width, BLOCK):
            y = gated_at(row_ptr, start + tl.arange(0, BLOCK), width, ACTIVATION)
            peak = tl.maximum(peak, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        scale, row_scale = fp16_row_scale(tl.max(peak, 0))
        tl.store(row_scale_ptr + place, row_scale)
        for start in range(0, padded, BLOCK):
            column = start + tl.arange(0, BLOCK)
            y = gated_at(row_ptr, column, width, ACTIVATION)
            store_row(out_ptr, place, column, stride, y * scale, column < padded, LAYOUT)


def grouped_glu_rows(
    products: Tensor, blocks: Blocks, out: Fp16Operand, activation: Activation, pdl: bool = False
) -> None:
    """Writes activation(gate) * up of products, fp32 [places, 2F], to the rows of the fp16 operand `out`, with zeros
    from column F on. Only places of `blocks` are computed; products and `out` begin with the first block's.
    """
    places, width = (blocks.end - blocks.first) * blocks.rows, glu_width(products.shape[1], activation)
    padded = padded_cols(width)
    _grouped_glu_rows_kernel[(places,)](
        products, blocks.of_block, out.values, out.row_scale, width, padded, out.stride, blocks.first,
        ROWS=blocks.rows, BLOCK=min(2048, int(triton.next_power_of_2(padded))), ACTIVATION=EPILOGUES[activation],
        LAYOUT=int(out.layout), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@DirectLaunch
@triton.jit
def _combine_kernel(
    product_ptr, known_positions_ptr, known_weight_ptr, residual_ptr, norm_ptr, out_ptr, row_scale_ptr, out_stride, eps,
    USED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, LAYOUT: tl.constexpr,
    SHARE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if NORM:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    places = ()
    weights = ()
    # Written before `down` started; .cg, as L1 may hold values of an earlier layer.
    for slot in tl.static_range(USED):
        place = tl.load(known_positions_ptr + row * USED + slot, cache_modifier=".cg")
        places = places + (place.to(tl.int64),)
        weights = weights + (tl.load(known_weight_ptr + row * USED + slot, cache_modifier=".cg"),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    residual = tl.load(residual_ptr + row * WIDTH + column, mask=inside, other=0.0, volatile=True)
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, USED, _AT_ONCE):
        products = ()
        for slot in tl.static_range(first, _end(first, USED)):
            at = product_ptr + places[slot] * WIDTH + column
            here = inside
            if SHARE:  # another device has the experts of negative places
                here &= places[slot] >= 0
            products = products + (tl.load(at, mask=here, other=0.0, volatile=True),)
        total += zeros_behind(products[_end(first, USED) - 1 - first], ASM)
        for slot in tl.static_range(first, _end(first, USED)):
            total += weights[slot] * products[slot - first]
    x = total + residual
    tl.store(residual_ptr + row * WIDTH + column, x, mask=inside)
    if NORM:
        z = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * norm
        scale, row_scale = fp16_row_scale(tl.max(z.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
        tl.store(row_scale_ptr + row, row_scale)
        store_row(out_ptr, row, column, out_stride, z * scale, inside, LAYOUT)


def combine_experts(
    products: Tensor,
    groups: PairBlocks,
    weights: Tensor,
    residual: Tensor,
    norm: RMSNorm | None = None,
    out: Fp16Operand | None = None,
    pdl: bool = False,
) -> None:
    """Adds each row's weighted products to `residual`, contiguous fp32 [T, N], in place: products [places, N] times
    weights, fp32 [T, k], summed in the order of the row's slots, over the experts that are here. `out`: the fp16
    operand that receives `norm` of the sum.
    """
    rows, width = residual.shape
    assert products.shape[1] == width and residual.is_contiguous() and weights.is_contiguous()
    assert (norm is None) == (out is None) and (out is None or out.fits(width))
    shape = geometry(1, width)
    _combine_kernel[(rows,)](
        products, groups.positions, weights, residual, residual if norm is None else norm.weight,
        residual if out is None else out.values, residual if out is None else out.row_scale,
        0 if out is None else out.stride, 0.0 if norm is None else norm.eps,
        USED=weights.shape[1], WIDTH=width, BLOCK=max(shape.head, 128), NORM=norm is not None,
        LAYOUT=0 if out is None else int(out.layout), SHARE=groups.share is not None, ASM=uses_assembly(), PDL=pdl,
        num_warps=shape.warps, launch_pdl=pdl,
    )  # fmt: skip
