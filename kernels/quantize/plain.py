"""Types whose scale is a formula of the block's extremes: the same bytes as ggml's reference quantizers.

Formulas after ggml's `quantize_row_*_ref` and the `gguf` package (`gguf.quants`); MXFP4's exponent after the OCP
Microscaling specification, floor(log2(max)) less that of the largest E2M1 value. Ternary types take the largest
magnitude for 1, as the weights of models that were trained with three values are.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from quengine.kernels.block_formats import MXFP4_TABLE, BlockFormat, Groups, e4m3_half
from quengine.kernels.quantize.layout import by_number, divided
from quengine.kernels.quantize.pack import pack


def plain_blocks(fmt: BlockFormat, rows: Tensor) -> Tensor:
    """fp32 [R, K] as blocks of one of `FORMULAS`: uint8 [R, row_bytes]."""
    return pack(FORMULAS[fmt.name](fmt, rows.reshape(-1, fmt.block), len(rows)))


PlainBlocks = Callable[[BlockFormat, Tensor], Tensor]
"""As `plain_blocks`."""


def _quantize_mxfp4(fmt: BlockFormat, x: Tensor, count: int) -> Groups:
    exponent, codes = _mxfp4(x)
    return Groups(fmt, codes.view(count, -1), exponent.view(count, -1))


def _quantize_nvfp4(fmt: BlockFormat, x: Tensor, count: int) -> Groups:
    scale, codes = _nvfp4(x.view(-1, fmt.group))
    return Groups(fmt, codes.view(count, -1), scale.view(count, -1))


def _quantize_minimum(fmt: BlockFormat, x: Tensor, count: int) -> Groups:
    d, low, codes = _from_minimum(x, (1 << fmt.bits) - 1)
    return Groups(fmt, codes.view(count, -1), d.half().view(count, -1), dmin=(-low.half()).view(count, -1))


def _with_scale(quantized: Callable[[BlockFormat, Tensor], tuple[Tensor, Tensor]]) -> "Formula":
    """The formula of a function that gives d fp32 [n, 1] and codes [n, block] for x [n, block]."""

    def formula(fmt: BlockFormat, x: Tensor, count: int) -> Groups:
        d, codes = quantized(fmt, x)
        return Groups(fmt, codes.view(count, -1), d.half().view(count, -1))

    return formula


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


def _half_away(ratio: Tensor) -> Tensor:
    """Rounded to the nearest integer, halves away from zero."""
    magnitude = ratio.abs()
    whole = magnitude.floor()
    whole += ((magnitude - whole) * 2).floor_()
    return whole * ratio.sign()


def _of_largest(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each row is `top` times d [n, 1]; the integers of x, fp32."""
    d = by_number(x.abs().amax(1, keepdim=True), top)
    return d, _half_away(x * divided(torch.ones_like(d), d))


def _signed_byte(_fmt: BlockFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    d, q = _of_largest(x, 127)
    return d, q.to(torch.int8)


def _ternary(_fmt: BlockFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    d, q = _of_largest(x, 1)
    return d, (q.clamp_(-1, 1) + 1).to(torch.uint8)


def _signs(fmt: BlockFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    """d is the mean magnitude, its sum in the order of the weights."""
    sums = torch.zeros_like(x[:, 0])
    for column in x.abs().unbind(1):
        sums = sums + column
    return by_number(sums, fmt.block).unsqueeze(1), (x >= 0).to(torch.uint8)


def _from_peak(fmt: BlockFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    """The element of the largest magnitude is -offset times d."""
    d = _first_peak(x) / -fmt.offset
    codes = x * divided(torch.ones_like(d), d) + (fmt.offset + 0.5)
    return d, codes.trunc_().clamp_(0, 2 * fmt.offset - 1).to(torch.uint8)


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


def _nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """The scale, in unsigned E4M3, takes the largest magnitude to that of E2M1, 6: uint8 [n, 1] and codes [n, 16]."""
    magnitude = x.abs()
    scale = _unsigned_e4m3(by_number(magnitude.amax(1, keepdim=True), 6))
    step = e4m3_half(scale)
    best, codes = magnitude, torch.zeros_like(x, dtype=torch.uint8)
    for code in range(1, 8):  # of two that are as near the lower one
        distance = (step * MXFP4_TABLE[code] - magnitude).abs_()
        codes = torch.where(distance < best, code, codes)
        best = torch.minimum(distance, best)
    return scale, codes | ((x < 0) & (codes > 0)).to(torch.uint8) << 3


def _unsigned_e4m3(values: Tensor) -> Tensor:
    """The nearest number of E4M3 for fp32 >= 0, halves up; 448 for what is more."""
    normal = ((values.view(torch.int32) + (1 << 19)) >> 20) - ((127 - 7) << 3)
    small = (values * 512 + 0.5).clamp(max=7).int()
    return torch.where(values < 2.0**-6, small, torch.where(normal >= 120, 0x7E, normal)).to(torch.uint8)


Formula = Callable[[BlockFormat, Tensor, int], Groups]
FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        "Q8_0": _with_scale(_signed_byte),
        "Q4_0": _with_scale(_from_peak),
        "Q5_0": _with_scale(_from_peak),
        "Q4_1": _quantize_minimum,
        "Q5_1": _quantize_minimum,
        "MXFP4": _quantize_mxfp4,
        "NVFP4": _quantize_nvfp4,
        "TQ1_0": _with_scale(_ternary),
        "TQ2_0": _with_scale(_ternary),
        "Q2_0": _with_scale(_ternary),
        "Q1_0": _with_scale(_signs),
    }
)
"""(format, weights fp32 [n, block] in blocks, number of rows) -> the quantized blocks."""
