"""Quantized activations for q-dot on the device: int16 per group of 32, as a high and a low byte plane.

Defined in kernels/activations.py. The matrix instructions take the planes; `256*high + low` is the int16. Other
kernels use `quantize_group` to quantize a row that they compute while it is in registers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.pdl import launch_then_wait

GROUP = 32
_GROUPS_PER_BLOCK = 32


@dataclass(frozen=True)
class RmsPartials:
    """The last step of an RMSNorm (Zhang & Sennrich 2019), left to the reader of the rows: multiply row r by 1 /
    sqrt(sum(squares[r]) / K + eps). It commutes with the quantization, whose scales are relative to the row.

    squares: fp32 [T, P], sums of squares over P pieces of the row before the norm's weights.
    """

    squares: Tensor
    eps: float

    def factors(self, width: int) -> Tensor:
        """The factors 1 / sqrt(sum(squares) / width + eps) of rows of `width` values: fp32 [T, 1]."""
        return torch.rsqrt(self.squares.sum(1, keepdim=True) / width + self.eps)


@dataclass(frozen=True)
class QuantizedActivations:
    """T rows of K activations, a multiple of 32: x is about scale * (256*high + low). Rows are contiguous. With `rms`,
    the rows still have to be multiplied by its factors.

    high   int8  [T, K]
    low    int8  [T, K]
    scale  fp32  [T, K/32]  max|x| / 32639 of each group; 0 for a group of zeros
    sums   int32 [T, K/16]  sums of 16 integers (some formats have a minimum per 16 weights)
    """

    high: Tensor
    low: Tensor
    scale: Tensor
    sums: Tensor
    rms: RmsPartials | None = None

    @property
    def rows(self) -> int:
        return self.high.shape[0]

    @property
    def cols(self) -> int:
        return self.high.shape[1]

    @classmethod
    def empty(cls, rows: int, cols: int, device: torch.device | str) -> "QuantizedActivations":
        """Uninitialised activations of `rows` by `cols`. Raises ValueError if cols is not a multiple of 32."""
        if cols % GROUP:
            raise ValueError(f"activations are rounded in groups of {GROUP}; {cols} is not a multiple")
        return cls(
            torch.empty(rows, cols, dtype=torch.int8, device=device),
            torch.empty(rows, cols, dtype=torch.int8, device=device),
            torch.empty(rows, cols // GROUP, dtype=torch.float32, device=device),
            torch.empty(rows, cols // 16, dtype=torch.int32, device=device),
        )

    def ints(self) -> Tensor:
        """The integers: int16 [T, K]."""
        return self.high.to(torch.int16) * 256 + self.low.to(torch.int16)

    def dequantize(self) -> Tensor:
        """The values: fp32 [T, K]."""
        x = (self.ints().view(self.rows, -1, GROUP).float() * self.scale.unsqueeze(-1)).view(self.rows, -1)
        return x * self.rms.factors(self.cols) if self.rms else x


@triton.jit
def quantize_group(x):
    """Quantizes x fp32 [G, 32], one group per row: (high int8, low int8, both [G, 32], scale [G], sums int32
    [G, 2]).
    """
    # The bits of |x| order like the values, with NaN the largest: a NaN reaches the scale.
    peak = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(peak, 32639.0)
    live = (scale > 0)[:, None]
    ratio = tl.math.div_rn(x, tl.where(live, scale[:, None], 1.0))
    ratio = tl.where(live & (ratio == ratio), ratio, 0.0)
    ratio = tl.minimum(tl.maximum(ratio, -32639.0), 32639.0)
    # Adding 1.5 * 2^23 leaves no fraction bits: rounds to nearest even, as |ratio| < 2^22.
    value = ((ratio + 12582912.0) - 12582912.0).to(tl.int32)
    sums = tl.sum(tl.reshape(value, [value.shape[0], 2, 16]), axis=2)
    high = (value + 128) >> 8
    return high.to(tl.int8), (value - 256 * high).to(tl.int8), scale, sums


@triton.jit
def store_quantized(high_ptr, low_ptr, scale_ptr, sums_ptr, group, inside, high, low, scale, sums):
    """Stores the results of `quantize_group` as groups `group` [G] of flat planes, where `inside` [G]."""
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(high_ptr + at, high, mask=inside[:, None])
    tl.store(low_ptr + at, low, mask=inside[:, None])
    tl.store(scale_ptr + group, scale, mask=inside)
    tl.store(sums_ptr + group[:, None] * 2 + tl.arange(0, 2)[None, :], sums, mask=inside[:, None])


@triton.jit
def _quantize_kernel(
    x_ptr, high_ptr, low_ptr, scale_ptr, sums_ptr, groups, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    launch_then_wait(PDL)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = group < groups
    x = tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    high, low, scale, sums = quantize_group(x)
    store_quantized(high_ptr, low_ptr, scale_ptr, sums_ptr, group, inside, high, low, scale, sums)


def quantize_activations(
    x: Tensor, out: QuantizedActivations | None = None, pdl: bool = False
) -> QuantizedActivations:
    """Quantizes x [T, K] of any float type, contiguous, K a multiple of 32. `out` avoids the allocation.

    Raises ValueError for other shapes. `pdl`: the launch may start before its predecessor ends (sm_90 and later).
    """
    if x.ndim != 2 or not x.is_contiguous():
        raise ValueError(f"rounding takes contiguous rows [T, K], not {list(x.shape)} {list(x.stride())}")
    rounded = QuantizedActivations.empty(x.shape[0], x.shape[1], x.device) if out is None else out
    if rounded.high.shape != x.shape:
        raise ValueError(f"out holds {list(rounded.high.shape)}, not {list(x.shape)}")
    groups = x.numel() // GROUP
    _quantize_kernel[(triton.cdiv(groups, _GROUPS_PER_BLOCK),)](
        x, rounded.high, rounded.low, rounded.scale, rounded.sums, groups,
        BLOCK=_GROUPS_PER_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return rounded
