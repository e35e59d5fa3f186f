"""Copies rows given as embeddings over the rows of their tokens on CUDA, in one launch that a graph can capture."""

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.embedded_rows import EmbeddedRows


@triton.jit
def _place_kernel(
    row_ptr, value_ptr, out_ptr,
    K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + number)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < K) & (row >= 0)
    value = tl.load(value_ptr + number * K + column, mask=inside)
    tl.store(out_ptr + row * K + column, value, mask=inside)


def place_embeddings(x: torch.Tensor, given: EmbeddedRows | None, pdl: bool = False) -> torch.Tensor:
    """x, fp32 [T, K] and contiguous, with the given rows written over it."""
    if given is None:
        return x
    columns = x.shape[1]
    block = min(1024, triton.next_power_of_2(columns))
    _place_kernel[(len(given.rows), triton.cdiv(columns, block))](
        given.rows, given.values, x, K=columns, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return x
