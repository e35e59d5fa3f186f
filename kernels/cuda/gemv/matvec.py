"""Matrix times one row, on packed weights: decode's matmul.

Computes an fp32 row, plus a residual if given. Activations may come with a pending RMSNorm (activations.py). A CUDA
graph can capture it: it does not synchronise with the host, nor allocate when `out` is given. Defined in
kernels/q_dot.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.gemv.matvec_program import (
    Matrix,
    MatvecProgram,
    QuantizedRow,
    begin_rows,
    check_row,
    finish_rows,
    load_squares,
    row_arguments,
)
from quengine.kernels.cuda.gemv.row_change import (
    ROWS,
    RowChangeProgram,
    begin_change,
    check_change,
    hint_of,
    row_to_rank,
    rows_from_rank,
)
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.cuda.weights.launch_table import matvec_geometry
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart, PackedWeight


@triton.jit
def result_columns(tile0, first, rows, TILES: tl.constexpr, PAIRED: tl.constexpr):
    """The result's columns for the tiles from `tile0` on, [TILES, 8, 2, 1], and whether each exists."""
    tile = tile0 + tl.arange(0, TILES)[:, None, None, None]
    r = tl.arange(0, 8)[None, :, None, None]
    rh = tl.arange(0, 2)[None, None, :, None]
    if PAIRED:
        column = tile * 8 + r
        inside = column < rows // 2
        column += rh * (rows // 2)
    else:
        column = tile * 16 + rh * 8 + r
        inside = column < rows
    return first + column, inside


@triton.jit
def _part(
    matrix, x, out_ptr, residual_ptr, change, tile0, rows, first,
    PAIRED: tl.constexpr, RESIDUAL: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Computes P.tiles tiles of one part of a matrix."""
    hint = hint_of(change, C)
    begun = begin_rows(matrix, tile0, P)
    at, inside = result_columns(tile0, first, rows, P.tiles, PAIRED)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    changing = begin_change(change, hint, at, inside, C)
    squares = load_squares(x.squares, P.partials)
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
    y = finish_rows(begun, squares, matrix, x, tile0, P)
    if C is not None:
        y = rows_from_rank(change, changing, y, at, inside, C)
    if RESIDUAL:
        y += residual
    tl.store(out_ptr + at, y, mask=inside)


@triton.jit
def _parts(
    a, b, x, out_ptr, residual_ptr, change, program, rows_a, rows_b, first,
    PAIRED: tl.constexpr, RESIDUAL: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Computes the tiles of a program of one or two parts (B is None: one)."""
    tile0 = program * A.tiles
    if B is None:
        _part(a, x, out_ptr, residual_ptr, change, tile0, rows_a, first, PAIRED, RESIDUAL, A, C)
    else:
        blocks_a = tl.cdiv(a.tiles, A.tiles)
        if program < blocks_a:
            _part(a, x, out_ptr, residual_ptr, change, tile0, rows_a, first, PAIRED, RESIDUAL, A, C)
        else:
            _part(
                b, x, out_ptr, residual_ptr, change, tile0 - blocks_a * A.tiles, rows_b, first + rows_a,
                PAIRED, RESIDUAL, B, C,
            )  # fmt: skip


@triton.jit
def _matvec_kernel(
    out_ptr, residual_ptr, x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps,
    low_a, high_a, scales_a, supers_a, tiles_a, rows_a,
    low_b, high_b, scales_b, supers_b, tiles_b, rows_b, change, first,
    PAIRED: tl.constexpr, RESIDUAL: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One or two parts of a matrix (B is None: one), with a change (C is None: without)."""
    if A.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    x = QuantizedRow(x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps)
    a = Matrix((low_a, high_a, scales_a, supers_a), tiles_a)
    b = Matrix((low_b, high_b, scales_b, supers_b), tiles_b)
    program = tl.program_id(0)
    if C is None:
        _parts(
            a, b, x, out_ptr, residual_ptr, change, program, rows_a, rows_b, first, PAIRED, RESIDUAL, A, B, C
        )
    else:
        if program < C.programs:
            row_to_rank(change, x, A, C)
        else:
            program -= C.programs
            _parts(
                a, b, x, out_ptr, residual_ptr, change, program, rows_a, rows_b, first, PAIRED, RESIDUAL, A, B, C
            )  # fmt: skip


@triton.jit
def float_products(
    w_ptr, line, inside, x_high, x_low, t_ptr, squares_ptr, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Rows number `line` (int64 [N]) of plain floats [any, K], those that are `inside`, times a row of quantized
    activations, all in fp32: [N]; with PARTIALS divided by the row's root mean square."""
    acc = tl.zeros([line.shape[0], BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_row = k < K
        x = tl.load(x_high + k, mask=in_row, other=0).to(tl.int32) * 256
        x += tl.load(x_low + k, mask=in_row, other=0).to(tl.int32)
        t = tl.load(t_ptr + k // 32, mask=in_row, other=0.0)
        w_at = w_ptr + line[:, None] * K + k[None, :]
        w = tl.load(w_at, mask=inside[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        acc += w * (x.to(tl.float32) * t)[None, :]
    y = tl.sum(acc, axis=1)
    if PARTIALS > 0:
        y *= tl.rsqrt(tl.sum(load_squares(squares_ptr, PARTIALS), 0) / K + eps)
    return y


@triton.jit
def _float_kernel(
    out_ptr, residual_ptr, x_high, x_low, t_ptr, squares_ptr, w_ptr, first, rows, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTIALS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (block of BLOCK_N rows of plain floats,)."""
    launch_then_wait(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = float_products(
        w_ptr, n.to(tl.int64), n < rows, x_high, x_low, t_ptr, squares_ptr, eps, K, BLOCK_K, PARTIALS
    )
    at = first + n
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
    """x [1, K] times weight [N, K], plus residual fp32 [1, N]: fp32 [1, N].

    `out` avoids the allocation; it may be the residual. `pdl`: the launch may start before its predecessor in the
    stream ends, and read weights meanwhile (sm_90 and later; the predecessor must not write the weights). Raises
    ValueError for other shapes.
    """
    check_row(x, weight)
    check_change(weight)
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
            _launch_packed(x, taken, weight, residual, y, first, pdl)
        first += sum(part.rows for part in taken)
        parts = parts[len(taken) :]
    return y


def _launch_packed(
    x: QuantizedActivations,
    parts: list[PackedPart | FloatPart],
    weight: PackedWeight,
    residual: Tensor | None,
    out: Tensor,
    first: int,
    pdl: bool,
) -> None:
    packed = [part for part in parts if isinstance(part, PackedPart)]
    geometry, change = matvec_geometry(packed, "rows"), weight.change
    a, b = packed[0], packed[-1]
    blocks = sum(triton.cdiv(part.tiles, geometry.tiles) for part in packed)
    of_change = RowChangeProgram.of(change, ROWS, geometry, blocks)
    _matvec_kernel[(blocks if of_change is None else of_change.programs + blocks,)](
        out, out if residual is None else residual, *row_arguments(x), *a.planes, a.tiles, a.rows,
        *b.planes, b.tiles, b.rows, None if change is None else change.tensors, first,
        PAIRED=weight.paired, RESIDUAL=residual is not None, A=MatvecProgram.of(a, geometry, x, pdl),
        B=MatvecProgram.of(b, geometry, x, pdl) if len(packed) == 2 else None, C=of_change,
        num_warps=geometry.warps, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip


def _launch_float(
    x: QuantizedActivations, part: FloatPart, residual: Tensor | None, out: Tensor, first: int, pdl: bool
) -> None:
    block = 8
    high, low, scale, _, squares, eps = row_arguments(x)
    _float_kernel[(triton.cdiv(part.rows, block),)](
        out, out if residual is None else residual, high, low, scale, squares, part.weight, first, part.rows, eps,
        K=x.cols, PARTIALS=0 if x.rms is None else x.rms.squares.shape[1], BLOCK_N=block,
        BLOCK_K=min(512, triton.next_power_of_2(x.cols)), RESIDUAL=residual is not None, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
