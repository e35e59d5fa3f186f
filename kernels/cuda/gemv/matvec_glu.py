"""The gate and up projections of decode, their activation and the quantization of the result, in one launch.

Defined in kernels/q_dot.py, kernels/glu.py, kernels/activations.py.
"""

import triton
import triton.language as tl

from quengine.kernels.cuda.gemv.activations import (
    QuantizedActivations,
    quantize_activations,
    quantize_group,
    store_quantized,
)
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_program import (
    Matrix,
    MatvecProgram,
    QuantizationScratch,
    QuantizedRow,
    begin_rows,
    check_row,
    finish_rows,
    leave_for_last,
    load_squares,
    quantize_as_last,
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
    """activation(gate) * up of a paired matrix, quantized. A tile gives 8 outputs, a group has 32: with fewer
    than 4 tiles per program, the last program of a group quantizes it.
    """
    if P.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    tile0 = tl.program_id(0) * P.tiles
    matrix = Matrix((low, high, scales, supers), tiles)
    queue = begin_rows(matrix, tile0, P)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    x = QuantizedRow(x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps)
    y = finish_rows(queue, load_squares(squares_ptr, P.partials), matrix, x, tile0, P)
    gate, up = tl.split(tl.permute(y, [0, 1, 3, 2]))
    value = gated(gate, up, ACTIVATION)  # [tiles, 8, 1]
    if P.tiles >= 4:
        GROUPS: tl.constexpr = P.tiles // 4
        high_plane, low_plane, scale, sums = quantize_group(tl.reshape(value, [GROUPS, 32]))
        group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
        store_quantized(
            out_high, out_low, out_scale, out_sums, group, group < width // 32, high_plane, low_plane, scale, sums
        )  # fmt: skip
    else:
        out = QuantizedRow(out_high, out_low, out_scale, out_sums, squares_ptr, eps)
        value = tl.reshape(value, [8 * P.tiles])
        leave_for_last(value, words_ptr, tile0 * 8)
        quantize_as_last(value, words_ptr, out, tile0 * 8)


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
