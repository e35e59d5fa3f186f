"""SwiGLU of rows of gate and up values, where no matmul does it in its epilogue. Definition: kernels/swiglu.py."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.half import HalfRows, Products
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.weights.packed import PackedPart


@triton.jit
def _swiglu_rows_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def swiglu_rows(gate_up: Tensor, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """silu(gate)*up of contiguous fp32 rows [T, 2F]: fp32 [T, F]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=torch.float32, device=gate_up.device) if out is None else out
    _swiglu_rows_kernel[(rows, triton.cdiv(width, 1024))](
        gate_up, y, width, BLOCK=1024, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return y


@triton.jit
def product_scales(unscale, reach):
    """(scale, unscale) of the fp16 rows silu(gate)*up, powers of two, given those rows' of x and `reach_of` the weight.

    No gate or up value exceeds unscale * reach < 2^above, and silu(gate) no gate: their products stay below 2^15.
    """
    above = ((unscale * reach).to(tl.int32, bitcast=True) >> 23) - 126
    above = tl.minimum(tl.maximum(above, -55), 70)
    scale = ((15 - 2 * above + 127) << 23).to(tl.float32, bitcast=True)
    return scale, ((2 * above - 15 + 127) << 23).to(tl.float32, bitcast=True)


def reach_of(part: PackedPart) -> float:
    """A bound on scaled fp16 rows times rows of a part: |x| |w| (Cauchy-Schwarz)."""
    return 2.0**14 * math.sqrt(part.cols) * part.norm


@DirectLaunch
@triton.jit
def _swiglu_products_kernel(
    z_ptr, unscale_ptr, out_ptr, out_unscale_ptr, width, stride, first, inverse_gain, reach, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    unscale = tl.load(unscale_ptr + row)
    out_scale, out_unscale = product_scales(unscale, reach)
    if tl.program_id(1) == 0:
        tl.store(out_unscale_ptr + row, out_unscale)
    gate = tl.load(z_ptr + row * 2 * width + column, mask=inside, other=0.0) * (unscale * inverse_gain)
    up = tl.load(z_ptr + row * 2 * width + width + column, mask=inside, other=0.0) * (unscale * inverse_gain)
    y = gate / (1.0 + tl.exp(-gate)) * up * out_scale
    tl.store(out_ptr + row * stride + first + column, y.to(tl.float16), mask=inside)


def swiglu_products(z: Products, reach: float, out: HalfRows, first: int) -> None:
    """silu(gate)*up of products [T, 2n], n gate columns and their up columns, into columns first .. of out, scaled
    fp16 [T, F].

    The scale of a row of `out` follows from a bound on its values (`reach_of` the weight), so that no pass over them is
    needed: typical values lie 2^12 to 2^26 below it, and fp16 keeps its 11 bits over 2^29.
    """
    rows, width = z.values.shape[0], z.values.shape[1] // 2
    _swiglu_products_kernel[(rows, -(-width // 1024))](
        z.values, z.unscale, out.values, out.unscale, width, out.values.shape[1], first, 1.0 / z.gain, reach,
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
