"""Types whose scale is a formula of the block's extremes: the same bytes as ggml's reference quantizers.

Formulas after ggml's `quantize_row_*_ref` and the `gguf` package (`gguf.quants`); MXFP4's exponent after the OCP
Microscaling specification, floor(log2(max)) less that of the largest E2M1 value.
"""

from functools import cache

import torch
from torch import Tensor

from quengine.kernels.block_formats import MXFP4_TABLE, BlockFormat, Groups
from quengine.kernels.quantize.layout import by_number, divided


def quantize_plain(fmt: BlockFormat, rows: Tensor) -> Groups:
    """fp32 [R, K] as Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or MXFP4."""
    x = rows.reshape(-1, fmt.block)
    count = rows.shape[0]
    if fmt.name == "MXFP4":
        exponent, codes = _mxfp4(x)
        return Groups(fmt, codes.view(count, -1), exponent.view(count, -1))
    if fmt.has_min:
        d, low, codes = _from_minimum(x, (1 << fmt.bits) - 1)
        dmin = (-low.half()).view(count, -1)
        return Groups(fmt, codes.view(count, -1), d.half().view(count, -1), dmin=dmin)
    d, codes = _signed_byte(x) if fmt.name == "Q8_0" else _from_peak(x, fmt.offset)
    return Groups(fmt, codes.view(count, -1), d.half().view(count, -1))


def _first_peak(x: Tensor) -> Tensor:
    """The first element of the largest magnitude of each row: [n, block] -> [n, 1]."""
    high, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    peak = torch.where(high > -low, high, low)
    tied = (high == -low).nonzero()[:, 0]
    if len(tied):
        places = torch.arange(x.shape[1], device=x.device)
        first = torch.where(x[tied].abs() == high[tied], places, x.shape[1]).amin(1, keepdim=True)
        peak[tied] = x[tied].gather(1, first)
    return peak + 0.0  # a group of zeros has the scale of +0, whatever their signs


def _signed_byte(x: Tensor) -> tuple[Tensor, Tensor]:
    d = by_number(x.abs().amax(1, keepdim=True), 127)
    ratio = x * divided(torch.ones_like(d), d)
    magnitude = ratio.abs()
    whole = magnitude.floor()
    whole += ((magnitude - whole) * 2).floor_()  # halves away from zero
    return d, (whole * ratio.sign()).to(torch.int8)


def _from_peak(x: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """The element of the largest magnitude is -offset times d."""
    d = _first_peak(x) / -offset
    codes = x * divided(torch.ones_like(d), d) + (offset + 0.5)
    return d, codes.trunc_().clamp_(0, 2 * offset - 1).to(torch.uint8)


def _from_minimum(x: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    low = x.amin(1, keepdim=True)
    d = by_number(x.amax(1, keepdim=True) - low, top)
    codes = (x - low) * divided(torch.ones_like(d), d) + 0.5
    return d, low, codes.trunc_().clamp_(0, top).to(torch.uint8)


def _mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    magnitude = x.abs()
    peak = magnitude.amax(1, keepdim=True)
    # The logarithm is rounded to fp32 before floor, as ggml's log2f is: just below a power of two it gives that power.
    exponent = torch.where(peak > 0, peak.double().log2().float().floor() + 125, 0.0).clamp_(0, 254).int()
    scale = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    # Midpoints of neighbours are multiples of a half, and belong to the lower one.
    cells = (magnitude / scale.view(torch.float32)).mul_(2).ceil_().clamp_(0, 2 * MXFP4_TABLE[7]).int()
    codes = _mxfp4_codes().to(x.device)[cells]
    codes |= ((x < 0) & (codes > 0)).to(torch.uint8) << 3
    return exponent.to(torch.uint8), codes


@cache
def _mxfp4_codes() -> Tensor:
    """The code nearest to magnitudes in ((i - 1)/2, i/2] of the doubled E2M1 values, for each i."""
    middles = torch.arange(2 * MXFP4_TABLE[7] + 1, dtype=torch.float64) / 2 - 0.25
    distances = (middles.unsqueeze(1) - torch.tensor(MXFP4_TABLE[:8], dtype=torch.float64)).abs()
    return distances.argmin(1).to(torch.uint8)
