"""Gated linear units on CUDA: the activation as a matmul's epilogue, or on rows that a matmul has stored.

Defined in kernels/glu.py. All activations but the exact GELU are gate / (1 + exp(-z)), where z is the gate (SiLU), a
multiple of the clamped gate or, since (1 + tanh(y)) / 2 = 1 / (1 + exp(-2y)), twice the argument of GELU's tanh.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, ScaledProduct
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.cuda.pointwise import activated
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.glu import CLAMP, SWISH_SLOPE, Activation, glu_width

BIAS, ROWS, RESIDUAL = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1)
SILU, GELU_TANH, GELU_ERF = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
CLAMPED_SWISH, BIASED_SWISH = tl.constexpr(5), tl.constexpr(6)
RELU2, GELU = tl.constexpr(7), tl.constexpr(8)
QUICK_GELU = tl.constexpr(9)
"""Epilogues of a matmul: rows plus a bias, rows, rows plus a residual, or gated linear units by their activation.
BIASED_SWISH is the clamped swish of products plus a bias. RELU2 and GELU, which have no gate, are only for stored rows;
QUICK_GELU, x / (1 + exp(-1.702 x)), is no epilogue: it serves the clamped swish and vision encoders (vision_rows.py).
"""

EPILOGUES: dict[Activation, int] = {
    "silu": SILU.value,
    "gelu_tanh": GELU_TANH.value,
    "gelu_erf": GELU_ERF.value,
    "clamped_swish": CLAMPED_SWISH.value,
    "relu2": RELU2.value,
    "gelu": GELU.value,
}


def epilogue_adding(addend: Tensor | None) -> int:
    """The epilogue that adds a residual [T, N], a bias [N], or nothing."""
    kind = ROWS if addend is None else BIAS if addend.ndim == 1 else RESIDUAL
    return int(kind.value)


_TWICE_SQRT_2_OVER_PI = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
_SLOPE, _CLAMP = tl.constexpr(SWISH_SLOPE), tl.constexpr(CLAMP)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU or a GELU, fp32."""
    if ACTIVATION == GELU_TANH:
        z = x * (1.0 + 0.044715 * x * x) * _TWICE_SQRT_2_OVER_PI
        y = x / (1.0 + tl.exp(-z))
    elif ACTIVATION == GELU_ERF:
        y = activated(x, True)
    elif ACTIVATION == QUICK_GELU:
        y = x / (1.0 + tl.exp(x * -_SLOPE))
    else:
        y = x / (1.0 + tl.exp(-x))
    return y


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, fp32."""
    if ACTIVATION >= CLAMPED_SWISH:
        # Comparisons keep a NaN a NaN.
        gate = tl.where(gate > _CLAMP, _CLAMP, gate)
        up = tl.where(up > _CLAMP, _CLAMP, tl.where(up < -_CLAMP, -_CLAMP, up))
        y = activate(gate, QUICK_GELU) * (up + 1.0)
    else:
        y = activate(gate, ACTIVATION) * up
    return y


@triton.jit
def gated_at(x_ptr, column, width, ACTIVATION: tl.constexpr):
    """activation(gate) * up of columns [N] of a row [2 * width] at x_ptr, or activation(up) of a row [width]."""
    inside = column < width
    x = tl.load(x_ptr + column, mask=inside, other=0.0)
    if ACTIVATION >= RELU2:
        y = activated(x, ACTIVATION == GELU)
    else:
        y = gated(x, tl.load(x_ptr + width + column, mask=inside, other=0.0), ACTIVATION)
    return y


@triton.jit
def _glu_rows_kernel(
    x_ptr, out_ptr, width, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    launch_then_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    PARTS: tl.constexpr = 1 if ACTIVATION >= RELU2 else 2
    y = gated_at(x_ptr + row * PARTS * width, column, width, ACTIVATION)
    tl.store(out_ptr + row * width + column, y, mask=column < width)


def glu_rows(gate_up: Tensor, activation: Activation, pdl: bool = False) -> Tensor:
    """activation(gate) * up of contiguous fp32 rows [T, 2F], or of [T, F] without a gate: fp32 [T, F]."""
    rows, width = gate_up.shape[0], glu_width(gate_up.shape[1], activation)
    y = torch.empty(rows, width, dtype=torch.float32, device=gate_up.device)
    _glu_rows_kernel[(rows, triton.cdiv(width, 1024))](
        gate_up, y, width, BLOCK=1024, ACTIVATION=EPILOGUES[activation], PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return y


@triton.jit
def product_scales(row_scale, bound, ACTIVATION: tl.constexpr = SILU):
    """(factor, row scale) of the fp16 rows activation(gate) * up, powers of two, from the row scales of x and the
    weight's `product_bound`.

    Gate and up values are at most row_scale * bound < 2^above. Every activation is the gate times at most 1: products
    are below 2^(2 * above), and scaled below 2^15. With the clamped swish, whose other factor is up + 1, they are below
    2^(above + 1 + max(above, 0)), and below 7 * 8 < 2^6.
    """
    above = ((row_scale * bound).to(tl.int32, bitcast=True) >> 23) - 126
    above = tl.minimum(tl.maximum(above, -55), 70)
    if ACTIVATION >= CLAMPED_SWISH:
        power = tl.minimum(above + 1 + tl.maximum(above, 0), 6)
        scale = ((15 - power + 127) << 23).to(tl.float32, bitcast=True)
        return scale, ((power - 15 + 127) << 23).to(tl.float32, bitcast=True)
    scale = ((15 - 2 * above + 127) << 23).to(tl.float32, bitcast=True)
    return scale, ((2 * above - 15 + 127) << 23).to(tl.float32, bitcast=True)


def product_bound(part: PackedPart) -> float:
    """A bound on products of scaled fp16 rows with rows of a part: |x| |w| (Cauchy-Schwarz)."""
    return 2.0**14 * math.sqrt(part.cols) * part.norm


@DirectLaunch
@triton.jit
def _glu_product_kernel(
    z_ptr, row_scale_ptr, out_ptr, out_row_scale_ptr, width, stride, first, inverse_weight_scale, bound,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row_scale = tl.load(row_scale_ptr + row)
    out_scale, out_row_scale = product_scales(row_scale, bound, ACTIVATION)
    if tl.program_id(1) == 0:
        tl.store(out_row_scale_ptr + row, out_row_scale)
    gate = tl.load(z_ptr + row * 2 * width + column, mask=inside, other=0.0) * (
        row_scale * inverse_weight_scale
    )
    up = tl.load(z_ptr + row * 2 * width + width + column, mask=inside, other=0.0) * (
        row_scale * inverse_weight_scale
    )
    y = gated(gate, up, ACTIVATION) * out_scale
    tl.store(out_ptr + row * stride + first + column, y.to(tl.float16), mask=inside)


def glu_product(z: ScaledProduct, activation: Activation, bound: float, out: Fp16Operand, first: int) -> None:
    """activation(gate) * up of products [T, 2n], n gate columns then their up columns, into columns `first` on of out,
    an fp16 operand [T, F].

    A row scale of `out` follows from a bound on its values (`product_bound` of the weight), so that no pass over them
    is needed: typical values are 2^12 to 2^26 below it, and fp16 keeps its 11 bits over 2^29.
    """
    rows, width = z.values.shape[0], z.values.shape[1] // 2
    _glu_product_kernel[(rows, -(-width // 1024))](
        z.values, z.row_scale, out.values, out.row_scale, width, out.values.shape[1], first, 1.0 / z.weight_scale,
        bound, BLOCK=1024, ACTIVATION=EPILOGUES[activation], num_warps=4,
    )  # fmt: skip
