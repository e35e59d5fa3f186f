"""Matrix times a few rows, on packed weights: decode's matmul, 1 to 8 rows.

Gives fp32 rows, with the residual added if there is one. Activations may come with the last step of their RMSNorm left
to do (activations.py). Everything can be captured in a CUDA graph: no host synchronisation, and no allocation when
`out` is given.

Definition: kernels/q_dot.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.gemv.matvec_program import (
    begin_rows,
    check_rows,
    finish_rows,
    is_even,
    kernel_rows,
    load_squares,
    pending_norm,
    register_limit,
)
from quengine.kernels.cuda.gemv.q_dot import row_order
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.cuda.weights.launch_table import matvec_geometry
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart, PackedWeight


@triton.jit
def _places(
    tile0, first, rows, N, T, ROWS: tl.constexpr, TILES: tl.constexpr, PAIRED: tl.constexpr
):  # fmt: skip
    """Where the results [TILES, 8, 2, ROWS] of tiles from `tile0` on stand in out [T, N], at columns first + 0 ..
    rows - 1, and which of them exist."""
    tile = tile0 + tl.arange(0, TILES)[:, None, None, None]
    r = tl.arange(0, 8)[None, :, None, None]
    rh = tl.arange(0, 2)[None, None, :, None]
    row = tl.reshape(row_order(ROWS), [1, 1, 1, ROWS])
    if PAIRED:
        column = tile * 8 + r
        inside = column < rows // 2
        column += rh * (rows // 2)
    else:
        column = tile * 16 + rh * 8 + r
        inside = column < rows
    return row * N + first + column, inside & (row < T)


@triton.jit
def _part(
    planes, out_ptr, residual_ptr, x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps, tile0, tiles, rows, first, N, T,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, K_WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, PARTIALS: tl.constexpr, PAIRED: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one part of a matrix."""
    queue = begin_rows(planes, tile0, tiles, FMT, K, TILES, K_WARPS, AHEAD, EVEN)
    at, inside = _places(tile0, first, rows, N, T, ROWS, TILES, PAIRED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    squares = load_squares(squares_ptr, ROWS, T, PARTIALS)
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
    y = finish_rows(
        queue, squares, planes, x_high, x_low, t_ptr, sums_ptr, eps, tile0, tiles, T,
        FMT, ROWS, K, TILES, K_WARPS, AHEAD, EARLY, EVEN, PARTIALS, ASM,
    )  # fmt: skip
    if RESIDUAL:
        y += residual
    tl.store(out_ptr + at, y, mask=inside)


@triton.jit
def _matvec_kernel(
    out_ptr, residual_ptr, x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps,
    low_a, high_a, scales_a, supers_a, tiles_a, rows_a,
    low_b, high_b, scales_b, supers_b, tiles_b, rows_b,
    first, N, T,
    FMT_A: tl.constexpr, FMT_B: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
    TILES: tl.constexpr, K_WARPS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
    EVEN_A: tl.constexpr, EVEN_B: tl.constexpr, PARTIALS: tl.constexpr,
    PAIRED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One or two parts (FMT_B None: one) of a matrix, TILES tiles a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile0 = tl.program_id(0) * TILES
    a = (low_a, high_a, scales_a, supers_a)
    if FMT_B is None:
        _part(
            a, out_ptr, residual_ptr, x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps, tile0, tiles_a, rows_a,
            first, N, T, FMT_A, ROWS, K, TILES, K_WARPS, AHEAD, EARLY, EVEN_A, PARTIALS, PAIRED, RESIDUAL, PDL, ASM,
        )  # fmt: skip
    else:
        blocks_a = tl.cdiv(tiles_a, TILES)
        if tl.program_id(0) < blocks_a:
            _part(
                a, out_ptr, residual_ptr, x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps, tile0, tiles_a, rows_a,
                first, N, T, FMT_A, ROWS, K, TILES, K_WARPS, AHEAD, EARLY, EVEN_A, PARTIALS, PAIRED, RESIDUAL, PDL,
                ASM,
            )  # fmt: skip
        else:
            b = (low_b, high_b, scales_b, supers_b)
            _part(
                b, out_ptr, residual_ptr, x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps,
                tile0 - blocks_a * TILES, tiles_b, rows_b, first + rows_a, N, T,
                FMT_B, ROWS, K, TILES, K_WARPS, AHEAD, EARLY, EVEN_B, PARTIALS, PAIRED, RESIDUAL, PDL, ASM,
            )  # fmt: skip


@triton.jit
def _float_kernel(
    out_ptr, residual_ptr, x_high, x_low, t_ptr, squares_ptr, w_ptr, first, rows, N, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTIALS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of plain floats times one row of rounded activations, all in fp32."""
    launch_then_wait(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < K
        x = tl.load(x_high + row * K + k, mask=inside, other=0).to(tl.int32) * 256
        x += tl.load(x_low + row * K + k, mask=inside, other=0).to(tl.int32)
        t = tl.load(t_ptr + row * (K // 32) + k // 32, mask=inside, other=0.0)
        w_at = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
        w = tl.load(w_at, mask=(n < rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += w * (x.to(tl.float32) * t)[None, :]
    y = tl.sum(total, axis=1)
    if PARTIALS > 0:
        squares = load_squares(squares_ptr + row * PARTIALS, 1, 1, PARTIALS)
        y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    at = row * N + first + n
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=n < rows, other=0.0)
    tl.store(out_ptr + at, y, mask=n < rows)


def matvec(
    x: QuantizedActivations,
    weight: PackedWeight,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [T, K] times weight [N, K], plus residual fp32 [T, N]: fp32 [T, N], T at most 8.

    `out` avoids the allocation; it may be the residual itself. `pdl`: launched before its predecessor in the stream
    ends, and reading weights meanwhile (sm_90 and later; the predecessor must not write the weights). Raises
    ValueError on other shapes.
    """
    check_rows(x, weight)
    y = torch.empty(x.rows, weight.rows, dtype=torch.float32, device=x.high.device) if out is None else out
    for name, given in (("out", y), ("residual", y if residual is None else residual)):
        if given.shape != (x.rows, weight.rows) or given.dtype != torch.float32 or not given.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous fp32 {[x.rows, weight.rows]}, not {list(given.shape)}"
            )
    first = 0
    parts = list(weight.parts)
    while parts:
        taken = parts[:2] if all(isinstance(part, PackedPart) for part in parts[:2]) else parts[:1]
        if isinstance(taken[0], FloatPart):
            _launch_float(x, taken[0], residual, y, first, pdl)
        else:
            _launch_packed(x, taken, weight.paired, residual, y, first, pdl)
        first += sum(part.rows for part in taken)
        parts = parts[len(taken) :]
    return y


def _launch_packed(
    x: QuantizedActivations,
    parts: list[PackedPart | FloatPart],
    paired: bool,
    residual: Tensor | None,
    out: Tensor,
    first: int,
    pdl: bool,
) -> None:
    packed = [part for part in parts if isinstance(part, PackedPart)]
    geometry = matvec_geometry(packed, "rows")
    a, b = packed[0], packed[-1]
    two = len(packed) == 2
    blocks = sum(triton.cdiv(part.tiles, geometry.tiles) for part in packed)
    squares, eps, partials = pending_norm(x)
    _matvec_kernel[(blocks,)](
        out, out if residual is None else residual, x.high, x.low, x.scale, x.sums, squares, eps,
        a.low, a.high, a.scales, a.supers, a.tiles, a.rows,
        b.low, b.high, b.scales, b.supers, b.tiles, b.rows,
        first, out.shape[1], x.rows,
        FMT_A=a.layout, FMT_B=b.layout if two else None, ROWS=kernel_rows(x.rows), K=x.cols,
        TILES=geometry.tiles, K_WARPS=geometry.k_warps, AHEAD=geometry.ahead, EARLY=geometry.early,
        EVEN_A=is_even(a, geometry), EVEN_B=is_even(b, geometry), PARTIALS=partials,
        PAIRED=paired, RESIDUAL=residual is not None, PDL=pdl, ASM=uses_assembly(),
        num_warps=geometry.warps, maxnreg=register_limit(geometry, x.rows),
        launch_pdl=pdl,
    )  # fmt: skip


def _launch_float(
    x: QuantizedActivations, part: FloatPart, residual: Tensor | None, out: Tensor, first: int, pdl: bool
) -> None:
    block = 8
    squares, eps, partials = pending_norm(x)
    _float_kernel[(triton.cdiv(part.rows, block), x.rows)](
        out, out if residual is None else residual, x.high, x.low, x.scale, squares, part.weight, first,
        part.rows, out.shape[1], eps, K=x.cols, PARTIALS=partials,
        BLOCK_N=block, BLOCK_K=min(512, kernel_rows(x.cols)),
        RESIDUAL=residual is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
