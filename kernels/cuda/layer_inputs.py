"""Per-layer embeddings on CUDA: what each layer gets for a token beside the residual stream. Defined in
kernels/layer_inputs.py.

The table's planes lie in page-locked host memory (`weights.packed.pack_on_host`), which kernels read over the bus. A
token needs one row, 6 KB of 1.6 GB in Gemma 4 E4B; in a captured step only the kernel knows which.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.embedding import embedding
from quengine.kernels.cuda.gemm.fp16_operand import ScaledProduct
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_group, store_quantized
from quengine.kernels.cuda.glu import EPILOGUES, gated
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.cuda.weights.packed import PackedWeight
from quengine.kernels.glu import Gating
from quengine.kernels.rms_norm import RMSNorm

_COLUMNS, _GROUPS = 1024, 32


@DirectLaunch
@triton.jit
def _add_normed_kernel(
    out_ptr, x_ptr, row_scale_ptr, weight_ptr, eps, inverse_weight_scale,
    PARTS: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (row, part of N columns)."""
    launch_then_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, triton.next_power_of_2(N))
    inside = d < N
    at = row * (PARTS * N) + tl.program_id(1) * N + d
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if SCALED:
        x *= tl.load(row_scale_ptr + row) * inverse_weight_scale
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * tl.load(weight_ptr + d, mask=inside, other=0.0)
    tl.store(out_ptr + at, tl.load(out_ptr + at, mask=inside, other=0.0) + y, mask=inside)


def layer_inputs(
    projected: Tensor | ScaledProduct,
    norm: RMSNorm,
    table: PackedWeight,
    ids: Tensor,
    scale: float,
    pdl: bool = False,
) -> Tensor:
    """`norm` of each n columns of projected [T, layers * n], for weights [n], plus rows `ids` of the table times
    `scale`: fp32 [T, layers * n]. ids: int32 or int64 [T] on the device."""
    out = embedding(table, ids, scale, pdl)
    values, row_scale, weight_scale = _parts(projected)
    assert values.shape == out.shape and values.is_contiguous() and values.dtype == torch.float32
    n = norm.weight.numel()
    parts = out.shape[1] // n
    _add_normed_kernel[(len(out), parts)](
        out, values, row_scale, norm.weight, norm.eps, 1.0 / weight_scale,
        PARTS=parts, N=n, SCALED=isinstance(projected, ScaledProduct), PDL=pdl,
        num_warps=max(1, min(4, n // 64)), launch_pdl=pdl,
    )  # fmt: skip
    return out


@DirectLaunch
@triton.jit
def _input_glu_kernel(
    gate_ptr, row_scale_ptr, up_ptr, out_ptr, width, up_stride, inverse_weight_scale,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_then_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * width + column, mask=inside, other=0.0)
    if SCALED:
        gate *= tl.load(row_scale_ptr + row) * inverse_weight_scale
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + column, gated(gate, up, ACTIVATION), mask=inside)


@DirectLaunch
@triton.jit
def _input_glu_quantize_kernel(
    gate_ptr, up_ptr, high_ptr, low_ptr, scale_ptr, sums_ptr, groups, up_stride,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (BLOCK groups of a row, row); groups: of a row."""
    launch_then_wait(PDL)
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    gate = tl.load(gate_ptr + row * groups * 32 + at, mask=inside[:, None], other=0.0)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside[:, None], other=0.0)
    high, low, scale, sums = quantize_group(gated(gate, up, ACTIVATION))
    store_quantized(
        high_ptr, low_ptr, scale_ptr, sums_ptr, row * groups + group, inside, high, low, scale, sums
    )


def input_glu(
    gate: Tensor | ScaledProduct, inputs: Tensor, layer: int, activation: Gating, pdl: bool = False
) -> Tensor:
    """activation(gate) * the columns of layer `layer` of `inputs`, fp32 [T, n]. gate: [T, n]. inputs: fp32
    [T, layers * n]."""
    values, row_scale, weight_scale = _parts(gate)
    rows, n = values.shape
    up = inputs[:, layer * n : (layer + 1) * n]
    assert values.is_contiguous() and values.dtype == inputs.dtype == torch.float32 and up.shape == (rows, n)
    out = torch.empty(rows, n, dtype=torch.float32, device=values.device)
    _input_glu_kernel[(rows, triton.cdiv(n, _COLUMNS))](
        values, row_scale, up, out, n, up.stride(0), 1.0 / weight_scale,
        BLOCK=_COLUMNS, SCALED=isinstance(gate, ScaledProduct), ACTIVATION=EPILOGUES[activation], PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def input_glu_quantize(
    gate: Tensor, inputs: Tensor, layer: int, activation: Gating, pdl: bool = False
) -> QuantizedActivations:
    """As `input_glu` of fp32 rows, n a multiple of 32, quantized for q-dot."""
    rows, n = gate.shape
    up = inputs[:, layer * n : (layer + 1) * n]
    assert gate.is_contiguous() and gate.dtype == inputs.dtype == torch.float32 and up.shape == (rows, n)
    out = QuantizedActivations.empty(rows, n, gate.device)
    groups = n // 32
    _input_glu_quantize_kernel[(triton.cdiv(groups, _GROUPS), rows)](
        gate, up, out.high, out.low, out.scale, out.sums, groups, up.stride(0),
        BLOCK=_GROUPS, ACTIVATION=EPILOGUES[activation], PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _parts(x: Tensor | ScaledProduct) -> tuple[Tensor, Tensor, float]:
    """Values, row scales (the values again where a product has no row scales) and the weight's scale of a product."""
    return (x.values, x.row_scale, x.weight_scale) if isinstance(x, ScaledProduct) else (x, x, 1.0)
