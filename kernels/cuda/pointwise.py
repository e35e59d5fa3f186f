"""Activations without a gate on CUDA, on a matmul's rows: as fp32 rows in place, or quantized for q-dot.

Defined in kernels/pointwise.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import ScaledProduct
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_group, store_quantized
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.pointwise import Pointwise

_COLUMNS, _GROUPS = 1024, 32


@triton.jit
def activated(x, GELU: tl.constexpr):
    """GELU, or max(x, 0)^2; a comparison keeps a NaN a NaN."""
    if GELU:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        positive = tl.where(x < 0.0, 0.0, x)
        y = positive * positive
    return y


@DirectLaunch
@triton.jit
def _pointwise_kernel(
    x_ptr, row_scale_ptr, width, inverse_weight_scale,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_then_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0)
    if SCALED:
        x *= tl.load(row_scale_ptr + row) * inverse_weight_scale
    tl.store(x_ptr + row * width + column, activated(x, GELU), mask=inside)


def pointwise(x: Tensor | ScaledProduct, activation: Pointwise, pdl: bool = False) -> Tensor:
    """Applies the activation to contiguous fp32 rows [T, F], or to a product's, in place; returns the rows."""
    scaled = isinstance(x, ScaledProduct)
    rows = x.values if isinstance(x, ScaledProduct) else x
    row_scale, weight_scale = (x.row_scale, x.weight_scale) if isinstance(x, ScaledProduct) else (rows, 1.0)
    assert rows.is_contiguous() and rows.dtype == torch.float32
    _pointwise_kernel[(rows.shape[0], -(-rows.shape[1] // _COLUMNS))](
        rows, row_scale, rows.shape[1], 1.0 / weight_scale,
        BLOCK=_COLUMNS, SCALED=scaled, GELU=activation == "gelu", PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return rows


@DirectLaunch
@triton.jit
def _pointwise_quantize_kernel(
    x_ptr, high_ptr, low_ptr, scale_ptr, sums_ptr, groups, BLOCK: tl.constexpr, GELU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    launch_then_wait(PDL)
    inside = group < groups
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    y = activated(tl.load(x_ptr + at, mask=inside[:, None], other=0.0), GELU)
    high, low, scale, sums = quantize_group(y)
    store_quantized(high_ptr, low_ptr, scale_ptr, sums_ptr, group, inside, high, low, scale, sums)


def pointwise_quantize(x: Tensor, activation: Pointwise, pdl: bool = False) -> QuantizedActivations:
    """The activation of contiguous fp32 rows [T, F], F a multiple of 32, quantized for q-dot."""
    assert x.is_contiguous() and x.dtype == torch.float32
    out = QuantizedActivations.empty(x.shape[0], x.shape[1], x.device)
    groups = x.numel() // 32
    _pointwise_quantize_kernel[(-(-groups // _GROUPS),)](
        x, out.high, out.low, out.scale, out.sums, groups,
        BLOCK=_GROUPS, GELU=activation == "gelu", PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
