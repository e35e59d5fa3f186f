"""The projection that ends a residual branch in decode and starts the next RMSNorm, in one launch on packed weights.

It computes the new residual stream, and the stream times the norm's weights, quantized for the next matmul; the
division by the root mean square is left to that matmul, as partial sums of squares (activations.py). So the norm needs
no launch. Defined in kernels/q_dot.py, kernels/rms_norm.py.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.mma import prefetch
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, RmsPartials
from quengine.kernels.cuda.gemv.matvec import result_columns
from quengine.kernels.cuda.gemv.matvec_program import (
    Matrix,
    MatvecProgram,
    QuantizationScratch,
    QuantizedRow,
    begin_norm,
    begin_rows,
    check_row,
    finish_rows,
)
from quengine.kernels.cuda.gemv.row_change import (
    NORM,
    RowChangeProgram,
    begin_change,
    hint_of,
    row_to_rank,
    rows_from_rank,
)
from quengine.kernels.cuda.ranks.peers import PeerBuffers, exchange_sum, next_sequence
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.launch_table import matvec_geometry
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight


@triton.jit
def _tiles_norm(
    matrix, x, out, words_ptr, hidden_ptr, residual_ptr, norm_ptr, bias_ptr, peers, change, program, programs, N,
    RANKS: tl.constexpr, CAPACITY: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Computes P.tiles tiles; P.tiles is one or even."""
    tile0 = program * P.tiles
    hint = hint_of(change, C)
    begun = begin_rows(matrix, tile0, P)
    column = tile0 * 16 + tl.arange(0, 16 * P.tiles)[None, :]
    inside = column < N
    # Prefetched, as loading the norm's weights into registers this early would spill others.
    prefetch(norm_ptr + tl.minimum(column, N - 1), P.asm)
    if bias_ptr is not None:
        prefetch(bias_ptr + tl.minimum(column, N - 1), P.asm)
    changed, exists = result_columns(tile0, 0, N, P.tiles, False)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    changing = begin_change(change, hint, changed, exists, C)
    residual = tl.load(residual_ptr + column, mask=inside, other=0.0)
    at = tl.minimum(column, N - 1)
    if RANKS > 0:
        sequence = next_sequence(peers, at)
    y = finish_rows(begun, 0.0, matrix, x, tile0, P)
    if C is not None:
        y = rows_from_rank(change, changing, y, changed, exists, C)
    product = tl.reshape(tl.permute(y, [3, 0, 2, 1]), [1, 16 * P.tiles])
    if RANKS > 0:
        product = exchange_sum(peers, product, at, inside, sequence, RANKS, CAPACITY, P.asm)
    if bias_ptr is not None:
        product += tl.load(bias_ptr + column, mask=inside, other=0.0)
    hidden = product + residual
    begin_norm(hidden, hidden_ptr, 0, column, inside, norm_ptr, out, words_ptr, N, program, programs, P.tiles)


@triton.jit
def _norm_kernel(
    words_ptr, hidden_ptr, residual_ptr, norm_ptr, out_high, out_low, out_scale, out_sums, squares_ptr,
    x_high, x_low, t_ptr, sums_ptr, low, high, scales, supers, bias_ptr, peers, change, tiles, N,
    RANKS: tl.constexpr, CAPACITY: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """bias_ptr: [N], or None. RANKS: the number of ranks in `peers` that share the product; 0: the product is this
    rank's alone. C: of a change, or None.
    """
    if P.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    x = QuantizedRow(x_high, x_low, t_ptr, sums_ptr, x_high, 0.0)
    matrix = Matrix((low, high, scales, supers), tiles)
    out = QuantizedRow(out_high, out_low, out_scale, out_sums, squares_ptr, 0.0)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if C is None:
        _tiles_norm(
            matrix, x, out, words_ptr, hidden_ptr, residual_ptr, norm_ptr, bias_ptr, peers, change, program, programs,
            N, RANKS, CAPACITY, P, C,
        )  # fmt: skip
    else:
        if program < C.programs:
            row_to_rank(change, x, P, C)
        else:
            _tiles_norm(
                matrix, x, out, words_ptr, hidden_ptr, residual_ptr, norm_ptr, bias_ptr, peers, change,
                program - C.programs, programs - C.programs, N, RANKS, CAPACITY, P, C,
            )  # fmt: skip


def can_begin_norm(weight: PackedWeight) -> bool:
    """Whether `matvec_norm` supports this weight: one packed part, outputs in whole groups of 32."""
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
    bias: Tensor | None = None,
    peers: PeerBuffers | None = None,
) -> RmsNormed:
    """x [1, K] times weight [D, K], plus bias fp32 [D] and residual fp32 [1, D]. Starts the RMSNorm of this sum, with
    weights `norm` fp32 [D].

    `x` must not have a pending norm. `scratch` avoids an allocation; `pdl`: see `matvec`. With `peers`, of capacity at
    least D, the product is the sum over the ranks, which all launch this with their own x and weight. Raises
    ValueError for other shapes.
    """
    check_row(x, weight)
    part = weight.parts[0]
    if not can_begin_norm(weight) or not isinstance(part, PackedPart) or x.rms is not None:
        raise ValueError(f"a weight of {weight.rows} rows in {len(weight.parts)} parts cannot begin a norm")
    if residual.shape != (1, weight.rows) or not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous {[1, weight.rows]}, not {list(residual.shape)}")
    if bias is not None and (bias.shape != (weight.rows,) or bias.dtype != torch.float32):
        raise ValueError(f"bias must be fp32 {[weight.rows]}, not {bias.dtype} {list(bias.shape)}")
    if peers is not None and peers.capacity < weight.rows:
        raise ValueError(f"ranks exchange up to {peers.capacity} values, not {weight.rows}")
    room = QuantizationScratch.of(scratch, weight.rows, residual.device)
    geometry, change = matvec_geometry([part], "norm"), weight.change
    programs = triton.cdiv(part.tiles, geometry.tiles)
    hidden = residual.new_empty(residual.shape)
    squares = torch.empty(1, programs, dtype=torch.float32, device=residual.device)
    out = QuantizedActivations.empty(1, weight.rows, residual.device)
    of_change = RowChangeProgram.of(change, NORM, geometry, programs)
    _norm_kernel[(programs if of_change is None else of_change.programs + programs,)](
        room.words, hidden, residual, norm, out.high, out.low, out.scale, out.sums, squares,
        x.high, x.low, x.scale, x.sums, *part.planes, bias,
        None if peers is None else peers.pointers, None if change is None else change.tensors, part.tiles, part.rows,
        RANKS=0 if peers is None else peers.ranks, CAPACITY=0 if peers is None else peers.capacity,
        P=MatvecProgram.of(part, geometry, x, pdl), C=of_change,
        num_warps=geometry.warps, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip
    return RmsNormed(hidden, replace(out, rms=RmsPartials(squares, eps)))
