"""LayerNorm on CUDA: to plain rows, quantized for q-dot, or as an fp16 operand.

Defined in kernels/layer_norm.py. A program takes one row, which stays in fp32 registers for the mean, the variance and
the result, so a row's bits follow from its width alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.rms_norm import geometry
from quengine.kernels.cuda.row_forms import Stored, form_of, store_as
from quengine.kernels.layer_norm import LayerNorm


@DirectLaunch
@triton.jit
def _layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, low_ptr, scale_ptr, sums_ptr, x_stride, out_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, LAYOUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """bias_ptr: None where there is no bias."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps) * weight
    if bias_ptr is not None:
        y += bias
    store_as(y, row, 0, out_ptr, low_ptr, scale_ptr, sums_ptr, out_stride, WIDTH, KIND, LAYOUT)


def layer_norm(x: Tensor, norm: LayerNorm, pdl: bool = False) -> Tensor:
    """LayerNorm of the rows of x, computed in fp32 and rounded once to x's dtype.

    x: [T, D] fp16, bf16 or fp32, unit inner stride (rows may be slices of wider ones). `pdl` (sm_90 and later): the
    launch may overlap the previous one, which may produce x but neither weights nor bias.
    """
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, norm, result, pdl)
    return result


def layer_norm_quantize(x: Tensor, norm: LayerNorm, pdl: bool = False) -> QuantizedActivations:
    """`layer_norm` quantized to int16 per group of 32 for q-dot; D a multiple of 32."""
    out = QuantizedActivations.empty(x.shape[0], x.shape[1], x.device)
    _launch(x, norm, out, pdl)
    return out


def layer_norm_fp16(x: Tensor, norm: LayerNorm, out: Fp16Operand, pdl: bool = False) -> Fp16Operand:
    """`layer_norm` as an fp16 operand for the matmuls, in the layout of `out`; `out` itself."""
    _launch(x, norm, out, pdl)
    return out


def _launch(x: Tensor, norm: LayerNorm, out: Stored, pdl: bool) -> None:
    rows, width = x.shape
    assert x.stride(1) == 1 and norm.weight.shape == (width,) and norm.weight.is_contiguous()
    assert norm.bias is None or (norm.bias.shape == (width,) and norm.bias.is_contiguous())
    shape, form = geometry(1, width), form_of(out, rows, width)
    _layer_norm_kernel[(rows,)](
        x, norm.weight, norm.bias, *form.planes, x.stride(0), form.stride, norm.eps,
        WIDTH=width, BLOCK=max(shape.head, 128), KIND=form.kind, LAYOUT=form.layout, PDL=pdl,
        num_warps=shape.warps, launch_pdl=pdl,
    )  # fmt: skip
