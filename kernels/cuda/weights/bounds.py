"""Bounds on the weights of a matrix: on |w|, and on the 2-norm of a row, from its scales.

The torch definition is `WeightBounds.of`. Where repacking only moves the bits of scales, a kernel computes the same
bounds from its `plain_scales`: torch's operations are twenty kernels, each of which is loaded at its first use.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat, Groups
from quengine.kernels.cuda.gemm.fragments import e8m0
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.weights.layout import TILE_ROWS

_BLOCK = 256
_HALF, _E8M0 = 0, 1
"""The kinds of d: fp16, or an exponent byte."""


class PartBounds(NamedTuple):
    """`weight_scale` and `norm` of a PackedPart."""

    scale: float
    norm: float


@dataclass(frozen=True)
class WeightBounds:
    """Bounds on weights, fp32 [2] on the device: on |w|, and on the 2-norm of a row."""

    values: Tensor

    @classmethod
    def none(cls, device: torch.device | str) -> "WeightBounds":
        """The bounds of no weights: zeros."""
        return cls(torch.zeros(2, device=device))

    @classmethod
    def of(cls, groups: Groups) -> "WeightBounds":
        bounds = _bounds(groups)
        norm = bounds.square().sum(1).mul(groups.group).sqrt().amax()
        return cls(torch.stack([bounds.amax(), norm]))

    def __or__(self, other: "WeightBounds") -> "WeightBounds":
        return WeightBounds(torch.maximum(self.values, other.values))

    def include(self, plain: Tensor, fmt: BlockFormat) -> None:
        """Extends the bounds to rows whose plain scales are `plain`, uint8 [tiles, chunks, bytes], on the device."""
        tiles, chunks, size = plain.shape
        kind = _E8M0 if fmt.layout["d"][1] - fmt.layout["d"][0] == 1 else _HALF
        _bounds_kernel[(tiles * TILE_ROWS,)](
            plain.view(torch.int16), self.values.view(torch.int32), chunks, size // (8 * TILE_ROWS), fmt.group,
            float(_largest(fmt)), float(fmt.unit), kind, int(fmt.sub_scale_bits > 0), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip

    def read(self) -> PartBounds:
        """The bounds on the host; waits for the device."""
        peak, norm = self.values.tolist()
        return PartBounds(_weight_scale(peak), norm)


def _largest(fmt: BlockFormat) -> int:
    """The largest |q| of a format's weights w = s*q - m."""
    return max(map(abs, fmt.table)) if fmt.table else max(fmt.offset, 2**fmt.bits - 1 - fmt.offset)


def _bounds(groups: Groups) -> Tensor:
    """A bound on the finite |w| of each group, fp32 [rows, groups]."""
    bound = groups.scales().abs() * _largest(groups.format)
    mins = groups.mins()
    if mins is not None:
        bound = bound + mins.abs()
    return bound.nan_to_num(0, 0, 0)


def _weight_scale(peak: float) -> float:
    """The power of two that brings `peak` into [8, 16); 1 for a matrix of zeros."""
    return 2.0 ** (4 - math.frexp(peak)[1]) if peak > 0 else 1.0


@DirectLaunch
@triton.jit(do_not_specialize=["chunks", "groups", "group_size", "kind", "has_sub"])
def _bounds_kernel(
    plain_ptr, out_ptr, chunks, groups, group_size, largest, unit, kind, has_sub, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row). groups: of a row in a chunk. Bounds are not negative, so their bits are ordered as they are."""
    row = tl.program_id(0)
    tile, in_tile = (row // 16).to(tl.int64), row % 16
    peak = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, chunks * groups, BLOCK):
        n = first + tl.arange(0, BLOCK)
        inside = n < chunks * groups
        at = plain_ptr + (((tile * chunks + n // groups) * 16 + in_tile) * groups + n % groups) * 4
        d, dmin = tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0)
        sub, sub_min = tl.load(at + 2, mask=inside, other=0), tl.load(at + 3, mask=inside, other=0)
        scale = tl.where(
            kind == 1, e8m0(d.to(tl.int32)), d.to(tl.float16, bitcast=True).to(tl.float32) * unit
        )
        scale = tl.where(has_sub != 0, scale * sub.to(tl.float32), scale)
        least = dmin.to(tl.float16, bitcast=True).to(tl.float32)
        least = tl.where(has_sub != 0, least * sub_min.to(tl.float32), least)
        bound = tl.abs(scale) * largest + tl.abs(least)
        bound = tl.where(inside & (bound < float("inf")), bound, 0.0)  # not so for NaN
        peak = tl.maximum(peak, bound)
        squares += bound * bound
    norm = tl.sqrt(tl.sum(squares, 0) * group_size)
    tl.atomic_max(out_ptr, tl.max(peak, 0).to(tl.int32, bitcast=True))
    tl.atomic_max(out_ptr + 1, norm.to(tl.int32, bitcast=True))
