"""Expert matrices in decode: functions that the kernels share, and products as plain fp32 rows, for gate and up that
are not paired and for plain floats.

Defined in kernels/moe/experts.py, kernels/q_dot.py.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.gemv.matvec import float_products
from quengine.kernels.cuda.gemv.matvec_program import (
    Matrix,
    MatvecProgram,
    QuantizedRow,
    begin_rows,
    finish_rows,
    load_squares,
    row_arguments,
)
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.share import own_number
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.weights.geometry import Geometry
from quengine.kernels.cuda.weights.launch_table import experts_glu_geometry
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart
from quengine.kernels.moe.router import Routing

_FLOAT_ROWS = 8


@triton.jit
def quantized_row(x, index, squares, COLS: tl.constexpr):
    """Row `index` of quantized activations [n, COLS] whose first row is `x`; squares: the row's."""
    return QuantizedRow(
        x.high + index * COLS,
        x.low + index * COLS,
        x.scale + index * (COLS // 32),
        x.sums + index * (COLS // 16),
        squares,
        x.eps,
    )


def expert_program(
    part: PackedPart, tiles: int, geometry: Geometry, x: QuantizedActivations, pdl: bool
) -> MatvecProgram:
    """The program constants for one expert's `tiles` tiles in a part."""
    program = MatvecProgram.of(part, geometry, x, pdl)
    return replace(program, even=tiles % geometry.tiles == 0 and part.chunks % geometry.k_warps == 0)


def share_constants(weights: ExpertWeights) -> dict[str, Any]:
    """Constants of the kernels that call `own_number`. Without a share they do not contain the number of experts, so
    that one compiled kernel serves any number."""
    share = weights.share is not None
    return {"COUNT": weights.count if share else 0, "SHARE": share}


def check_rows(x: QuantizedActivations, weights: ExpertWeights, rows: int) -> None:
    """Raises ValueError if x is not `rows` rows of the weights' width."""
    if (x.rows, x.cols) != (rows, weights.cols):
        raise ValueError(f"activations are {[x.rows, x.cols]}, for these experts {[rows, weights.cols]}")


def check_routing(routing: Routing, weights: ExpertWeights) -> None:
    """Raises ValueError unless the routing is contiguous int32 and fp32 [T, k], and, without a share, k is at most the
    number of experts. With a share, any number of a row's slots may name experts that are not here."""
    experts, factors = routing.experts, routing.weights
    fits = experts.ndim == 2 and experts.shape == factors.shape
    fits = fits and (weights.share is not None or experts.shape[1] <= weights.count)
    kinds = (experts.dtype, factors.dtype) == (torch.int32, torch.float32)
    if not (fits and kinds and experts.is_contiguous() and factors.is_contiguous()):
        raise ValueError(
            f"a routing is contiguous int32 and fp32 [T, k], k up to {weights.count}, not {experts.dtype} "
            f"{list(experts.shape)} and {factors.dtype} {list(factors.shape)}"
        )


@triton.jit(do_not_specialize=["first_expert"])
def _expert_rows_kernel(
    out_ptr, x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps, chosen_ptr, bias_ptr,
    expert_low, expert_high, expert_scales, expert_supers, expert_tiles, rows, first, stride, first_expert,
    COUNT: tl.constexpr, SHARE: tl.constexpr, X_OF_PAIR: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Program (block of tiles, slot, row): outputs first .. first + rows of an expert's `stride` outputs."""
    wait_then_launch(P.pdl)
    pair = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    row = pair if X_OF_PAIR else tl.program_id(2)
    expert = own_number(tl.load(chosen_ptr + pair), first_expert, COUNT, SHARE)
    if SHARE and expert == COUNT:
        return
    block = tl.program_id(0) * P.tiles
    tile0 = expert * expert_tiles + block
    planes = (expert_low, expert_high, expert_scales, expert_supers)
    matrix = Matrix(planes, (expert + 1) * expert_tiles)
    begun = begin_rows(matrix, tile0, P)
    squares_row = squares_ptr + row * P.partials
    x = quantized_row(
        QuantizedRow(x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps), row, squares_row, P.cols
    )
    y = finish_rows(begun, load_squares(squares_row, P.partials), matrix, x, tile0, P)
    tile = block + tl.arange(0, P.tiles)[:, None, None, None]
    rh = tl.arange(0, 2)[None, None, :, None]
    column = tile * 16 + rh * 8 + tl.arange(0, 8)[None, :, None, None]
    inside = column < rows
    if bias_ptr is not None:
        y += tl.load(bias_ptr + expert * stride + first + column, mask=inside, other=0.0)
    tl.store(out_ptr + pair * stride + first + column, y, mask=inside)


@triton.jit(do_not_specialize=["first_expert"])
def _expert_floats_kernel(
    out_ptr, x_high, x_low, t_ptr, squares_ptr, eps, chosen_ptr, bias_ptr, w_ptr, rows, first, stride, first_expert,
    COUNT: tl.constexpr, SHARE: tl.constexpr,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTIALS: tl.constexpr,
    X_OF_PAIR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_expert_rows_kernel` for plain floats, all in fp32."""
    wait_then_launch(PDL)
    pair = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    row = pair if X_OF_PAIR else tl.program_id(2)
    expert = own_number(tl.load(chosen_ptr + pair), first_expert, COUNT, SHARE)
    if SHARE and expert == COUNT:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = float_products(
        w_ptr, expert.to(tl.int64) * rows + n, n < rows, x_high + row * K, x_low + row * K, t_ptr + row * (K // 32),
        squares_ptr + row * PARTIALS, eps, K, BLOCK_K, PARTIALS,
    )  # fmt: skip
    if bias_ptr is not None:
        y += tl.load(bias_ptr + expert * stride + first + n, mask=n < rows, other=0.0)
    tl.store(out_ptr + pair * stride + first + n, y, mask=n < rows)


def matvec_expert_rows(
    x: QuantizedActivations, routing: Routing, weights: ExpertWeights, pdl: bool = False
) -> Tensor:
    """Products, with bias, of each row with its k experts' unpaired matrices: fp32 [T * k, expert_rows]; undefined for
    experts that are not here.

    x: [T, K], or [T * k, K] with a row for each expert of a row.
    """
    rows, used = routing.experts.shape
    assert not weights.paired and x.cols == weights.cols and x.rows in (rows, rows * used)
    out = torch.empty(rows * used, weights.expert_rows, dtype=torch.float32, device=x.high.device)
    for number, part in enumerate(weights.parts):
        first = number * weights.part_rows
        if isinstance(part, FloatPart):
            _launch_floats(x, routing, weights, part, first, out, pdl)
        else:
            _launch_packed(x, routing, weights, part, first, out, pdl)
    return out


def _launch_packed(
    x: QuantizedActivations,
    routing: Routing,
    weights: ExpertWeights,
    part: PackedPart,
    first: int,
    out: Tensor,
    pdl: bool,
) -> None:
    rows, used = routing.experts.shape
    tiles = weights.expert_tiles
    geometry = experts_glu_geometry(part, tiles, used)
    _expert_rows_kernel[(triton.cdiv(tiles, geometry.tiles), used, rows)](
        out, *row_arguments(x), routing.experts, weights.bias, *part.planes, tiles, weights.part_rows, first,
        weights.expert_rows, weights.first, **share_constants(weights), X_OF_PAIR=x.rows != rows,
        P=expert_program(part, tiles, geometry, x, pdl),
        num_warps=geometry.warps, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip


def _launch_floats(
    x: QuantizedActivations,
    routing: Routing,
    weights: ExpertWeights,
    part: FloatPart,
    first: int,
    out: Tensor,
    pdl: bool,
) -> None:
    rows, used = routing.experts.shape
    high, low, scale, _, squares, eps = row_arguments(x)
    _expert_floats_kernel[(triton.cdiv(weights.part_rows, _FLOAT_ROWS), used, rows)](
        out, high, low, scale, squares, eps, routing.experts, weights.bias, part.weight, weights.part_rows, first,
        weights.expert_rows, weights.first, **share_constants(weights), K=x.cols,
        PARTIALS=0 if x.rms is None else x.rms.squares.shape[1],
        BLOCK_N=_FLOAT_ROWS, BLOCK_K=min(512, triton.next_power_of_2(x.cols)), X_OF_PAIR=x.rows != rows, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
