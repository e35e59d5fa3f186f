"""The gate and up projections of decode, their activation and the quantization of the result, in one launch.

Defined in kernels/q_dot.py, kernels/glu.py, kernels/activations.py.
"""

import triton
import triton.language as tl

from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
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
from quengine.kernels.cuda.glu import EPILOGUES, gated, glu_rows
from quengine.kernels.cuda.weights.launch_table import matvec_geometry
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.glu import Gating


@triton.jit
def _glu_kernel(
    words_ptr, out_high, out_low, out_scale, out_sums, x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps,
    low, high, scales, supers, tiles, width, ACTIVATION: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up of a paired matrix, quantized: 8 outputs a tile."""
    if P.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    tile0 = tl.program_id(0) * P.tiles
    matrix = Matrix((low, high, scales, supers), tiles)
    begun = begin_rows(matrix, tile0, P)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    x = QuantizedRow(x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps)
    y = finish_rows(begun, load_squares(squares_ptr, P.partials), matrix, x, tile0, P)
    gate, up = tl.split(tl.permute(y, [0, 1, 3, 2]))
    value = gated(gate, up, ACTIVATION)  # [tiles, 8, 1]
    out = QuantizedRow(out_high, out_low, out_scale, out_sums, squares_ptr, eps)
    quantize_gated(value, words_ptr, out, 0, tile0 * 8, width, P.tiles)


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
    geometry = matvec_geometry([part], "swiglu")
    _glu_kernel[(triton.cdiv(part.tiles, geometry.tiles),)](
        room.words, result.high, result.low, result.scale, result.sums, *row_arguments(x),
        *part.planes, part.tiles, part.rows // 2,
        ACTIVATION=EPILOGUES[activation], P=MatvecProgram.of(part, geometry, x, pdl),
        num_warps=geometry.warps, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip
    return result
