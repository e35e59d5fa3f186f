"""Grouped matmul of plain float weights: matmul_float.py with an expert for each block of rows.

Weights are rounded to fp16, sums are fp32 and run over the columns from first to last, so a row's bits depend only on
the row and its expert.
"""

import triton
import triton.language as tl

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemm.matmul_float import float_block
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.grouped_program import Blocks, GroupedOutput, expert_of, scheduled
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.weights.packed import FloatPart

_BLOCK_WEIGHTS = 64
_BLOCK_COLUMNS = 64


@DirectLaunch
@triton.jit(do_not_specialize=["first_block", "end_block"])
def _grouped_float_kernel(
    weight_ptr, x_ptr, row_scale_ptr, bias_ptr, out_ptr, of_block_ptr, rows, weight_blocks, first_block, end_block,
    first, outputs, stride, K, x_stride,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, LAYOUT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block of rows of x, or BLOCK_T rows of it, times a block of its expert's weight rows."""
    PARTS: tl.constexpr = (BLOCK + BLOCK_T - 1) // BLOCK_T
    wait_then_launch(PDL)  # so that the next launch starts when the blocks are known (Blocks.early)
    block, weight_block = scheduled(tl.program_id(0), weight_blocks * PARTS)
    expert = expert_of(of_block_ptr, first_block + block, end_block)
    if expert >= 0:
        part = weight_block % PARTS
        of_block = part * BLOCK_T + tl.arange(0, BLOCK_T)
        place = block.to(tl.int64) * BLOCK + of_block
        live = of_block < BLOCK
        n = (weight_block // PARTS) * BLOCK_N + tl.arange(0, BLOCK_N)
        weights = weight_ptr + (expert.to(tl.int64) * rows + n)[:, None] * K
        acc = float_block(
            weights, n < rows, x_ptr, place, live, x_stride, K, BLOCK_N, BLOCK_T, BLOCK_K, LAYOUT
        )  # fmt: skip
        y = acc * tl.load(row_scale_ptr + place, mask=live, other=0.0)[None, :]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + expert * outputs + first + n, mask=n < rows, other=0.0)[:, None]
        inside = live[None, :] & (n < rows)[:, None]
        tl.store(out_ptr + place[None, :] * stride + first + n[:, None], y, mask=inside)


def launch_grouped_float(
    x: Fp16Operand, weights: ExpertWeights, part: FloatPart, blocks: Blocks, output: GroupedOutput, pdl: bool
) -> None:
    """Multiplies rows x, in blocks and in any layout, by a part of their experts' matrices."""
    assert part.weight.is_contiguous()
    block = 16 if blocks.rows <= 16 else 64
    weight_blocks = -(-weights.part_rows // _BLOCK_WEIGHTS)
    grid = blocks.grid(weight_blocks * -(-blocks.rows // block))
    _grouped_float_kernel[grid](
        part.weight, x.values, x.row_scale, output.bias, output.out, blocks.of_block,
        weights.part_rows, weight_blocks, blocks.first, blocks.end, output.first, weights.expert_rows,
        output.out.stride(0), part.cols, x.stride,
        BLOCK=blocks.rows, BLOCK_N=_BLOCK_WEIGHTS, BLOCK_T=block, BLOCK_K=_BLOCK_COLUMNS, LAYOUT=int(x.layout),
        PDL=pdl, num_warps=4, num_stages=3, launch_pdl=pdl,
    )  # fmt: skip
