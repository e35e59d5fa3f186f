"""Grouped matmul of packed weights on the matrix instruction m16n8k16: matmul_fused.py with an expert for each block
of rows.

A tile's columns are split over warps, by the weight's shape alone, but not over programs: experts and blocks give
enough of these. A row's bits depend only on the row and its expert.
"""

import triton
import triton.language as tl

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, operand_offset
from quengine.kernels.cuda.gemm.matmul_fused import FusedProgram, MatmulMode, accumulate, add_warps
from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.glu import BIAS, BIASED_SWISH, SILU, gated, product_bound, product_scales
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.grouped_program import (
    UNBOUNDED,
    Blocks,
    GroupedOutput,
    expert_of,
    expert_planes,
    scheduled,
)
from quengine.kernels.cuda.weights.launch_table import grouped_fused_geometry
from quengine.kernels.cuda.weights.packed import PackedPart

_MMA = tl.constexpr(int(OperandLayout.MMA))


@triton.jit
def _places(token0, P: tl.constexpr):
    """The places of the results of `add_warps`: [1, 1, 4, token tile, 1, 2]."""
    return token0 + (
        tl.arange(0, P.token_tiles)[None, None, None, :, None, None] * 8
        + tl.arange(0, 4)[None, None, :, None, None, None] * 2
        + tl.arange(0, 2)[None, None, None, None, None, :]
    )


@triton.jit
def _store_rows(
    y, w: tl.constexpr, tile0, token0, rows, bias_ptr, out_ptr, first, stride, P: tl.constexpr
):  # fmt: skip
    """Stores products fp32, the results of `add_warps` for tile w of each warp, into columns `first` on of
    their rows.
    """
    tile = tile0 + tl.arange(0, P.n_warps)[:, None, None, None, None, None] * P.tiles + w
    r = tl.arange(0, 8)[None, :, None, None, None, None]
    rh = tl.arange(0, 2)[None, None, None, None, :, None]
    if P.paired:
        column = tile * 8 + r
        inside = column < rows // 2
        column = column + rh * (rows // 2)
    else:
        column = tile * 16 + rh * 8 + r
        inside = column < rows
    if P.epilogue == BIAS:
        y += tl.load(bias_ptr + (first + column), mask=inside, other=0.0)
    tl.store(out_ptr + _places(token0, P).to(tl.int64) * stride + (first + column), y, mask=inside)


@triton.jit
def _store_gated(
    y, w: tl.constexpr, tile0, place, rows, bias_ptr, out_ptr, stride, factor, P: tl.constexpr
):  # fmt: skip
    """Stores activation(gate) * up of products as scaled fp16 in the MMA layout. place: [1, 1, 4, token tile, 2]."""
    gate, up = tl.split(tl.permute(y, [0, 1, 2, 3, 5, 4]))
    column = (tile0 + tl.arange(0, P.n_warps)[:, None, None, None, None] * P.tiles + w) * 8 + (
        tl.arange(0, 8)[None, :, None, None, None]
    )
    inside = column < rows // 2
    if P.epilogue == BIASED_SWISH:
        gate += tl.load(bias_ptr + column, mask=inside, other=0.0)
        up += tl.load(bias_ptr + (rows // 2 + column), mask=inside, other=0.0)
    out = (gated(gate, up, P.epilogue) * factor).to(tl.float16)
    tl.store(out_ptr + operand_offset(place.to(tl.int64), column, stride, _MMA), out, mask=inside)


@DirectLaunch
@triton.jit(do_not_specialize=["first_block", "end_block"])
def _grouped_mma_kernel(
    low, high, scales, supers, x_ptr, row_scale_ptr, bias_ptr, out_ptr, out_row_scale_ptr, of_block_ptr,
    tiles, rows, weight_blocks, first_block, end_block, first, outputs, stride, weight_scale, bound,
    P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block of rows of x times a block of its expert's weight rows. outputs: outputs per expert, over all parts."""
    TILES: tl.constexpr = P.tiles
    if P.pdl:
        if not EARLY:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block, weight_block = scheduled(tl.program_id(0), weight_blocks)
    expert = expert_of(of_block_ptr, first_block + block, end_block)
    if expert >= 0:
        thread = tl.arange(0, 32 * P.n_warps * P.k_warps)
        lane = thread & 31
        tile0 = weight_block * (P.n_warps * TILES)
        tile = tile0 + (thread >> 5) // P.k_warps * TILES
        planes = expert_planes(low, high, scales, supers, expert, tiles, P)
        acc, token0 = accumulate(planes, x_ptr, tile, tiles, lane, thread >> 5, weight_scale, P, block)
        of_expert = bias_ptr + expert * outputs
        scale = tl.load(row_scale_ptr + _places(token0, P))
        if P.epilogue >= SILU:
            place = tl.reshape(_places(token0, P), [1, 1, 4, P.token_tiles, 2])
            one_scale = tl.reshape(scale, [1, 1, 4, P.token_tiles, 2])
            factor, out_row_scale = product_scales(one_scale, bound, P.epilogue)
            if weight_block == 0:
                tl.store(out_row_scale_ptr + place, out_row_scale)
            for w in tl.static_range(TILES):
                y = add_warps(acc, w, P) * (scale / weight_scale)
                _store_gated(y, w, tile0, place, rows, of_expert, out_ptr, stride, factor, P)
        else:
            for v in tl.static_range(TILES):
                y = add_warps(acc, v, P) * (scale / weight_scale)
                _store_rows(y, v, tile0, token0, rows, of_expert, out_ptr, first, stride, P)


def launch_grouped_mma(
    x: Fp16Operand,
    weights: ExpertWeights,
    part: PackedPart,
    blocks: Blocks,
    output: GroupedOutput,
    mode: MatmulMode,
) -> None:
    """Multiplies rows x, in blocks and in the MMA layout, by a part of their experts' matrices."""
    geometry = grouped_fused_geometry(part, weights.expert_tiles, blocks.rows)
    results, bias = output.results, output.bias
    program = FusedProgram(
        part.layout, part.cols, geometry.token_tiles, geometry.tiles, geometry.n_warps, geometry.k_warps, 1,
        geometry.ahead, weights.paired, output.epilogue, mode.exact or mode.batch_invariant, mode.pdl,
        uses_assembly(),
    )  # fmt: skip
    assert x.is_mma and 8 * geometry.token_tiles == blocks.rows
    weight_blocks = -(-weights.expert_tiles // (geometry.tiles * geometry.n_warps))
    bound = product_bound(part) if bias is None else UNBOUNDED
    _grouped_mma_kernel[blocks.grid(weight_blocks)](
        *part.planes, x.values, x.row_scale, results[0] if bias is None else bias, *results, blocks.of_block,
        weights.expert_tiles, weights.part_rows, weight_blocks, blocks.first, blocks.end, output.first,
        weights.expert_rows, results[0].stride(0), part.weight_scale, bound,
        P=program, EARLY=blocks.early, num_warps=geometry.n_warps * geometry.k_warps,
        maxnreg=geometry.registers or None, launch_pdl=mode.pdl,
    )  # fmt: skip
