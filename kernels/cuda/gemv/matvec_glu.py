"""The gate and up projection of decode, its activation and the quantization of the result, in one launch.

Definition: kernels/q_dot.py, kernels/glu.py, kernels/activations.py.
"""

import triton
import triton.language as tl

from quengine.kernels.backend import Activation
from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.gemv.activations import (
    QuantizedActivations,
    quantize_activations,
    quantize_group,
    store_quantized,
)
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_program import (
    QuantizationScratch,
    begin_rows,
    check_rows,
    finish_rows,
    is_even,
    kernel_rows,
    load_squares,
    pending_norm,
    quantize_shared_group,
    register_limit,
)
from quengine.kernels.cuda.gemv.q_dot import row_order
from quengine.kernels.cuda.glu import EPILOGUES, gated, glu_rows
from quengine.kernels.cuda.weights.launch_table import matvec_geometry
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight


@triton.jit
def _glu_kernel(
    values_ptr, arrivals_ptr, out_high, out_low, out_scale, out_sums, x_high, x_low, t_ptr, sums_ptr, squares_ptr,
    low, high, scales, supers, tiles, width, T, eps,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, K_WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, PARTIALS: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up of a paired matrix, quantized. A tile gives 8 outputs and a group has 32: with fewer
    than 4 tiles to a program, its programs leave their values in `values` and the last one to arrive quantizes the
    group."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile0 = tl.program_id(0) * TILES
    planes = (low, high, scales, supers)
    queue = begin_rows(planes, tile0, tiles, FMT, K, TILES, K_WARPS, AHEAD, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    squares = load_squares(squares_ptr, ROWS, T, PARTIALS)
    y = finish_rows(
        queue, squares, planes, x_high, x_low, t_ptr, sums_ptr, eps, tile0, tiles, T,
        FMT, ROWS, K, TILES, K_WARPS, AHEAD, EARLY, EVEN, PARTIALS, ASM,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(y, [0, 1, 3, 2]))
    value = gated(gate, up, ACTIVATION)  # [TILES, 8, ROWS]
    order = row_order(ROWS)
    if TILES >= 4:
        GROUPS: tl.constexpr = TILES // 4
        by_row = tl.permute(tl.reshape(value, [GROUPS, 32, ROWS]), [2, 0, 1])
        coarse, fine, scale, x_sums = quantize_group(tl.reshape(by_row, [ROWS * GROUPS, 32]))
        group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[None, :]
        inside = (order[:, None] < T) & (group < width // 32)
        place = tl.reshape(order[:, None] * (width // 32) + group, [ROWS * GROUPS])
        store_quantized(
            out_high, out_low, out_scale, out_sums, place, tl.reshape(inside, [ROWS * GROUPS]),
            coarse, fine, scale, x_sums,
        )  # fmt: skip
    else:
        column = (tile0 + tl.arange(0, TILES)[:, None, None]) * 8 + tl.arange(0, 8)[None, :, None]
        row = tl.reshape(order, [1, 1, ROWS])
        tl.store(values_ptr + row * width + column, value, mask=(column < width) & (row < T))
        quantize_shared_group(
            values_ptr, arrivals_ptr, out_high, out_low, out_scale, out_sums, tile0 // 4, width, T, ROWS, 4 // TILES
        )  # fmt: skip


def matvec_glu(
    x: QuantizedActivations,
    gate_up: PackedWeight,
    activation: Activation = "silu",
    out: QuantizedActivations | None = None,
    scratch: QuantizationScratch | None = None,
    pdl: bool = False,
) -> QuantizedActivations:
    """activation(gate) * up of x [T, K] times a merged weight [2F, K], quantized: [T, F], F a multiple of 32.

    Takes one launch for a paired weight. Otherwise three: the matmul, the activation, quantization. `scratch` and `out`
    avoid the allocations. Raises ValueError on other shapes.
    """
    check_rows(x, gate_up)
    width = gate_up.rows // 2
    rounded = QuantizedActivations.empty(x.rows, width, x.high.device) if out is None else out
    if (rounded.rows, rounded.cols) != (x.rows, width):
        raise ValueError(f"out holds {[rounded.rows, rounded.cols]}, not {[x.rows, width]}")
    room = QuantizationScratch.empty(x.rows, 2 * width, x.high.device) if scratch is None else scratch
    if room.values.numel() < x.rows * 2 * width or room.arrivals.numel() * 32 < width:
        raise ValueError(f"scratch holds {list(room.values.shape)}, needs {[x.rows, 2 * width]}")
    part = gate_up.parts[0]
    if gate_up.paired and isinstance(part, PackedPart):
        _launch_glu(x, part, activation, room, rounded, pdl)
        return rounded
    both = matvec(x, gate_up, out=room.values.view(-1)[: x.rows * 2 * width].view(x.rows, -1), pdl=pdl)
    return quantize_activations(glu_rows(both, activation, pdl), out=rounded, pdl=pdl)


def _launch_glu(
    x: QuantizedActivations,
    part: PackedPart,
    activation: Activation,
    scratch: QuantizationScratch,
    out: QuantizedActivations,
    pdl: bool,
) -> None:
    geometry = matvec_geometry([part], "swiglu")
    squares, eps, partials = pending_norm(x)
    _glu_kernel[(triton.cdiv(part.tiles, geometry.tiles),)](
        scratch.values, scratch.arrivals, out.high, out.low, out.scale, out.sums,
        x.high, x.low, x.scale, x.sums, squares,
        part.low, part.high, part.scales, part.supers,
        part.tiles, part.rows // 2, x.rows, eps,
        FMT=part.layout, ROWS=kernel_rows(x.rows), K=x.cols,
        TILES=geometry.tiles, K_WARPS=geometry.k_warps, AHEAD=geometry.ahead, EARLY=geometry.early,
        EVEN=is_even(part, geometry), PARTIALS=partials, ACTIVATION=EPILOGUES[activation],
        PDL=pdl, ASM=uses_assembly(), num_warps=geometry.warps, maxnreg=register_limit(geometry, x.rows),
        launch_pdl=pdl,
    )  # fmt: skip
