"""The gate and up projections of each row's experts in decode, their activation and the quantization of the result, in
one launch.

A program takes some tiles of one expert, whose index it reads on the device. Defined in kernels/moe/experts.py,
kernels/q_dot.py, kernels/glu.py, kernels/activations.py.
"""

import triton
import triton.language as tl

from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
from quengine.kernels.cuda.gemv.matvec_program import (
    Matrix,
    QuantizationScratch,
    QuantizedRow,
    begin_rows,
    finish_rows,
    load_squares,
    quantize_gated,
    row_arguments,
)
from quengine.kernels.cuda.glu import EPILOGUES, gated, glu_rows
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.matvec_expert_rows import (
    check_routing,
    check_rows,
    expert_program,
    matvec_expert_rows,
    quantized_row,
    share_constants,
)
from quengine.kernels.cuda.moe.share import own_number
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.weights.launch_table import experts_glu_geometry
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Routing


@triton.jit(do_not_specialize=["first_expert"])
def _experts_glu_kernel(
    words_ptr, out_high, out_low, out_scale, out_sums, x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps,
    chosen_ptr, bias_ptr, expert_low, expert_high, expert_scales, expert_supers, expert_tiles, width, first_expert,
    COUNT: tl.constexpr, SHARE: tl.constexpr, ACTIVATION: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Program (block of tiles, slot, row); 8 outputs a tile. Launches its dependents when the router has ended, so that
    they may read its result before they wait. The programs of an expert that is not here end at once.
    """
    wait_then_launch(P.pdl)
    row = tl.program_id(2)
    pair = row * tl.num_programs(1) + tl.program_id(1)
    expert = own_number(tl.load(chosen_ptr + pair), first_expert, COUNT, SHARE)
    if SHARE and expert == COUNT:
        return
    first = tl.program_id(0) * P.tiles
    tile0 = expert * expert_tiles + first
    planes = (expert_low, expert_high, expert_scales, expert_supers)
    matrix = Matrix(planes, (expert + 1) * expert_tiles)
    begun = begin_rows(matrix, tile0, P)
    squares_row = squares_ptr + row * P.partials
    x = quantized_row(
        QuantizedRow(x_high, x_low, t_ptr, sums_ptr, squares_ptr, eps), row, squares_row, P.cols
    )
    column = (first + tl.arange(0, P.tiles)[:, None, None]) * 8 + tl.arange(0, 8)[None, :, None]
    inside = column < width
    if bias_ptr is not None:
        bias = bias_ptr + expert * 2 * width + column
        gate_bias = tl.load(bias, mask=inside, other=0.0)
        up_bias = tl.load(bias + width, mask=inside, other=0.0)
    y = finish_rows(begun, load_squares(squares_row, P.partials), matrix, x, tile0, P)
    gate, up = tl.split(tl.permute(y, [0, 1, 3, 2]))
    if bias_ptr is not None:
        gate += gate_bias
        up += up_bias
    value = gated(gate, up, ACTIVATION)  # [tiles, 8, 1]
    out = QuantizedRow(out_high, out_low, out_scale, out_sums, squares_ptr, eps)
    quantize_gated(value, words_ptr, out, pair, first * 8, width, P.tiles)


def matvec_experts_glu(
    x: QuantizedActivations,
    routing: Routing,
    gate_up: ExpertWeights,
    activation: Activation = "silu",
    scratch: QuantizationScratch | None = None,
    pdl: bool = False,
) -> QuantizedActivations:
    """activation(gate) * up of each row x [T, K] by its k experts [2F, K], quantized: [T * k, F], F a multiple of 32;
    of an activation without a gate the experts are [F, K]. Rows of experts that are not here are undefined.

    Paired weights take one launch, others three or four: the matmuls, the activation, quantization. `scratch`, for T *
    k * F values, avoids an allocation. A row's bits follow from its own values. Raises ValueError for other shapes.
    """
    check_rows(x, gate_up, routing.experts.shape[0])
    check_routing(routing, gate_up)
    rows, used = routing.experts.shape
    width, device = gate_up.expert_rows // 2, x.high.device
    part = gate_up.parts[0]
    if not gate_up.paired or not isinstance(part, PackedPart):
        both = matvec_expert_rows(x, routing, gate_up, pdl=pdl)
        return quantize_activations(glu_rows(both, activation, pdl), pdl=pdl)
    out = QuantizedActivations.empty(rows * used, width, device)
    room = QuantizationScratch.of(scratch, rows * used * width, device)
    _launch(x, routing, gate_up, part, activation, out, room, pdl)
    return out


def _launch(
    x: QuantizedActivations,
    routing: Routing,
    gate_up: ExpertWeights,
    part: PackedPart,
    activation: Activation,
    out: QuantizedActivations,
    room: QuantizationScratch,
    pdl: bool,
) -> None:
    rows, used = routing.experts.shape
    tiles = gate_up.expert_tiles
    geometry = experts_glu_geometry(part, tiles, used)
    _experts_glu_kernel[(triton.cdiv(tiles, geometry.tiles), used, rows)](
        room.words, out.high, out.low, out.scale, out.sums, *row_arguments(x), routing.experts,
        gate_up.bias, *part.planes, tiles, gate_up.expert_rows // 2, gate_up.first, **share_constants(gate_up),
        ACTIVATION=EPILOGUES[activation], P=expert_program(part, tiles, geometry, x, pdl),
        num_warps=geometry.warps, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip
