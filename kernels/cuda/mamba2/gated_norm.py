"""Mamba2's gated norm, rms_norm(y * silu(z)) * norm by group, as fp32 rows or as the next matmul reads them.

A program takes a group if its size is a power of two >= 32, else a row; always a row for fp16 operands (one scale).
"""

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gated_delta.arithmetic import silu
from quengine.kernels.cuda.gated_delta.rows import StateRows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.mamba2.arithmetic import Mamba2Net
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.row_forms import Stored, form_of, store_as
from quengine.kernels.mamba2 import Mamba2Spec


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
    store_as(
        y, row, first, out_ptr, low_ptr, scale_ptr, sums_ptr, out_stride, WIDTH, KIND, LAYOUT
    )  # fmt: skip


def gated_norm(
    y: Tensor,
    step: StateRows,
    spec: Mamba2Spec,
    net: Mamba2Net,
    out: Stored,
    pdl: bool = False,
) -> None:
    """Multiplies y, fp32 [T, width] with unit inner stride, by silu of the rows' z, norms it by group and writes it to
    `out`: contiguous fp32 [T, width], quantized activations (width a multiple of 32), or an fp16 operand with its row
    scales."""
    assert y.shape == (len(step.x), net.width) and y.stride(1) == 1
    group, padded = net.width // net.groups, int(triton.next_power_of_2(net.width))
    columns = group if group & (group - 1) == 0 and group >= 32 else padded
    if isinstance(out, Fp16Operand):
        assert padded % 128 == 0 or not out.is_wgmma
        columns = padded
    form = form_of(out, len(y), net.width)
    _gated_norm_kernel[(len(y), triton.cdiv(net.width, columns))](
        y, step.x, step.row_scale, spec.norm, step.block_tables, step.sequences, *form.planes,
        y.stride(0), step.x.stride(0), step.block_tables.stride(0), form.stride, step.weight_scale, spec.eps,
        NET=net, COLUMNS=columns, KIND=form.kind, LAYOUT=form.layout, PDL=pdl,
        num_warps=max(1, min(16, columns // 256)), launch_pdl=pdl,
    )  # fmt: skip
