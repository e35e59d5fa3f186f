"""Output gates of an attention: what they are read from, and the launch that applies them to stored results.

Definition: `gate_output` of kernels/attention.py. A gated layer's qkv rows have, for each query head, its queries and
then its gates. The kernels that write an attention's results multiply them by the gates. Hopper's kernel for prompts
has no room for that, so `gate_rows` follows it.
"""

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.gemm.fp16_operand import OperandLayout, ScaledProduct, operand_offset
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch

_BLOCK = 1024


def qkv_width(spec: AttentionSpec) -> int:
    """Columns of a layer's qkv rows, gates included; a shared layer's rows have no keys and values."""
    of_others = 0 if spec.shared else 2 * spec.kv_heads
    return ((2 if spec.gated else 1) * spec.heads + of_others) * spec.head_dim


def gate_arguments(
    qkv: Tensor | ScaledProduct | None, spec: AttentionSpec
) -> tuple[Tensor | None, Tensor | None, int, float]:
    """qkv rows as a kernel takes them: pointer, row scales, stride of rows, scale of all. qkv is given where the spec
    is gated."""
    assert (qkv is not None) == spec.gated
    if qkv is None:
        return None, None, 0, 1.0
    if isinstance(qkv, ScaledProduct):
        values, row_scale, weight_scale = qkv.values, qkv.row_scale, 1.0 / qkv.weight_scale
    else:
        values, row_scale, weight_scale = qkv, None, 1.0
    assert values.stride(1) == 1 and values.shape[1] == qkv_width(spec)
    return values, row_scale, values.stride(0), weight_scale


@triton.jit
def load_gates(qkv_ptr, head, element, mask, HEAD_DIM: tl.constexpr):
    """Gates of elements of heads, fp32; qkv_ptr: of their rows. 0 where not in `mask`."""
    return tl.load(qkv_ptr + head * (2 * HEAD_DIM) + HEAD_DIM + element, mask=mask, other=0.0).to(tl.float32)


@DirectLaunch
@triton.jit
def _gate_rows_kernel(
    out_ptr, qkv_ptr, row_scale_ptr, stride, qkv_stride, weight_scale,
    WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (row, BLOCK columns)."""
    wait_then_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gates = load_gates(qkv_ptr + row * qkv_stride, column // HEAD_DIM, column % HEAD_DIM, inside, HEAD_DIM)
    if row_scale_ptr is not None:
        gates *= tl.load(row_scale_ptr + row) * weight_scale
    place = out_ptr + operand_offset(row, column, stride, LAYOUT)
    y = tl.load(place, mask=inside, other=0.0).to(tl.float32) * tl.sigmoid(gates)
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=inside)


def gate_rows(
    out: Tensor,
    qkv: Tensor | ScaledProduct,
    spec: AttentionSpec,
    layout: OperandLayout = OperandLayout.ROW_MAJOR,
    pdl: bool = False,
) -> None:
    """Multiplies `out` by sigmoid(gates) of the T rows of qkv, in place. out: an attention's results [T or more, heads
    * head_dim], plain rows or the values of an operand in `layout`."""
    values, row_scale, qkv_stride, weight_scale = gate_arguments(qkv, spec)
    assert values is not None
    width = spec.heads * spec.head_dim
    _gate_rows_kernel[(values.shape[0], triton.cdiv(width, _BLOCK))](
        out, values, row_scale, out.stride(0), qkv_stride, weight_scale,
        WIDTH=width, HEAD_DIM=spec.head_dim, LAYOUT=int(layout), BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
