"""Changes of a token embedding by LoRA adapters, added to the rows that are read from it, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.lora.low_rank import RANKS_AT_ONCE, Changes

_RANKS = tl.constexpr(RANKS_AT_ONCE)
_COLUMNS = 256


@DirectLaunch
@triton.jit(do_not_specialize=["rows"])
def _add_rows_kernel(
    x_ptr, ids_ptr, a_ptr, b_ptr, scales_ptr, rows, factor,
    K: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (row, block of columns)."""
    wait_then_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + row).to(tl.int64)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = k < K
    total = tl.zeros([COLUMNS], tl.float32)
    for adapter in range(ADAPTERS):
        scale = tl.load(scales_ptr + adapter * rows + row)
        if scale != 0.0:
            for first in range(0, RANK, _RANKS):
                rank = adapter * RANK + first + tl.arange(0, _RANKS)
                b = tl.load(b_ptr + token * (ADAPTERS * RANK) + rank).to(tl.float32) * scale
                at = a_ptr + rank[:, None].to(tl.int64) * K + k[None, :]
                a = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
                total += tl.sum(b[:, None] * a, 0)
    at = x_ptr + row * K + k
    tl.store(at, tl.load(at, mask=inside, other=0.0) + factor * total, mask=inside)


def add_row_changes(
    x: Tensor, ids: Tensor, changes: Changes, scales: Tensor, factor: float, pdl: bool = False
) -> Tensor:
    """`add_row_changes` of kernels/lora/low_rank.py, for x fp32 [T, K], contiguous, in place."""
    _, adapters, rank, cols = changes.a.shape
    rows = len(x)
    assert x.is_contiguous() and scales.is_contiguous() and scales.shape == (adapters, rows)
    _add_rows_kernel[(rows, triton.cdiv(cols, _COLUMNS))](
        x, ids, changes.a, changes.b, scales, rows, factor,
        K=cols, ADAPTERS=adapters, RANK=rank, COLUMNS=_COLUMNS, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return x
