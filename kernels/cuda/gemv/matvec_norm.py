"""A projection of decode that ends a residual branch and begins the next RMSNorm, in one launch on packed weights.

Gives the new residual stream, and the same times the norm's weights, quantized for the next matmul; the row's root mean
square is left to that matmul, as partial sums of squares (activations.py). So no launch is spent on the norm.
Definition: kernels/q_dot.py, kernels/rms_norm.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.mma import prefetch, uses_assembly
from quengine.kernels.cuda.gemv.activations import (
    QuantizedActivations,
    RmsPartials,
    quantize_group,
    store_quantized,
)
from quengine.kernels.cuda.gemv.matvec_program import (
    QuantizationScratch,
    begin_rows,
    check_rows,
    finish_rows,
    is_even,
    kernel_rows,
    quantize_shared_group,
    register_limit,
)
from quengine.kernels.cuda.gemv.q_dot import row_order
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.launch_table import matvec_geometry
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight


@triton.jit
def _norm_kernel(
    values_ptr, arrivals_ptr, hidden_ptr, residual_ptr, norm_ptr, out_high, out_low, out_scale, out_sums, squares_ptr,
    x_high, x_low, t_ptr, sums_ptr, low, high, scales, supers, tiles, N, T,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, K_WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """TILES tiles: an even number, so that a program has whole groups of 32 outputs, or one, and two programs share a
    group."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile0 = tl.program_id(0) * TILES
    planes = (low, high, scales, supers)
    queue = begin_rows(planes, tile0, tiles, FMT, K, TILES, K_WARPS, AHEAD, EVEN)
    column = tile0 * 16 + tl.arange(0, 16 * TILES)[None, :]
    row = row_order(ROWS)[:, None]
    inside = (row < T) & (column < N)
    # Held in registers from here on, the norm's weights would make others spill.
    prefetch(norm_ptr + tl.minimum(column, N - 1), ASM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    residual = tl.load(residual_ptr + row * N + column, mask=inside, other=0.0)
    y = finish_rows(
        queue, 0.0, planes, x_high, x_low, t_ptr, sums_ptr, 0.0, tile0, tiles, T,
        FMT, ROWS, K, TILES, K_WARPS, AHEAD, EARLY, EVEN, 0, ASM,
    )  # fmt: skip
    hidden = tl.reshape(tl.permute(y, [3, 0, 2, 1]), [ROWS, 16 * TILES]) + residual
    tl.store(hidden_ptr + row * N + column, hidden, mask=inside)
    programs = tl.num_programs(0)
    squares = tl.sum(hidden * hidden, 1)
    tl.store(squares_ptr + row_order(ROWS) * programs + tl.program_id(0), squares, mask=row_order(ROWS) < T)
    norm = tl.load(norm_ptr + column, mask=column < N, other=0.0)
    value = hidden * norm
    if TILES == 1:
        tl.store(values_ptr + row * N + column, value, mask=inside)
        quantize_shared_group(
            values_ptr, arrivals_ptr, out_high, out_low, out_scale, out_sums, tile0 // 2, N, T, ROWS, 2
        )  # fmt: skip
    else:
        GROUPS: tl.constexpr = TILES // 2
        coarse, fine, scale, sums = quantize_group(tl.reshape(value, [ROWS * GROUPS, 32]))
        group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[None, :]
        place = tl.reshape(row * (N // 32) + group, [ROWS * GROUPS])
        exists = tl.reshape((row < T) & (group < N // 32), [ROWS * GROUPS])
        store_quantized(out_high, out_low, out_scale, out_sums, place, exists, coarse, fine, scale, sums)


def can_begin_norm(weight: PackedWeight) -> bool:
    """Whether `matvec_norm` takes this weight: one packed part, outputs in whole groups of 32."""
    return (
        len(weight.parts) == 1
        and not weight.paired
        and isinstance(weight.parts[0], PackedPart)
        and weight.rows % 32 == 0
    )


def matvec_norm(
    x: QuantizedActivations,
    weight: PackedWeight,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    scratch: QuantizationScratch | None = None,
    pdl: bool = False,
) -> RmsNormed:
    """x [T, K] times weight [D, K], plus residual fp32 [T, D], and its RMSNorm with weights `norm` fp32 [D] begun.

    T at most 8; `x` must have its own norm done. `scratch` avoids an allocation; `pdl`: see `matvec`. Raises
    ValueError on other shapes.
    """
    check_rows(x, weight)
    part = weight.parts[0]
    if not can_begin_norm(weight) or not isinstance(part, PackedPart) or x.rms is not None:
        raise ValueError(f"a weight of {weight.rows} rows in {len(weight.parts)} parts cannot begin a norm")
    if residual.shape != (x.rows, weight.rows) or not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous {[x.rows, weight.rows]}, not {list(residual.shape)}")
    room = QuantizationScratch.empty(x.rows, weight.rows, residual.device) if scratch is None else scratch
    if room.values.numel() < x.rows * weight.rows or room.arrivals.numel() * 32 < weight.rows:
        raise ValueError(f"scratch holds {list(room.values.shape)}, needs {[x.rows, weight.rows]}")
    geometry = matvec_geometry([part], "norm")
    programs = triton.cdiv(part.tiles, geometry.tiles)
    hidden = torch.empty_like(residual)
    squares = torch.empty(x.rows, programs, dtype=torch.float32, device=residual.device)
    rounded = QuantizedActivations.empty(x.rows, weight.rows, residual.device)
    _norm_kernel[(programs,)](
        room.values, room.arrivals, hidden, residual, norm,
        rounded.high, rounded.low, rounded.scale, rounded.sums, squares,
        x.high, x.low, x.scale, x.sums, part.low, part.high, part.scales, part.supers,
        part.tiles, part.rows, x.rows,
        FMT=part.layout, ROWS=kernel_rows(x.rows), K=x.cols,
        TILES=geometry.tiles, K_WARPS=geometry.k_warps, AHEAD=geometry.ahead, EARLY=geometry.early,
        EVEN=is_even(part, geometry), PDL=pdl, ASM=uses_assembly(),
        num_warps=geometry.warps, maxnreg=register_limit(geometry, x.rows), launch_pdl=pdl,
    )  # fmt: skip
    started = QuantizedActivations(
        rounded.high, rounded.low, rounded.scale, rounded.sums, RmsPartials(squares, eps)
    )
    return RmsNormed(hidden, started)
