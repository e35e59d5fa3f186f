"""fp16 operands for the prefill matmul: rows scaled by powers of two so that fp16's range is no limit.

A row of activations is multiplied by 2^e so that its largest value lies in [2^13, 2^14), a weight by its part's
`gain`; both are undone in fp32 after the sum. So only the 11 bits of fp16's mantissa round anything.
Does not know: packed layouts, or which matmul reads the rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class HalfRows:
    """T rows of K activations: x is about values * unscale. values fp16 [T, K], unit inner stride; unscale fp32 [T],
    powers of two."""

    values: Tensor
    unscale: Tensor

    @classmethod
    def empty(cls, rows: int, cols: int, device: torch.device | str) -> "HalfRows":
        return cls(
            torch.empty(rows, cols, dtype=torch.float16, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    def dequantize(self) -> Tensor:
        """fp32 [T, K]."""
        return self.values.float() * self.unscale[:, None]


@triton.jit
def half_scale(peak):
    """(scale, unscale) of rows whose largest |x| has the bits `peak`, int32: 2^(13 - its exponent) and the inverse.

    Kept where neither is denormal.
    """
    exponent = tl.minimum(tl.maximum(peak >> 23, 14), 253)
    scale = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half_rows_kernel(x_ptr, half_ptr, unscale_ptr, K, half_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.int32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
        peak = tl.maximum(peak, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale, unscale = half_scale(tl.max(peak, axis=0))
    tl.store(unscale_ptr + row, unscale)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
        # The result may lie over the row itself: block n of it covers bytes of block n / 2, which has been read.
        tl.debug_barrier()
        tl.store(half_ptr + row * half_stride + k, (x * scale).to(tl.float16), mask=k < K)


def half_rows(x: Tensor, out: HalfRows | None = None) -> HalfRows:
    """Round contiguous fp32 rows [T, K] to scaled fp16."""
    rows = HalfRows.empty(x.shape[0], x.shape[1], x.device) if out is None else out
    block = min(4096, int(triton.next_power_of_2(x.shape[1])))
    _half_rows_kernel[(x.shape[0],)](
        x, rows.values, rows.unscale, x.shape[1], rows.values.stride(0), BLOCK=block, num_warps=8
    )
    return rows


def half_rows_in_place(x: Tensor, unscale: Tensor) -> HalfRows:
    """As `half_rows`, the result lying in the first half of each row of x, which is lost."""
    return half_rows(x, HalfRows(x.view(torch.float16)[:, : x.shape[1]], unscale))


@triton.jit
def _finish_kernel(
    y_ptr, unscale_ptr, residual_ptr, out_ptr, N, gain, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * N + n, mask=n < N, other=0.0) * (tl.load(unscale_ptr + row) * gain)
    if RESIDUAL:
        y += tl.load(residual_ptr + row * N + n, mask=n < N, other=0.0)
    tl.store(out_ptr + row * N + n, y, mask=n < N)


def finish(y: Tensor, unscale: Tensor, gain: float, residual: Tensor | None, out: Tensor) -> Tensor:
    """out = y * unscale / gain + residual, fp32 [T, N]; out may be y or the residual."""
    grid = (y.shape[0], triton.cdiv(y.shape[1], 1024))
    _finish_kernel[grid](
        y, unscale, y if residual is None else residual, out, y.shape[1], 1.0 / gain,
        BLOCK=1024, RESIDUAL=residual is not None, num_warps=4,
    )  # fmt: skip
    return out
