"""The forms in which a row of fp32 values is stored: as it is, quantized for q-dot, or as a row of an fp16 operand."""

from typing import NamedTuple, TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, fp16_row_scale, store_row
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_group, store_quantized

PLAIN, QUANTIZED, FP16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

Stored: TypeAlias = Tensor | QuantizedActivations | Fp16Operand


class RowForm(NamedTuple):
    """What `store_as` is given of an output: its kind, four planes, the stride of its rows, and an operand's layout."""

    kind: int
    planes: tuple[Tensor, Tensor, Tensor, Tensor]
    stride: int
    layout: int


def form_of(out: Stored, rows: int, width: int) -> RowForm:
    """The form of `rows` rows of `width` values in `out`: a tensor [rows, width] with unit inner stride, quantized
    activations (width a multiple of 32), or an fp16 operand."""
    if isinstance(out, QuantizedActivations):
        return RowForm(QUANTIZED.value, (out.high, out.low, out.scale, out.sums), 0, 0)
    if isinstance(out, Fp16Operand):
        assert out.rows == rows and out.fits(width) and out.values.is_contiguous()
        planes = (out.values, out.values, out.row_scale, out.row_scale)
        return RowForm(FP16.value, planes, out.stride, int(out.layout))
    assert out.shape == (rows, width) and out.stride(1) == 1
    return RowForm(PLAIN.value, (out, out, out, out), out.stride(0), 0)


@triton.jit
def store_as(
    y, row, first, out_ptr, low_ptr, scale_ptr, sums_ptr, stride,
    WIDTH: tl.constexpr, KIND: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Stores y [N] as columns first .. first + N - 1 of a row of WIDTH, first and N multiples of 32. An fp16 row has
    a scale of its own: y is then all of it, with zeros beyond WIDTH, and N a multiple of 128."""
    N: tl.constexpr = y.shape[0]
    column = first + tl.arange(0, N)
    if KIND == QUANTIZED:
        high, low, scale, sums = quantize_group(tl.reshape(y, [N // 32, 32]))
        group = first // 32 + tl.arange(0, N // 32)
        store_quantized(
            out_ptr, low_ptr, scale_ptr, sums_ptr, row * (WIDTH // 32) + group, group < WIDTH // 32,
            high, low, scale, sums,
        )  # fmt: skip
    elif KIND == FP16:
        factor, row_scale = fp16_row_scale(tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
        tl.store(scale_ptr + row, row_scale)
        store_row(out_ptr, row, column, stride, y * factor, column < WIDTH, LAYOUT)
    else:
        tl.store(out_ptr + row * stride + column, y.to(out_ptr.dtype.element_ty), mask=column < WIDTH)
