"""The gated norm of a row's heads, rms_norm(o) * norm * silu(z), as fp32 rows or as the next matmul reads them.

A program takes a row, since an fp16 operand has one scale for all heads of a row.
"""

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gated_delta.arithmetic import Net, silu
from quengine.kernels.cuda.gated_delta.rows import StateRows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.row_forms import Stored, form_of, store_as
from quengine.kernels.gated_delta import GatedDeltaSpec


@DirectLaunch
@triton.jit(do_not_specialize=["table_stride"])
def _gated_norm_kernel(
    o_ptr, x_ptr, row_scale_ptr, norm_ptr, table_ptr, sequence_ptr, out_ptr, low_ptr, scale_ptr, sums_ptr,
    o_stride, x_stride, table_stride, out_stride, weight_scale, eps,
    NET: tl.constexpr, KIND: tl.constexpr, LAYOUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (row). Rows of padding become 0."""
    wait_then_launch(PDL)
    D: tl.constexpr = NET.head_dim
    HEADS: tl.constexpr = triton.next_power_of_2(NET.value_heads)
    WIDTH: tl.constexpr = NET.value_heads * D
    COLUMNS: tl.constexpr = HEADS * D
    row = tl.program_id(0).to(tl.int64)
    sequence = row
    if sequence_ptr is not None:
        sequence = tl.load(sequence_ptr + row).to(tl.int64)
    live = tl.load(table_ptr + sequence * table_stride) != 0
    head = tl.arange(0, HEADS)[:, None]
    element = tl.arange(0, D)[None, :]
    column = head * D + element
    inside = (head < NET.value_heads) & (element >= 0) & live
    o = tl.load(o_ptr + row * o_stride + column, mask=inside, other=0.0)
    z_ptr = x_ptr + row * x_stride + (2 * NET.key_heads * D + WIDTH)
    z = tl.load(z_ptr + column, mask=inside, other=0.0) * (tl.load(row_scale_ptr + row) * weight_scale)
    norm = tl.load(norm_ptr + element)
    y = o * tl.rsqrt(tl.sum(o * o, 1) / D + eps)[:, None] * norm * silu(z)
    store_as(
        tl.reshape(y, [COLUMNS]), row, 0, out_ptr, low_ptr, scale_ptr, sums_ptr, out_stride, WIDTH, KIND, LAYOUT
    )  # fmt: skip


def gated_norm(
    o: Tensor,
    step: StateRows,
    spec: GatedDeltaSpec,
    net: Net,
    out: Stored,
    pdl: bool = False,
) -> None:
    """Norms o, fp32 [T, width] with unit inner stride, per head, multiplies it by silu of the rows' z and writes it to
    `out`: contiguous fp32 [T, width], quantized activations (width a multiple of 32), or an fp16 operand with its row
    scales."""
    assert o.shape == (len(step.x), net.width) and o.stride(1) == 1
    padded = int(triton.next_power_of_2(net.value_heads)) * net.head_dim
    assert not isinstance(out, Fp16Operand) or padded % 128 == 0 or not out.is_wgmma
    form = form_of(out, len(o), net.width)
    _gated_norm_kernel[(len(o),)](
        o, step.x, step.row_scale, spec.norm, step.block_tables, step.sequences, *form.planes,
        o.stride(0), step.x.stride(0), step.block_tables.stride(0), form.stride, step.weight_scale, spec.eps,
        NET=net, KIND=form.kind, LAYOUT=form.layout, PDL=pdl, num_warps=max(1, min(16, padded // 512)), launch_pdl=pdl,
    )  # fmt: skip
