"""RMSNorm of a matmul's product, added to the residual stream, and the RMSNorm that reads the sum, in one launch.

    residual += rms_norm(product, post_norm);  out = rms_norm(residual, next_norm)

Definition: kernels/rms_norm.py. A program takes a row, which stays in fp32 registers, so that a row's bits follow from
its width alone.
"""

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.gemm.half import HalfRows, Products, half_scale, store_half
from quengine.kernels.cuda.gemv.activations import RoundedActivations, round_group, store_rounded
from quengine.kernels.cuda.launch.relaunch import Relaunched
from quengine.kernels.cuda.rms_norm import geometry
from quengine.kernels.rms_norm import RMSNorm

_SUM, _ROUND, _HALF = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What is stored beside the residual: nothing, the next norm's rows rounded for the q-dot, or as scaled fp16."""


@Relaunched
@triton.jit
def _post_norm_add_kernel(
    product_ptr, unscale_ptr, residual_ptr, weight_ptr, norm_ptr, out_ptr, low_ptr, scale_ptr, sums_ptr,
    out_stride, inverse_gain, eps, next_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, OUT: tl.constexpr, FORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = tl.load(product_ptr + row * WIDTH + column, mask=inside, other=0.0)
    x = tl.load(residual_ptr + row * WIDTH + column, mask=inside, other=0.0)
    if SCALED:
        y *= tl.load(unscale_ptr + row) * inverse_gain
    x += y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps) * weight
    tl.store(residual_ptr + row * WIDTH + column, x, mask=inside)
    if OUT != _SUM:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
        z = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + next_eps) * norm
    if OUT == _ROUND:
        high, low, scale, sums = round_group(tl.reshape(z, [BLOCK // 32, 32]))
        group = tl.arange(0, BLOCK // 32)
        first = row * (WIDTH // 32)
        store_rounded(
            out_ptr, low_ptr, scale_ptr, sums_ptr, first + group, group < WIDTH // 32, high, low, scale, sums
        )  # fmt: skip
    elif OUT == _HALF:
        scale, unscale = half_scale(tl.max(z.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
        tl.store(scale_ptr + row, unscale)
        store_half(out_ptr, row, column, out_stride, z * scale, inside, FORM)


def post_norm_add(
    product: torch.Tensor | Products,
    residual: torch.Tensor,
    post_norm: RMSNorm,
    next_norm: RMSNorm | None = None,
    out: RoundedActivations | HalfRows | None = None,
    pdl: bool = False,
) -> None:
    """Add `post_norm` of a product [T, D] to `residual`, both contiguous fp32, in place.

    `out`: where `next_norm` of the sum goes. `pdl` (sm_90 and later): may be launched before its predecessor has ended,
    which may produce the product and the residual. `product` and `out` may share their unscale.
    """
    y = product.values if isinstance(product, Products) else product
    assert y.shape == residual.shape and y.is_contiguous() and residual.is_contiguous()
    assert (out is None) == (next_norm is None)
    rows, width = y.shape
    norm = post_norm if next_norm is None else next_norm
    if isinstance(out, RoundedActivations):
        form, outputs, stride = 0, (out.high, out.low, out.scale, out.sums), 0
    elif out is not None:
        form, outputs, stride = int(out.form), (out.values, out.values, out.unscale, out.values), out.stride
    else:
        form, outputs, stride = 0, (y, y, y, y), 0
    kind = _SUM if out is None else _ROUND if isinstance(out, RoundedActivations) else _HALF
    shape = geometry(1, width)
    _post_norm_add_kernel[(rows,)](
        y, product.unscale if isinstance(product, Products) else y, residual, post_norm.weight, norm.weight, *outputs,
        stride, 1.0 / product.gain if isinstance(product, Products) else 1.0, post_norm.eps, norm.eps,
        WIDTH=width, BLOCK=max(shape.head, 32), SCALED=isinstance(product, Products), OUT=kind.value, FORM=form,
        PDL=pdl, num_warps=shape.warps, launch_pdl=pdl,
    )  # fmt: skip
