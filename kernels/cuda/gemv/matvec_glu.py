"""The gate and up projections of decode, their activation and the quantization of the result, in one launch.

Defined in kernels/q_dot.py, kernels/glu.py, kernels/activations.py.
"""

import triton
import triton.language as tl

from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec, result_columns
from quengine.kernels.cuda.gemv.matvec_program import (
    Matrix,
    MatvecProgram,
    QuantizationScratch,
    QuantizedRow,
    begin_rows,
    check_row,
    finish_rows,
    load_squares,
    quantize_gated,
    row_arguments,
)
from quengine.kernels.cuda.gemv.row_change import (
    GLU,
    RowChangeProgram,
    begin_change,
    hint_of,
    row_to_rank,
    rows_from_rank,
)
from quengine.kernels.cuda.glu import EPILOGUES, gated, glu_rows
from quengine.kernels.cuda.weights.launch_table import matvec_geometry
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.glu import Gating


@triton.jit
def _tiles_glu(
    matrix, x, out, words_ptr, change, program, width, ACTIVATION: tl.constexpr, P: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Computes P.tiles tiles, 8 outputs each."""
    tile0 = program * P.tiles
    hint = hint_of(change, C)
    begun = begin_rows(matrix, tile0, P)
    column, inside = result_columns(tile0, 0, 2 * width, P.tiles, True)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    changing = begin_change(change, hint, column, inside, C)
    y = finish_rows(begun, load_squares(x.squares, P.partials), matrix, x, tile0, P)
    if C is not None:
        y = rows_from_rank(change, changing, y, column, inside, C)
    gate, up = tl.split(tl.permute(y, [0, 1, 3, 2]))
    value = gated(gate, up, ACTIVATION)  # [tiles, 8, 1]
    quantize_gated(value, words_ptr, out, 0, tile0 * 8, width, P.tiles)


@triton.jit
def _glu_kernel(
    words_ptr, out_high, out_low, out_scale, out_sums, x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps,
    low, high, scales, supers, change, tiles, width, ACTIVATION: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up of a paired matrix, with a change (C is None: without), quantized."""
    if P.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    x = QuantizedRow(x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps)
    matrix = Matrix((low, high, scales, supers), tiles)
    out = QuantizedRow(out_high, out_low, out_scale, out_sums, squares_ptr, eps)
    program = tl.program_id(0)
    if C is None:
        _tiles_glu(matrix, x, out, words_ptr, change, program, width, ACTIVATION, P, C)
    else:
        if program < C.programs:
            row_to_rank(change, x, P, C)
        else:
            _tiles_glu(matrix, x, out, words_ptr, change, program - C.programs, width, ACTIVATION, P, C)


def matvec_glu(
    x: QuantizedActivations,
    gate_up: PackedWeight,
    activation: Gating = "silu",
    out: QuantizedActivations | None = None,
    scratch: QuantizationScratch | None = None,
    pdl: bool = False,
) -> QuantizedActivations:
    """activation(gate) * up of x [1, K] times a merged weight [2F, K], quantized: [1, F], F a multiple of 32.

    A paired weight takes one launch, any other three: the matmul, the activation, quantization. `scratch` and `out`
    avoid the allocations. Raises ValueError for other shapes.
    """
    check_row(x, gate_up)
    width = gate_up.rows // 2
    result = QuantizedActivations.empty(1, width, x.high.device) if out is None else out
    if (result.rows, result.cols) != (1, width):
        raise ValueError(f"out holds {[result.rows, result.cols]}, not {[1, width]}")
    room = QuantizationScratch.of(scratch, 2 * width, x.high.device)
    part = gate_up.parts[0]
    if not gate_up.paired or not isinstance(part, PackedPart):
        both = matvec(x, gate_up, out=room.values[: 2 * width].view(1, -1), pdl=pdl)
        return quantize_activations(glu_rows(both, activation, pdl), out=result, pdl=pdl)
    geometry, change = matvec_geometry([part], "swiglu"), gate_up.change
    programs = triton.cdiv(part.tiles, geometry.tiles)
    of_change = RowChangeProgram.of(change, GLU, geometry, programs)
    _glu_kernel[(programs if of_change is None else of_change.programs + programs,)](
        room.words, result.high, result.low, result.scale, result.sums, *row_arguments(x),
        *part.planes, None if change is None else change.tensors, part.tiles, part.rows // 2,
        ACTIVATION=EPILOGUES[activation], P=MatvecProgram.of(part, geometry, x, pdl), C=of_change,
        num_warps=geometry.warps, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip
    return result
