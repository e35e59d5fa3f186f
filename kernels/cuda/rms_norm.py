"""RMSNorm on CUDA: to plain rows, quantized for q-dot, or as an fp16 operand, also of a sum with a residual.

One kernel, whose geometry follows from (rows, width). Few rows take a block each, with the most warps that a row can
feed; many narrow rows share a block, so that every block has enough loads in flight. The order of a row's sum follows
from the geometry: with `batch_invariant`, that of few rows is always used. A row is read once and stays in registers.
Operands in the WGMMA layout have their own kernel, in rms_norm_wgmma.py.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    OperandLayout,
    ScaledProduct,
    fp16_row_scale,
    store_operand,
)
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_group, store_quantized
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.rms_norm_wgmma import launch_norm_wgmma

_PLAIN, _QUANTIZED, _FP16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The form of the stored result."""

_MAX_WIDTH = 65536
"""Widest row: 64 fp32 per thread with 1024 threads."""

_FEW_ROWS = 512
"""The most rows for which each has a multiprocessor nearly to itself, and latency matters, not occupancy."""

_FULL_MACHINE = 16384
"""The fewest rows wider than 2048 of which a block takes several."""


@dataclass(frozen=True)
class NormTile:
    """A tile of `block_rows` rows by `head` + `tail` columns, on `warps` warps.

    `head` and `tail` are powers of two; tail 0 means that `head` covers the row.
    """

    block_rows: int
    head: int
    tail: int
    warps: int


@cache
def geometry(rows: int, width: int) -> NormTile:
    """The tile for this many rows of this width, from the sweep in benchmarks/cuda/rms_norm.py on an H200.

    Raises ValueError for a row wider than one block can hold.
    """
    if not 0 < width <= _MAX_WIDTH:
        raise ValueError(f"RMSNorm rows of 1 to {_MAX_WIDTH} elements, not {width}")
    padded = triton.next_power_of_2(width)
    if rows <= _FEW_ROWS:
        return NormTile(1, padded, 0, min(32, max(1, padded // 512)))
    # Many rows: no lane may idle, so 576 is 512 + 64 and not a half-empty 1024.
    head = padded if padded == width else padded // 2
    tail = triton.next_power_of_2(width - head) if width > head else 0
    if padded <= 2048:
        return NormTile(2048 // padded, head, tail, 1)
    if rows < _FULL_MACHINE:
        return NormTile(1, head, tail, min(32, max(8, padded // 1024)))
    block_rows = max(1, 16384 // padded)
    return NormTile(block_rows, head, tail, min(32, max(16, padded // 1024)))


@triton.jit
def _load_part(x_ptr, residual_ptr, scale, row, column, mask, x_stride, residual_stride, ADD: tl.constexpr):
    """A part of the rows in fp32; with ADD times `scale` plus the residual, where the sum is stored."""
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        at = residual_ptr + row * residual_stride + column
        added = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        x = x * scale
        total = (added + x).to(residual_ptr.dtype.element_ty)
        tl.store(at, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def _store_quantized_part(y, outputs, first, end):
    """Quantizes a [1, N] part of a row in groups of 32 and stores it as groups `first` on, up to `end`."""
    high, low, scale, sums = quantize_group(tl.reshape(y, [y.shape[1] // 32, 32]))
    group = first + tl.arange(0, y.shape[1] // 32)
    store_quantized(
        outputs[0], outputs[1], outputs[2], outputs[3], group, group < end, high, low, scale, sums
    )  # fmt: skip


@DirectLaunch
@triton.jit(do_not_specialize=["rows"])  # any number of rows runs the same code
def _rms_norm_kernel(
    x_ptr, residual_ptr, row_scale_ptr, weight_ptr, out_ptr, low_ptr, scale_ptr, sums_ptr,
    rows, x_stride, residual_stride, out_stride, inverse_weight_scale, eps,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ADD: tl.constexpr,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = (first_row + tl.arange(0, BLOCK_ROWS))[:, None]
    column = tl.arange(0, HEAD)[None, :]
    live = (row < rows) & (column < WIDTH)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if TAIL > 0:
        tail_column = HEAD + tl.arange(0, TAIL)[None, :]
        tail_live = (row < rows) & (tail_column < WIDTH)
        tail_weight = tl.load(weight_ptr + tail_column, mask=tail_column < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    scale = 1.0
    if ADD:
        scale = tl.load(row_scale_ptr + row, mask=row < rows, other=0.0) * inverse_weight_scale
    x = _load_part(x_ptr, residual_ptr, scale, row, column, live, x_stride, residual_stride, ADD)
    squares = tl.sum(x * x, 1)
    if TAIL > 0:
        tail = _load_part(
            x_ptr, residual_ptr, scale, row, tail_column, tail_live, x_stride, residual_stride, ADD
        )
        squares += tl.sum(tail * tail, 1)
    inverse_rms = tl.rsqrt(squares / WIDTH + eps)[:, None]
    y = x * inverse_rms * weight
    if TAIL > 0:
        y_tail = tail * inverse_rms * tail_weight
    if KIND == _QUANTIZED:
        outputs = (out_ptr, low_ptr, scale_ptr, sums_ptr)
        first = first_row * (WIDTH // 32)
        _store_quantized_part(y, outputs, first, first + WIDTH // 32)
        if TAIL > 0:
            _store_quantized_part(y_tail, outputs, first + HEAD // 32, first + WIDTH // 32)
    else:
        if KIND == _FP16:
            peak = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
            if TAIL > 0:
                peak = tl.maximum(peak, tl.max(y_tail.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
            factor, row_scale = fp16_row_scale(peak)
            one_row = first_row + tl.arange(0, BLOCK_ROWS)
            tl.store(scale_ptr + one_row, row_scale, mask=one_row < rows)
            y *= factor[:, None]
            if TAIL > 0:
                y_tail *= factor[:, None]
        store_operand(out_ptr, row, column, out_stride, y, live, LAYOUT)
        if TAIL > 0:
            store_operand(out_ptr, row, tail_column, out_stride, y_tail, tail_live, LAYOUT)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool = False, batch_invariant: bool = False
) -> torch.Tensor:
    """RMSNorm (kernels/rms_norm.py) of the rows of x, computed in fp32 and rounded once to x's dtype.

    x: [T, D] fp16, bf16 or fp32, unit inner stride (rows may be slices of wider ones); weight: [D]. `pdl` (sm_90 and
    later): the launch may overlap the previous one, which may produce x but not weight. `batch_invariant`: a row's
    bits do not depend on the number of rows.
    """
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, eps, _Output(_PLAIN.value, (result,) * 4, result.stride(0)), pdl, batch_invariant)
    return result


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool = False
) -> QuantizedActivations:
    """`rms_norm` quantized to int16 per group of 32 for q-dot; D a multiple of 32."""
    out = QuantizedActivations.empty(x.shape[0], x.shape[1], x.device)
    planes = (out.high, out.low, out.scale, out.sums)
    _launch(x, weight, eps, _Output(_QUANTIZED.value, planes, 0), pdl, batch_invariant=True)
    return out


def rms_norm_fp16(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: Fp16Operand | None = None,
    pdl: bool = False,
    batch_invariant: bool = False,
) -> Fp16Operand:
    """`rms_norm` as an fp16 operand for the matmuls, in the layout of `out`."""
    operand = Fp16Operand.empty(x.shape[0], x.shape[1], x.device) if out is None else out
    assert operand.rows == x.shape[0] and operand.fits(x.shape[1]) and operand.values.is_contiguous()
    if operand.is_wgmma and x.device.type != "cpu":  # Triton's interpreter does not run that kernel
        launch_norm_wgmma(x, weight, eps, operand, pdl)
    else:
        _launch(x, weight, eps, _Output.of(operand), pdl, batch_invariant)
    return operand


def add_norm_fp16(
    product: ScaledProduct,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: Fp16Operand,
    pdl: bool = False,
) -> Fp16Operand:
    """Adds the product to the residual, in place, and writes `rms_norm_fp16` of the sum to `out`, in one pass. The
    product and `out` may share their row scales.
    """
    _launch(product.values, weight, eps, _Output.of(out), pdl, False, product, residual)
    return out


class _Output(NamedTuple):
    """kind: see `_PLAIN`; tensors: the planes of a quantized row, else values, unused, row scales, unused;
    stride: between rows (or tiles of rows).
    """

    kind: int
    tensors: tuple[torch.Tensor, ...]
    stride: int
    layout: OperandLayout = OperandLayout.ROW_MAJOR

    @classmethod
    def of(cls, operand: Fp16Operand) -> "_Output":
        values = operand.values
        return cls(_FP16.value, (values, values, operand.row_scale, values), operand.stride, operand.layout)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    output: _Output,
    pdl: bool,
    batch_invariant: bool,
    product: ScaledProduct | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    rows, width = x.shape
    assert x.stride(1) == 1 and weight.shape == (width,) and weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    shape = geometry(1 if batch_invariant else rows, width)
    _rms_norm_kernel[(-(-rows // shape.block_rows),)](
        x, x if residual is None else residual, x if product is None else product.row_scale, weight, *output.tensors,
        rows, x.stride(0), 0 if residual is None else residual.stride(0), output.stride,
        1.0 if product is None else 1.0 / product.weight_scale, eps,
        WIDTH=width, BLOCK_ROWS=shape.block_rows, HEAD=shape.head, TAIL=shape.tail, ADD=product is not None,
        KIND=output.kind, LAYOUT=int(output.layout), PDL=pdl, num_warps=shape.warps, launch_pdl=pdl,
    )  # fmt: skip
