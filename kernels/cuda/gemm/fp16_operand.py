"""fp16 operands of matmuls: rows scaled by powers of two, so that they stay within fp16's range.

A row of activations is multiplied by 2^e so that its largest value lies in [2^13, 2^14), a weight by its part's
`weight_scale`; both are undone in fp32 after the sum. So the only rounding is to fp16's 11-bit mantissa.

`OperandLayout`: row-major, for cuBLAS; or the order in which a kernel on packed weights multiplies. A lane takes 8
consecutive columns of a row, 16 bytes, in one step; for column k, q = k // 32 % 4 is the lane's place in its quad and
j = k // 8 % 4 the step (layout.py).

   MMA       [rows / 8, columns / 128, j, row, q, 8 columns]
   WGMMA     [rows, columns / 128, j, h, p, q, 2 columns]: columns 2p and 2p + 1 (p = 0, 1) of half h of step j of the
             quad's four lanes meet in one instruction of 16 columns
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait

_TILE_ROWS = 8
OPERAND_COLUMNS = 128
"""Columns that the MMA and WGMMA layouts permute."""


class OperandLayout(IntEnum):
    """The order of an operand's values in memory, see the module docstring."""

    ROW_MAJOR = 0
    MMA = 1
    WGMMA = 2


_MMA = tl.constexpr(int(OperandLayout.MMA))
_WGMMA = tl.constexpr(int(OperandLayout.WGMMA))


@dataclass(frozen=True)
class Fp16Operand:
    """T rows of K activations: x is about values * row_scale.

    values: fp16 of `operand_shape`'s shape, unit inner stride. Padding rows hold anything; padding columns hold zeros
    in the WGMMA layout and anything in the MMA layout.
    row_scale: fp32 [T], powers of two.
    """

    values: Tensor
    row_scale: Tensor
    layout: OperandLayout = OperandLayout.ROW_MAJOR

    @classmethod
    def empty(
        cls,
        rows: int,
        cols: int,
        device: torch.device | str,
        layout: OperandLayout = OperandLayout.ROW_MAJOR,
    ) -> "Fp16Operand":
        return cls(
            torch.empty(operand_shape(rows, cols, layout), dtype=torch.float16, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            layout,
        )

    @property
    def rows(self) -> int:
        return self.row_scale.shape[0]

    @property
    def is_mma(self) -> bool:
        return self.layout is OperandLayout.MMA

    @property
    def is_wgmma(self) -> bool:
        return self.layout is OperandLayout.WGMMA

    @property
    def stride(self) -> int:
        """fp16 values between rows, in the MMA layout between tiles of rows."""
        return self.values.stride(0)

    def fits(self, cols: int) -> bool:
        """Whether the rows have `cols` columns, padded to 128 unless row-major."""
        if self.is_mma:
            return self.values.shape[1] == -(-cols // OPERAND_COLUMNS)
        return self.values.shape[-1] == (padded_cols(cols) if self.is_wgmma else cols)

    def clear_padding(self, cols: int) -> None:
        """Zeros the padding columns of the WGMMA layout, if the last 128 columns are only partly used."""
        if self.is_wgmma and cols % OPERAND_COLUMNS:
            self.values[:, cols // OPERAND_COLUMNS * OPERAND_COLUMNS :].zero_()

    def as_mma(self) -> "Fp16Operand":
        """Row-major values, copied to the MMA layout."""
        rows, cols = self.values.shape
        tiles, blocks = operand_shape(rows, cols, OperandLayout.MMA)[:2]
        padding = (0, blocks * OPERAND_COLUMNS - cols, 0, tiles * _TILE_ROWS - rows)
        padded = torch.nn.functional.pad(self.values, padding).view(tiles, 8, blocks, 4, 4, 8)
        return Fp16Operand(padded.permute(0, 2, 4, 1, 3, 5).contiguous(), self.row_scale, OperandLayout.MMA)

    def as_wgmma(self) -> "Fp16Operand":
        """Row-major values, copied to the WGMMA layout."""
        rows, cols = self.values.shape
        ordered = self.values.new_empty(operand_shape(rows, cols, OperandLayout.WGMMA))
        padded = torch.nn.functional.pad(self.values, (0, ordered.shape[1] - cols))
        split = padded.view(rows, -1, 4, 4, 2, 2, 2)
        ordered[:rows] = split.permute(0, 1, 3, 4, 5, 2, 6).reshape(rows, ordered.shape[1])
        return Fp16Operand(ordered, self.row_scale, OperandLayout.WGMMA)

    def row_major(self, cols: int) -> Tensor:
        """The values, fp16 [T, cols], row-major."""
        if self.is_wgmma:
            split = self.values[: self.rows].view(self.rows, -1, 4, 2, 2, 4, 2)
            return split.permute(0, 1, 5, 2, 3, 4, 6).reshape(self.rows, -1)[:, :cols].contiguous()
        if not self.is_mma:
            return self.values
        tiles, blocks = self.values.shape[:2]
        rows = self.values.permute(0, 3, 1, 4, 2, 5).reshape(tiles * _TILE_ROWS, blocks * OPERAND_COLUMNS)
        return rows[: self.rows, :cols].contiguous()

    @property
    def width(self) -> int:
        """K, with what the layout pads."""
        return self.values.shape[1] * OPERAND_COLUMNS if self.is_mma else self.values.shape[-1]

    def dequantize(self, cols: int | None = None) -> Tensor:
        """fp32 [T, K]. `cols` is needed where the layout pads K, that is, unless K is a multiple of 128."""
        return self.row_major(self.width if cols is None else cols).float() * self.row_scale[:, None]

    def gather(self, rows: Tensor) -> Tensor:
        """Selected rows, fp32 [rows, K]. In a padded layout K must be a multiple of 128."""
        if self.is_mma:
            return self.dequantize()[rows]
        return Fp16Operand(self.values[: self.rows][rows], self.row_scale[rows], self.layout).dequantize()


@dataclass(frozen=True)
class ScaledProduct:
    """An fp16 operand times scaled weights: its value is `values` fp32 [T, N] * row_scale [T] / weight_scale. Rows may
    be slices of wider rows. scaled: False if all scales are ones, so that `values` is the product."""

    values: Tensor
    row_scale: Tensor
    weight_scale: float
    scaled: bool = True

    def dequantize(self) -> Tensor:
        """The scaled rows, fp32 [T, N]."""
        return self.values * (self.row_scale / self.weight_scale)[:, None]

    def finish(self, residual: Tensor | None = None) -> Tensor:
        """`dequantize` in place, plus a residual fp32 [T, N], if given; returns `values`."""
        if residual is None and not self.scaled:
            return self.values
        y, added = self.values, self.values if residual is None else residual
        _finish_kernel[(y.shape[0], -(-y.shape[1] // 1024))](
            y, self.row_scale, added, y.shape[1], y.stride(0), added.stride(0), 1.0 / self.weight_scale,
            BLOCK=1024, RESIDUAL=residual is not None, num_warps=4,
        )  # fmt: skip
        return y


def operand_rows(rows: int) -> int:
    """Rows allocated in the MMA and WGMMA layouts: kernels take 1, 2, 4 or 8 tiles at a time."""
    tiles = -(-rows // _TILE_ROWS)  # not triton.cdiv, which takes some microseconds on the host
    return _TILE_ROWS * (1 << (tiles - 1).bit_length() if tiles <= 8 else -(-tiles // 8) * 8)


def padded_cols(cols: int) -> int:
    """`cols` rounded up to a multiple of 128."""
    return -(-cols // OPERAND_COLUMNS) * OPERAND_COLUMNS


def operand_shape(rows: int, cols: int, layout: OperandLayout) -> tuple[int, ...]:
    """The shape of an operand's values: row-major [rows, cols]; MMA, six axes (see the module docstring),
    rows padded by `operand_rows` and columns to 128; WGMMA [rows, columns], padded likewise.
    """
    if layout is OperandLayout.ROW_MAJOR:
        return rows, cols
    if layout is OperandLayout.MMA:
        return operand_rows(rows) // _TILE_ROWS, -(-cols // OPERAND_COLUMNS), 4, 8, 4, 8
    return operand_rows(rows), padded_cols(cols)


@triton.jit
def operand_offset(row, column, stride, LAYOUT: tl.constexpr):
    """The offset of a value in an operand. `stride`: see `Fp16Operand.stride`."""
    if LAYOUT == _MMA:
        place = (row >> 3) * stride + ((column >> 7) * 1024 + ((column >> 3) & 3) * 256)
        return place + (row & 7) * 32 + (((column >> 5) & 3) * 8 + (column & 7))
    elif LAYOUT == _WGMMA:
        place = (column & ~127) + ((column >> 2) & 7) * 16 + ((column >> 1) & 1) * 8
        return row * stride + (place + ((column >> 5) & 3) * 2 + (column & 1))
    else:
        return row * stride + column


@triton.jit
def operand_columns(place, LAYOUT: tl.constexpr):
    """The columns of a row at places [N], for loads of neighbouring places: in the WGMMA layout those of
    `operand_offset`, of which pairs are neighbours; else the places."""
    if LAYOUT == _WGMMA:
        column = (place & ~127) + ((place >> 4) & 7) * 4 + ((place >> 3) & 1) * 2
        column += ((place >> 1) & 3) * 32 + (place & 1)
        column = tl.max_contiguous(tl.multiple_of(column, 2), 2)
    else:
        column = place
    return column


@triton.jit
def places_offset(row, place, stride, LAYOUT: tl.constexpr):
    """`operand_offset` of rows [T, 1] and the columns at places [1, N], so that neighbours are loaded together."""
    if LAYOUT == _WGMMA:
        offset = row * stride + place
    else:
        offset = operand_offset(row, place, stride, LAYOUT)
        if LAYOUT == _MMA:
            offset = tl.max_contiguous(tl.multiple_of(offset, [1, 8]), [1, 8])
    return offset


@triton.jit
def store_operand(out_ptr, row, column, stride, values, mask, LAYOUT: tl.constexpr):
    """Stores `values` in an operand's layout: as fp16, or in plain rows as `out_ptr`'s type."""
    values = values.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + operand_offset(row, column, stride, LAYOUT), values, mask=mask)


@triton.jit
def fp16_row_scale(peak):
    """(factor, row scale) of rows whose largest |x| has the bits `peak`, int32: 2^(13 - its exponent) and the inverse.

    The exponent is clamped so that neither is denormal.
    """
    exponent = tl.minimum(tl.maximum(peak >> 23, 14), 253)
    scale = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def wgmma_order(values):
    """Reorders a row's columns [N], a multiple of 128, to the WGMMA layout, as `operand_offset` does one by one.

    Threads exchange values for it, so that they then store adjacent words.
    """
    N: tl.constexpr = values.shape[0]
    return tl.reshape(tl.permute(tl.reshape(values, [N // 128, 4, 8, 2, 2]), [0, 2, 3, 1, 4]), [N])


@triton.jit
def store_row(out_ptr, row, column, stride, values, inside, LAYOUT: tl.constexpr):
    """Stores a row's values, zeros in its padding, at columns [N], a multiple of 128, of an operand."""
    if LAYOUT == _WGMMA:
        tl.store(out_ptr + row * stride + column, wgmma_order(values.to(tl.float16)), mask=column < stride)
    else:
        store_operand(out_ptr, row, column, stride, values, inside, LAYOUT)


@DirectLaunch
@triton.jit
def _to_fp16_operand_kernel(
    x_ptr, out_ptr, row_scale_ptr, K, stride, BLOCK: tl.constexpr, LAYOUT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    launch_then_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.int32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
        peak = tl.maximum(peak, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale, row_scale = fp16_row_scale(tl.max(peak, axis=0))
    tl.store(row_scale_ptr + row, row_scale)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
        store_row(out_ptr, row, k, stride, x * scale, k < K, LAYOUT)


def to_fp16_operand(x: Tensor, out: Fp16Operand | None = None, pdl: bool = False) -> Fp16Operand:
    """Rounds contiguous fp32 rows [T, K] to scaled fp16, in the layout of `out` (row-major by default)."""
    rows = Fp16Operand.empty(x.shape[0], x.shape[1], x.device) if out is None else out
    block = min(4096, max(OPERAND_COLUMNS, int(triton.next_power_of_2(x.shape[1]))))
    _to_fp16_operand_kernel[(x.shape[0],)](
        x, rows.values, rows.row_scale, x.shape[1], rows.stride, BLOCK=block, LAYOUT=int(rows.layout), PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return rows


@DirectLaunch
@triton.jit
def _to_wgmma_layout_kernel(x_ptr, out_ptr, K, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_then_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
    tl.store(out_ptr + row * stride + k, wgmma_order(x), mask=k < stride)


def to_wgmma_layout(x: Fp16Operand, out: Tensor, pdl: bool = False) -> Fp16Operand:
    """Copies contiguous row-major values to `out` in the WGMMA layout."""
    rows, cols = x.values.shape
    assert x.values.is_contiguous() and out.shape == operand_shape(rows, cols, OperandLayout.WGMMA)
    _to_wgmma_layout_kernel[(rows, -(-cols // 1024))](
        x.values, out, cols, out.stride(0), BLOCK=1024, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return Fp16Operand(out, x.row_scale, OperandLayout.WGMMA)


@DirectLaunch
@triton.jit
def _finish_kernel(
    y_ptr, row_scale_ptr, residual_ptr, N, stride, residual_stride, inverse_weight_scale,
    BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * stride + n, mask=n < N, other=0.0) * (
        tl.load(row_scale_ptr + row) * inverse_weight_scale
    )
    if RESIDUAL:
        y += tl.load(residual_ptr + row * residual_stride + n, mask=n < N, other=0.0)
    tl.store(y_ptr + row * stride + n, y, mask=n < N)
