"""Mamba2's gated norm, rms_norm(y * silu(z)) * norm by group, as fp32 rows or as the next matmul reads them.

A program takes a row where an fp16 operand has one scale for it, or where groups are no power of two; else a group.
"""

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gated_delta.arithmetic import silu
from quengine.kernels.cuda.gated_delta.rows import StateRows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, fp16_row_scale, store_row
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_group, store_quantized
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.mamba2.arithmetic import Mamba2Net
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.mamba2 import Mamba2Spec

_PLAIN, _QUANTIZED, _FP16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What is stored of the result."""


@triton.jit
def _inverse_roots(y, column, eps, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """For each of a row's columns [COLUMNS], 1 / the root mean square of its group of GROUP columns."""
    if COLUMNS % GROUP == 0 and triton.next_power_of_2(GROUP) == GROUP:
        squares = tl.sum(tl.reshape(y * y, [COLUMNS // GROUP, GROUP]), 1)
        root = tl.rsqrt(squares / GROUP + eps)
        roots = tl.reshape(tl.broadcast_to(root[:, None], [COLUMNS // GROUP, GROUP]), [COLUMNS])
    else:
        roots = tl.zeros([COLUMNS], tl.float32)
        for first in tl.static_range(0, COLUMNS, GROUP):
            own = (column >= first) & (column < first + GROUP)
            squares = tl.sum(tl.where(own, y * y, 0.0), 0)
            roots = tl.where(own, tl.rsqrt(squares / GROUP + eps), roots)
    return roots


@DirectLaunch
@triton.jit(do_not_specialize=["table_stride"])
def _gated_norm_kernel(
    y_ptr, x_ptr, row_scale_ptr, norm_ptr, table_ptr, sequence_ptr, out_ptr, low_ptr, scale_ptr, sums_ptr,
    y_stride, x_stride, table_stride, out_stride, weight_scale, eps,
    NET: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, LAYOUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (row, COLUMNS columns). Rows of padding become 0."""
    wait_then_launch(PDL)
    WIDTH: tl.constexpr = NET.heads * NET.head_dim
    row = tl.program_id(0).to(tl.int64)
    sequence = row
    if sequence_ptr is not None:
        sequence = tl.load(sequence_ptr + row).to(tl.int64)
    live = tl.load(table_ptr + sequence * table_stride) != 0
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inside = (column < WIDTH) & live
    z = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    z *= tl.load(row_scale_ptr + row) * weight_scale
    y = tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0) * silu(z)
    norm = tl.load(norm_ptr + column, mask=column < WIDTH, other=0.0)
    y *= _inverse_roots(y, column - first, eps, COLUMNS, WIDTH // NET.groups) * norm
    if KIND == _QUANTIZED:
        high, low, scale, sums = quantize_group(tl.reshape(y, [COLUMNS // 32, 32]))
        group = first // 32 + tl.arange(0, COLUMNS // 32)
        place = row * (WIDTH // 32) + group
        store_quantized(
            out_ptr, low_ptr, scale_ptr, sums_ptr, place, group < WIDTH // 32, high, low, scale, sums
        )
    elif KIND == _FP16:
        peak = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        factor, row_scale = fp16_row_scale(peak)
        tl.store(scale_ptr + row, row_scale)
        store_row(out_ptr, row, column, out_stride, y * factor, column < WIDTH, LAYOUT)
    else:
        tl.store(out_ptr + row * WIDTH + column, y, mask=column < WIDTH)


def gated_norm(
    y: Tensor,
    step: StateRows,
    spec: Mamba2Spec,
    net: Mamba2Net,
    out: Tensor | QuantizedActivations | Fp16Operand,
    pdl: bool = False,
) -> None:
    """y fp32 [T, width], unit inner stride, times silu of the rows' z and normed by group, to `out`: contiguous fp32
    [T, width], quantized activations (width a multiple of 32), or an fp16 operand with its row scales."""
    assert y.shape == (len(step.x), net.width) and y.stride(1) == 1
    out_stride, layout, group = 0, 0, net.width // net.groups
    padded = int(triton.next_power_of_2(net.width))
    columns = group if group & (group - 1) == 0 and group >= 32 else padded
    if isinstance(out, QuantizedActivations):
        kind, planes = _QUANTIZED, (out.high, out.low, out.scale, out.sums)
    elif isinstance(out, Fp16Operand):
        assert out.fits(net.width) and out.rows == len(y) and (padded % 128 == 0 or not out.is_wgmma)
        kind, planes, columns = _FP16, (out.values, out.values, out.row_scale, out.row_scale), padded
        out_stride, layout = out.stride, int(out.layout)
    else:
        assert out.is_contiguous() and out.shape == y.shape
        kind, planes = _PLAIN, (out, out, out, out)
    _gated_norm_kernel[(len(y), triton.cdiv(net.width, columns))](
        y, step.x, step.row_scale, spec.norm, step.block_tables, step.sequences, *planes,
        y.stride(0), step.x.stride(0), step.block_tables.stride(0), out_stride, step.weight_scale, spec.eps,
        NET=net, COLUMNS=columns, KIND=kind.value, LAYOUT=layout, PDL=pdl,
        num_warps=max(1, min(16, columns // 256)), launch_pdl=pdl,
    )  # fmt: skip
