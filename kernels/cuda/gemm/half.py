"""fp16 operands for the prefill matmul: rows scaled by powers of two so that fp16's range is no limit.

A row of activations is multiplied by 2^e so that its largest value lies in [2^13, 2^14), a weight by its part's
`gain`; both are undone in fp32 after the sum. So only the 11 bits of fp16's mantissa round anything.
Rows lie one after the other, for cuBLAS, or tiled: 8 rows by 128 columns at a time, in the order in which the
kernel on packed weights multiplies them. 8 consecutive columns of a row, 16 bytes, are what a lane takes in one step;
of column k, q = k // 32 % 4 is the lane's place in its quad and j = k // 8 % 4 the step (layout.py).

    tiled [rows / 8, columns / 128, j, row, q, 8 columns]

Ordered rows, for Hopper's matrix units, lie one after the other, but their columns stand as they meet in one
instruction of 16: columns 2p and 2p + 1 (p = 0, 1) of half h of step j of the quad's four lanes.

    ordered [rows, columns / 128, j, h, p, q, 2 columns]

Does not know: which matmul reads the rows.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.launch.kernel import DirectLaunch

ROWS_A_TILE = 8
COLUMNS_A_TILE = 128


class Form(IntEnum):
    """How half rows lie."""

    ROW_MAJOR = 0
    TILED = 1
    ORDERED = 2


_TILED = tl.constexpr(int(Form.TILED))
_ORDERED = tl.constexpr(int(Form.ORDERED))


@dataclass(frozen=True)
class HalfRows:
    """T rows of K activations: x is about values * unscale. values fp16 of the shape `half_shape` gives, unit inner
    stride; rows and columns that pad it are anything. unscale fp32 [T], powers of two."""

    values: Tensor
    unscale: Tensor
    form: Form = Form.ROW_MAJOR

    @classmethod
    def empty(
        cls, rows: int, cols: int, device: torch.device | str, form: Form = Form.ROW_MAJOR
    ) -> "HalfRows":
        """Raises ValueError where such rows are not to be had."""
        return cls(
            torch.empty(half_shape(rows, cols, form), dtype=torch.float16, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            form,
        )

    @property
    def rows(self) -> int:
        return self.unscale.shape[0]

    @property
    def tiled(self) -> bool:
        return self.form is Form.TILED

    @property
    def ordered(self) -> bool:
        return self.form is Form.ORDERED

    @property
    def stride(self) -> int:
        """From a row to the next, or from a tile of rows to the next."""
        return self.values.stride(0)

    def fits(self, cols: int) -> bool:
        """Whether these are rows of `cols` columns (tiled: as far as can be told)."""
        if self.tiled:
            return self.values.shape[1] == -(-cols // COLUMNS_A_TILE)
        return self.values.shape[-1] == cols

    def as_tiled(self) -> "HalfRows":
        """The same rows, copied into tiles."""
        rows, cols = self.values.shape
        tiles, blocks = half_shape(rows, cols, Form.TILED)[:2]
        padding = (0, blocks * COLUMNS_A_TILE - cols, 0, tiles * ROWS_A_TILE - rows)
        padded = torch.nn.functional.pad(self.values, padding).view(tiles, 8, blocks, 4, 4, 8)
        return HalfRows(padded.permute(0, 2, 4, 1, 3, 5).contiguous(), self.unscale, Form.TILED)

    def as_ordered(self) -> "HalfRows":
        """The same rows, copied with their columns in order. Raises ValueError where K is no multiple of 128."""
        rows, cols = self.values.shape
        ordered = self.values.new_empty(half_shape(rows, cols, Form.ORDERED))
        split = self.values.view(rows, -1, 4, 4, 2, 2, 2)
        ordered[:rows] = split.permute(0, 1, 3, 4, 5, 2, 6).reshape(rows, cols)
        return HalfRows(ordered, self.unscale, Form.ORDERED)

    def row_major(self, cols: int) -> Tensor:
        """The values, fp16 [T, cols], one row after the other."""
        if self.ordered:
            split = self.values[: self.rows].view(self.rows, -1, 4, 2, 2, 4, 2)
            return split.permute(0, 1, 5, 2, 3, 4, 6).reshape(self.rows, cols)
        if not self.tiled:
            return self.values
        tiles, blocks = self.values.shape[:2]
        rows = self.values.permute(0, 3, 1, 4, 2, 5).reshape(tiles * ROWS_A_TILE, blocks * COLUMNS_A_TILE)
        return rows[: self.rows, :cols].contiguous()

    def dequantize(self, cols: int | None = None) -> Tensor:
        """fp32 [T, K]; K must be given where the rows are tiled and it is no multiple of 128."""
        width = self.values.shape[1] * COLUMNS_A_TILE if self.tiled else self.values.shape[-1]
        width = width if cols is None else cols
        return self.row_major(width).float() * self.unscale[:, None]

    def pick(self, rows: Tensor) -> Tensor:
        """Some rows alone, fp32 [rows, K]. Of rows in tiles K must be a multiple of 128."""
        if self.tiled:
            return self.dequantize()[rows]
        return HalfRows(self.values[: self.rows][rows], self.unscale[rows], self.form).dequantize()


@dataclass(frozen=True)
class Products:
    """Half rows times a weight, before they are unscaled: they stand for values fp32 [T, N] * unscale [T] / gain."""

    values: Tensor
    unscale: Tensor
    gain: float

    def dequantize(self) -> Tensor:
        """The rows they stand for, fp32 [T, N]."""
        return self.values * (self.unscale / self.gain)[:, None]

    def finish(self, residual: Tensor | None = None) -> Tensor:
        """As `dequantize`, plus a residual fp32 [T, N], in their place."""
        y = self.values
        _finish_kernel[(y.shape[0], -(-y.shape[1] // 1024))](
            y, self.unscale, y if residual is None else residual, y.shape[1], 1.0 / self.gain,
            BLOCK=1024, RESIDUAL=residual is not None, num_warps=4,
        )  # fmt: skip
        return y


def padded_rows(rows: int) -> int:
    """Rows for which there is memory in tiles: kernels take 1, 2, 4 or 8 tiles at a time."""
    tiles = -(-rows // ROWS_A_TILE)  # not triton.cdiv, which takes the host some microseconds
    return ROWS_A_TILE * (1 << (tiles - 1).bit_length() if tiles <= 8 else -(-tiles // 8) * 8)


def half_shape(rows: int, cols: int, form: Form) -> tuple[int, ...]:
    """The shape of the values of half rows: [rows, cols]; tiled, six axes (see the module), rows padded to what
    `padded_rows` says and columns to 128; ordered, [rows padded likewise, cols].

    Raises ValueError where such rows are not to be had.
    """
    if form is Form.ROW_MAJOR:
        return rows, cols
    if form is Form.TILED:
        return padded_rows(rows) // ROWS_A_TILE, -(-cols // COLUMNS_A_TILE), 4, 8, 4, 8
    if cols % COLUMNS_A_TILE:
        raise ValueError(f"ordered rows have a multiple of {COLUMNS_A_TILE} columns, not {cols}")
    return padded_rows(rows), cols


@triton.jit
def half_place(row, column, stride, FORM: tl.constexpr):
    """Where row `row`, column `column` of half rows stands. `stride`: fp16 from a row to the next, or, tiled, from
    a tile of rows to the next."""
    if FORM == _TILED:
        place = (row >> 3) * stride + ((column >> 7) * 1024 + ((column >> 3) & 3) * 256)
        return place + (row & 7) * 32 + (((column >> 5) & 3) * 8 + (column & 7))
    elif FORM == _ORDERED:
        place = (column & ~127) + ((column >> 2) & 7) * 16 + ((column >> 1) & 1) * 8
        return row * stride + (place + ((column >> 5) & 3) * 2 + (column & 1))
    else:
        return row * stride + column


@triton.jit
def store_half(out_ptr, row, column, stride, values, mask, FORM: tl.constexpr):
    """Store `values` as half rows: fp16, or `out_ptr`'s own type in plain rows."""
    values = values.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + half_place(row, column, stride, FORM), values, mask=mask)


@triton.jit
def half_scale(peak):
    """(scale, unscale) of rows whose largest |x| has the bits `peak`, int32: 2^(13 - its exponent) and the inverse.

    Kept where neither is denormal.
    """
    exponent = tl.minimum(tl.maximum(peak >> 23, 14), 253)
    scale = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _in_order(values):
    """Columns [N], a multiple of 128, as ordered rows have them. Exchanged between threads, so that they store whole
    words side by side: `half_place` of all columns at once."""
    N: tl.constexpr = values.shape[0]
    return tl.reshape(tl.permute(tl.reshape(values, [N // 128, 4, 8, 2, 2]), [0, 2, 3, 1, 4]), [N])


@DirectLaunch
@triton.jit
def _half_rows_kernel(
    x_ptr, half_ptr, unscale_ptr, K, half_stride, BLOCK: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.int32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
        peak = tl.maximum(peak, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale, unscale = half_scale(tl.max(peak, axis=0))
    tl.store(unscale_ptr + row, unscale)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
        if FORM == _ORDERED:
            tl.store(half_ptr + row * half_stride + k, _in_order((x * scale).to(tl.float16)), mask=k < K)
        else:
            store_half(half_ptr, row, k, half_stride, x * scale, k < K, FORM)


def half_rows(x: Tensor, out: HalfRows | None = None, pdl: bool = False) -> HalfRows:
    """Round contiguous fp32 rows [T, K] to scaled fp16, in the form of `out`."""
    rows = HalfRows.empty(x.shape[0], x.shape[1], x.device) if out is None else out
    block = min(4096, int(triton.next_power_of_2(x.shape[1])))
    _half_rows_kernel[(x.shape[0],)](
        x, rows.values, rows.unscale, x.shape[1], rows.stride, BLOCK=block, FORM=int(rows.form), PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return rows


@DirectLaunch
@triton.jit
def _order_rows_kernel(x_ptr, out_ptr, K, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
    tl.store(out_ptr + row * stride + k, _in_order(x), mask=k < K)


def order_rows(x: HalfRows, out: Tensor, pdl: bool = False) -> HalfRows:
    """Contiguous plain rows, stored to `out` with their columns in order: as `as_ordered`, by one launch."""
    rows, cols = x.values.shape
    assert x.values.is_contiguous() and out.shape == half_shape(rows, cols, Form.ORDERED)
    _order_rows_kernel[(rows, -(-cols // 1024))](
        x.values, out, cols, out.stride(0), BLOCK=1024, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return HalfRows(out, x.unscale, Form.ORDERED)


@DirectLaunch
@triton.jit
def _finish_kernel(y_ptr, unscale_ptr, residual_ptr, N, gain, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * N + n, mask=n < N, other=0.0) * (tl.load(unscale_ptr + row) * gain)
    if RESIDUAL:
        y += tl.load(residual_ptr + row * N + n, mask=n < N, other=0.0)
    tl.store(y_ptr + row * N + n, y, mask=n < N)
