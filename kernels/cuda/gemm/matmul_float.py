"""Batch-invariant matmul of plain float weights and any number of rows.

Weights are rounded to fp16, rows are fp16 operands (fp16_operand.py), sums are fp32 and run over the columns from
first to last: each element of the result is summed in the same order for any number of rows per program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, operand_offset
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.cuda.weights.packed import FloatPart

_BLOCK_WEIGHTS = 64  # weight rows per program: the least that wgmma takes as its left operand
_BLOCK_COLUMNS = 64


@triton.jit
def float_block(
    weights, in_rows, x_ptr, token, in_tokens, x_stride, K,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Rows of plain floats at pointers `weights` [BLOCK_N, 1], rounded to fp16, times rows number `token` of an fp16
    operand: fp32 [BLOCK_N, BLOCK_T], summed over the columns from first to last. in_rows, in_tokens: which exist.
    """
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        weight = tl.load(weights + k[None, :], mask=in_rows[:, None] & (k < K)[None, :], other=0.0)
        at = operand_offset(token[None, :], k[:, None], x_stride, LAYOUT)
        x = tl.load(x_ptr + at, mask=in_tokens[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(weight.to(tl.float16), x, acc)
    return acc


@triton.jit(do_not_specialize=["T"])
def _float_matmul_kernel(
    weight_ptr, x_ptr, row_scale_ptr, residual_ptr, out_ptr, rows, first, N, T, x_stride,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, LAYOUT: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_then_wait(PDL)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = float_block(
        weight_ptr + n[:, None] * K, n < rows, x_ptr, token, token < T, x_stride, K, BLOCK_N, BLOCK_T, BLOCK_K, LAYOUT
    )  # fmt: skip
    # A power of two: nothing is rounded before the residual is added.
    y = acc * tl.load(row_scale_ptr + token, mask=token < T, other=0.0)[None, :]
    at = token[None, :] * N + first + n[:, None]
    inside = (token < T)[None, :] & (n < rows)[:, None]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, y, mask=inside)


def launch_float(
    x: Fp16Operand,
    part: FloatPart,
    out: Tensor,
    first: int,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Stores rows x, in any layout, times plain floats to the columns of out fp32 [T, N] from `first` on, plus the same
    columns of `residual`.
    """
    assert part.weight.is_contiguous() and x.fits(part.cols) and out.dtype == torch.float32
    block = 16 if x.rows <= 16 else 64
    _float_matmul_kernel[(-(-x.rows // block), -(-part.rows // _BLOCK_WEIGHTS))](
        part.weight, x.values, x.row_scale, out if residual is None else residual, out, part.rows, first, out.shape[1],
        x.rows, x.stride,
        K=part.cols, BLOCK_N=_BLOCK_WEIGHTS, BLOCK_T=block, BLOCK_K=_BLOCK_COLUMNS, LAYOUT=x.layout,
        RESIDUAL=residual is not None, PDL=pdl, num_warps=4, num_stages=4, launch_pdl=pdl,
    )  # fmt: skip
