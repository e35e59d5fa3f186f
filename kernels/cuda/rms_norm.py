"""RMSNorm on CUDA: alone, with a residual add in front, with the rounding of the q-dot or to scaled fp16 behind.

One kernel, whose geometry follows (rows, width). Few rows take a block each with as many warps as the row
can feed; many narrow rows share a block, so that every block has enough loads in flight. The order of a row's sum
follows from the geometry: callers who may not let it depend on the number of rows ask for the `fixed` one, that of few
rows. A row is read once and stays in registers. Rows for Hopper's matmul have a kernel of their own, in
rms_norm_ordered.py. Knows rows and weights; not where a row comes from or which matmul reads it.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.gemm.half import HalfRows, Products, half_scale, store_half
from quengine.kernels.cuda.gemv.activations import RoundedActivations, round_group, store_rounded
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.rms_norm_ordered import launch_norm_ordered

_PLAIN = tl.constexpr(0)
_ROUND = tl.constexpr(1)
_HALF = tl.constexpr(2)

_ALONE = tl.constexpr(0)
_ADD = tl.constexpr(1)
_FINISH = tl.constexpr(2)

_MAX_WIDTH = 65536
"""Widest row: 64 fp32 a thread with 1024 threads."""

_FEW_ROWS = 512
"""Up to here every row has a multiprocessor nearly to itself, and latency counts, not lanes."""

_FULL_MACHINE = 16384
"""From here on there are rows enough for several in a block."""


@dataclass(frozen=True)
class Geometry:
    """A tile of `block_rows` rows by `head` + `tail` columns, on `warps` warps.

    `head` and `tail` are powers of two; tail 0 means that `head` covers the row.
    """

    block_rows: int
    head: int
    tail: int
    warps: int


@cache
def geometry(rows: int, width: int) -> Geometry:
    """The tile for this many rows of this width, from the sweep in benchmarks/rms_norm.py on an H200.

    Raises ValueError for a row wider than one block can hold.
    """
    if not 0 < width <= _MAX_WIDTH:
        raise ValueError(f"RMSNorm rows of 1 to {_MAX_WIDTH} elements, not {width}")
    padded = triton.next_power_of_2(width)
    if rows <= _FEW_ROWS:
        return Geometry(1, padded, 0, min(32, max(1, padded // 512)))
    # Many rows: no lane may idle, so 576 is 512 + 64 and not a half-empty 1024.
    head = padded if padded == width else padded // 2
    tail = triton.next_power_of_2(width - head) if width > head else 0
    if padded <= 2048:
        return Geometry(2048 // padded, head, tail, 1)
    if rows < _FULL_MACHINE:
        return Geometry(1, head, tail, min(32, max(8, padded // 1024)))
    block_rows = max(1, 16384 // padded)
    return Geometry(block_rows, head, tail, min(32, max(16, padded // 1024)))


@triton.jit
def _load_part(x_ptr, residual_ptr, factor, row, column, mask, x_stride, residual_stride, ADD: tl.constexpr):
    """A part of the rows in fp32. _ADD: the sum with the residual, which is written to the residual. _FINISH: the same
    of x times `factor`."""
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD != _ALONE:
        at = residual_ptr + row * residual_stride + column
        added = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if ADD == _FINISH:
            x = x * factor
        total = (added + x).to(residual_ptr.dtype.element_ty)
        tl.store(at, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def _store_round(y, high_ptr, low_ptr, scale_ptr, sums_ptr, first, end):
    """Round a [1, N] part of a row in groups of 32 and store it from group `first` on, up to group `end`."""
    high, low, scale, sums = round_group(tl.reshape(y, [y.shape[1] // 32, 32]))
    group = first + tl.arange(0, y.shape[1] // 32)
    store_rounded(high_ptr, low_ptr, scale_ptr, sums_ptr, group, group < end, high, low, scale, sums)


@DirectLaunch
@triton.jit(do_not_specialize=["rows"])  # any number of rows runs the same code
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    unscale_ptr,
    weight_ptr,
    out_ptr,
    low_ptr,
    scale_ptr,
    sums_ptr,
    rows,
    x_stride,
    residual_stride,
    out_stride,
    inverse_gain,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ADD: tl.constexpr,
    FORM: tl.constexpr,
    HALF_FORM: tl.constexpr,
    PDL: tl.constexpr,
):
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
    factor = 1.0
    if ADD == _FINISH:
        factor = tl.load(unscale_ptr + row, mask=row < rows, other=0.0) * inverse_gain
    x = _load_part(x_ptr, residual_ptr, factor, row, column, live, x_stride, residual_stride, ADD)
    squares = tl.sum(x * x, 1)
    if TAIL > 0:
        tail = _load_part(
            x_ptr, residual_ptr, factor, row, tail_column, tail_live, x_stride, residual_stride, ADD
        )
        squares += tl.sum(tail * tail, 1)
    inverse_rms = tl.rsqrt(squares / WIDTH + eps)[:, None]
    y = x * inverse_rms * weight
    if TAIL > 0:
        y_tail = tail * inverse_rms * tail_weight
    if FORM == _ROUND:
        first = first_row * (WIDTH // 32)
        _store_round(y, out_ptr, low_ptr, scale_ptr, sums_ptr, first, first + WIDTH // 32)
        if TAIL > 0:
            _store_round(
                y_tail, out_ptr, low_ptr, scale_ptr, sums_ptr, first + HEAD // 32, first + WIDTH // 32
            )
    else:
        if FORM == _HALF:
            peak = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
            if TAIL > 0:
                peak = tl.maximum(peak, tl.max(y_tail.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
            scale, unscale = half_scale(peak)
            one_row = first_row + tl.arange(0, BLOCK_ROWS)
            tl.store(scale_ptr + one_row, unscale, mask=one_row < rows)
            y *= scale[:, None]
            if TAIL > 0:
                y_tail *= scale[:, None]
        store_half(out_ptr, row, column, out_stride, y, live, HALF_FORM)
        if TAIL > 0:
            store_half(out_ptr, row, tail_column, out_stride, y_tail, tail_live, HALF_FORM)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    fixed: bool = False,
) -> torch.Tensor:
    """`quengine.kernels.rms_norm` of the rows of x, computed in fp32 and rounded once.

    x: [T, D] fp16, bf16 or fp32, unit inner stride (rows may be slices of wider ones); weight: [D].
    `residual` [T, D] is set to x + residual, rounded to its dtype, and that sum is normalised. `out` [T, D]
    avoids the allocation and sets the result's dtype; otherwise it is x's. `pdl` (sm_90 and later) lets the
    launch overlap the one before it, which may produce x and residual but not weight. `fixed`: a row's bits are
    the same whatever the number of rows.
    """
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert result.shape == x.shape and result.stride(1) == 1
    outputs = (result, result, result, result)
    _launch(x, weight, eps, residual, outputs, result.stride(0), _PLAIN.value, pdl, fixed=fixed)
    return result


def rms_norm_round(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: RoundedActivations | None = None,
    pdl: bool = False,
) -> RoundedActivations:
    """As `rms_norm`, the result rounded to int16 per group of 32 for the q-dot; D a multiple of 32."""
    rounded = RoundedActivations.empty(x.shape[0], x.shape[1], x.device) if out is None else out
    assert rounded.high.shape == x.shape
    outputs = (rounded.high, rounded.low, rounded.scale, rounded.sums)
    _launch(x, weight, eps, residual, outputs, 0, _ROUND.value, pdl)
    return rounded


def rms_norm_half(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: HalfRows | None = None,
    pdl: bool = False,
    fixed: bool = False,
) -> HalfRows:
    """As `rms_norm`, the result rounded to scaled fp16 rows for the matmuls (half.py), in the form of `out`."""
    half = HalfRows.empty(x.shape[0], x.shape[1], x.device) if out is None else out
    assert half.rows == x.shape[0] and half.fits(x.shape[1]) and half.values.is_contiguous()
    if half.ordered and x.device.type != "cpu":  # Triton's interpreter does not run that kernel
        launch_norm_ordered(x, weight, eps, half, pdl)
        return half
    outputs = (half.values, half.values, half.unscale, half.values)
    _launch(x, weight, eps, None, outputs, half.stride, _HALF.value, pdl, half=half, fixed=fixed)
    return half


def finish_norm_half(
    products: Products,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: HalfRows,
    pdl: bool = False,
) -> HalfRows:
    """`products.finish(residual)`, to the residual, and `rms_norm_half` of it, to `out`, in one pass. Products and
    `out` may share their unscale."""
    outputs = (out.values, out.values, out.unscale, out.values)
    _launch(products.values, weight, eps, residual, outputs, out.stride, _HALF.value, pdl, products, out)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    out_stride: int,
    form: int,
    pdl: bool,
    products: Products | None = None,
    half: HalfRows | None = None,
    fixed: bool = False,
) -> None:
    rows, width = x.shape
    assert x.stride(1) == 1 and weight.shape == (width,) and weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    shape = geometry(1 if fixed or form == _ROUND.value else rows, width)
    _rms_norm_kernel[(-(-rows // shape.block_rows),)](
        x,
        x if residual is None else residual,
        x if products is None else products.unscale,
        weight,
        *outputs,
        rows,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out_stride,
        1.0 if products is None else 1.0 / products.gain,
        eps,
        WIDTH=width,
        BLOCK_ROWS=shape.block_rows,
        HEAD=shape.head,
        TAIL=shape.tail,
        ADD=_FINISH.value if products else _ALONE.value if residual is None else _ADD.value,
        FORM=form,
        HALF_FORM=0 if half is None else int(half.form),
        PDL=pdl,
        num_warps=shape.warps,
        launch_pdl=pdl,
    )
