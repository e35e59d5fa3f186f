"""The projection that ends a residual branch with a norm of its own, in decode: product, norm, sum and next norm in one
launch.

All programs but the last multiply, and leave their part of the product as words (matvec_program.py). The last one waits
for the whole row, and does for it what post_norm.py does in a launch. It waits only for programs of lower numbers,
which have started before it. Defined in kernels/q_dot.py, kernels/rms_norm.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import Branch
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.gemv.matvec_norm import can_begin_norm
from quengine.kernels.cuda.gemv.matvec_program import (
    Matrix,
    MatvecProgram,
    QuantizationScratch,
    QuantizedRow,
    begin_rows,
    check_row,
    finish_rows,
    taken_words,
)
from quengine.kernels.cuda.post_norm import branch_arguments, post_normed
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.row_forms import QUANTIZED, store_as
from quengine.kernels.cuda.weights.launch_table import matvec_geometry
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.rms_norm import RMSNorm

_MOST_VALUES = 16
"""The most values that a thread of the last program holds of each of up to seven rows: twice as many would spill."""


@triton.jit
def _leave_product(words_ptr, x, matrix, WIDTH: tl.constexpr, P: tl.constexpr):
    """Stores this program's part of the product as words."""
    tile0 = tl.program_id(0) * P.tiles
    begun = begin_rows(matrix, tile0, P)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    y = finish_rows(begun, 0.0, matrix, x, tile0, P)
    product = tl.reshape(tl.permute(y, [3, 0, 2, 1]), [16 * P.tiles])
    column = tile0 * 16 + tl.arange(0, 16 * P.tiles)
    tl.store(words_ptr + column, product.to(tl.int32, bitcast=True), mask=column < WIDTH)


@triton.jit
def _post_norm_kernel(
    words_ptr, residual_ptr, weight_ptr, norm_ptr, branch_ptr, first_weight_ptr, branch_weight_ptr,
    out_high, out_low, out_scale, out_sums, x_high, x_low, t_ptr, sums_ptr, low, high, scales, supers,
    tiles, residual_scale, eps, branch_eps, next_eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """norm_ptr: weights of the next norm, or None. branch_ptr: as in post_norm.py."""
    if P.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) < tl.num_programs(0) - 1:
        x = QuantizedRow(x_high, x_low, t_ptr, sums_ptr, x_high, 0.0)
        _leave_product(words_ptr, x, Matrix((low, high, scales, supers), tiles), WIDTH, P)
    else:
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        norm, other, first_weight, branch_weight = None, None, None, None
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
        if branch_ptr is not None:
            first_weight = tl.load(first_weight_ptr + column, mask=inside, other=0.0)
            branch_weight = tl.load(branch_weight_ptr + column, mask=inside, other=0.0)
        if P.pdl:
            tl.extra.cuda.gdc_wait()
        stream = tl.load(residual_ptr + column, mask=inside, other=0.0) * residual_scale
        if branch_ptr is not None:
            other = tl.load(branch_ptr + column, mask=inside, other=0.0)
        y = taken_words(words_ptr + column, inside)
        stream += post_normed(y, weight, other, first_weight, branch_weight, eps, branch_eps, WIDTH)
        tl.store(residual_ptr + column, stream, mask=inside)
        if norm_ptr is not None:
            z = stream * tl.rsqrt(tl.sum(stream * stream, 0) / WIDTH + next_eps) * norm
            store_as(z, 0, 0, out_high, out_low, out_scale, out_sums, 0, WIDTH, QUANTIZED, 0)


def can_end_with_norm(weight: PackedWeight) -> bool:
    """Whether `matvec_post_norm` supports this weight: the last program's threads hold a whole row in registers."""
    part = weight.parts[0]
    if not can_begin_norm(weight) or not isinstance(part, PackedPart) or weight.change is not None:
        return False
    threads = 32 * matvec_geometry([part], "norm").warps
    return weight.rows <= _MOST_VALUES * threads  # a power of two: also where rows are padded to one


def matvec_post_norm(
    x: QuantizedActivations,
    weight: PackedWeight,
    residual: Tensor,
    post_norm: RMSNorm,
    next_norm: RMSNorm | None = None,
    branch: Branch | None = None,
    scratch: QuantizationScratch | None = None,
    pdl: bool = False,
) -> Tensor | RmsNormed:
    """Multiplies residual fp32 [1, D] by the `residual_scale` of `post_norm`, and adds `post_norm` of x [1, K] times
    weight [D, K] to it, in place. With `next_norm`, the result also has that norm of the sum, quantized. `branch`: see
    `Backend.linear_add`.

    `x` must not have a pending norm, and the weight is one that `can_end_with_norm`. `scratch` avoids an allocation;
    `pdl`: see `matvec`. Raises ValueError for other shapes.
    """
    check_row(x, weight)
    part = weight.parts[0]
    if weight.change is not None:
        raise ValueError("a weight with a change cannot end with a norm")
    if not can_end_with_norm(weight) or not isinstance(part, PackedPart) or x.rms is not None:
        raise ValueError(
            f"a weight of {weight.rows} rows in {len(weight.parts)} parts cannot end with a norm"
        )
    if residual.shape != (1, weight.rows) or not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous {[1, weight.rows]}, not {list(residual.shape)}")
    room = QuantizationScratch.of(scratch, weight.rows, residual.device)
    geometry = matvec_geometry([part], "norm")
    out = None if next_norm is None else QuantizedActivations.empty(1, weight.rows, residual.device)
    planes = (residual,) * 4 if out is None else (out.high, out.low, out.scale, out.sums)
    branches, branch_eps = branch_arguments(branch, residual)
    next_weight, next_eps = (None, 0.0) if next_norm is None else (next_norm.weight, next_norm.eps)
    _post_norm_kernel[(triton.cdiv(part.tiles, geometry.tiles) + 1,)](
        room.words, residual, post_norm.weight, next_weight, *branches, *planes,
        x.high, x.low, x.scale, x.sums, *part.planes, part.tiles,
        post_norm.residual_scale, post_norm.eps, branch_eps, next_eps,
        WIDTH=part.rows, BLOCK=max(32, triton.next_power_of_2(part.rows)),
        P=MatvecProgram.of(part, geometry, x, pdl),
        num_warps=geometry.warps, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip
    return residual if out is None else RmsNormed(residual, out)
