"""Prefill matmul on AMX tiles of bytes: K-quants, as integers of two bytes each.

AMX multiplies tiles of int8 at twice the rate of bf16 and accumulates int32, exactly. A weight of a super-block is
d * sc * q - dmin * m. The integers sc * q have at most 13 bits; times a power of two they fill 16, as activations do:

    x[k] = t * a[k],         a = round(x / t), at most MOST in magnitude, t of DEPTH columns of a row
    sc * q * FACTORS[type] = w,   d * sc * q = d / FACTORS[type] * w
    a = 256 * ah + al,       w = 256 * wh + wl,   all four signed bytes
    sum of w * a = 65536 * sum(ah * wh) + 256 * sum(al * wh + ah * wl)

The product of the two low bytes is below the rounding of a, and left out: an NMSE of 4e-9 for Q4_K. Types whose factor
is 256 or its negative have no low byte. Minimums take a product of bf16 tiles: m is exact in one bf16, t times the sum
of a over 16 columns is split into two. The result of a super-block is added in fp32; an element of it depends on its
two rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quengine.kernels.block_formats import unpack
from quengine.kernels.cpu.gemm.amx import has_amx, two_terms
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.target import host_target
from quengine.kernels.quant_tensor import QuantTensor

FACTORS = {"Q2_K": 256, "Q3_K": -256, "Q4_K": 32, "Q5_K": 16, "Q6_K": 4, "IQ4_XS": 8}
"""Powers of two that leave sc * q within -MOST - 128 .. MOST. In Q3_K sc * q is -128 .. 124 once negated."""
MOST = 32639  # 256 * 127 + 127: its high byte is a signed one
LEAST = 2.0**-100  # lower limit of the largest activation, so that MOST divided by it stays finite

ROWS = 16  # activation rows per block: rows of a tile
COLUMNS = 32  # weight rows per strip: columns of two tiles
STEP = 64  # columns of an operand tile
TILE_BYTES = 1024

LOW = DEPTH * ROWS
SUMS = 2 * LOW
SCALE = SUMS + TILE_BYTES
ROW_BYTES = SCALE // ROWS + 4
"""A block of packed activations: tiles of high bytes [DEPTH / STEP, ROWS, STEP], of low bytes, of t * sum(a) over each
16 columns (two bf16 terms: [ROWS, 2, 16]), then fp32 t [ROWS].
"""

MINS = 2 * DEPTH * ROWS
D = MINS + TILE_BYTES
HALF_BYTES = D + 128
"""Half a panel, 16 weight rows: tiles [DEPTH / STEP, 2 terms, STEP / 4, 16 rows, 4 columns], the tile of minimums
[16 pairs of bf16, 16 rows], then fp32 d / FACTORS * 256 and -dmin, 16 each.
"""

MOST_ROWS = 512  # activation rows per launch
FEW_ROWS = 32  # activation rows up to which a strip's weights are read as one run
MOST_STRIPS = 8  # per task
MOST_SUMS = 1 << 17
"""fp32 sums per task, all activation rows times its strips: on the stack and in the L2 cache."""


@dataclass
class BytePanelArguments(Arguments):
    """One super-block of each of some weight rows, to unpack into a panel; the last row repeats to fill the strip."""

    weights: int
    row_bytes: int
    rows: int
    panel: int


@cache
def has_amx_bytes() -> bool:
    """Whether kernels may use tiles of int8 beside those of bf16."""
    return has_amx() and "+amx-int8" in host_target().features.split(",")


def uses_amx_bytes(w: QuantTensor) -> bool:
    """Whether this processor multiplies the weight as bytes on AMX."""
    return w.format.name in FACTORS and has_amx_bytes()


def two_bytes(v: Tensor) -> tuple[Tensor, Tensor]:
    """The signed bytes of integers: v = 256 * high + low."""
    high = (v + 128) // 256
    return high, v - 256 * high


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations fp32 [T, K] as integers and their scales: fp64 [T, K / DEPTH, DEPTH] and [T, K / DEPTH, 1]."""
    groups = x.view(x.shape[0], -1, DEPTH)
    largest = groups.abs().amax(2, keepdim=True).clamp(min=LEAST)
    a = (groups * (MOST / largest)).round().clamp(-MOST, MOST)
    return a.double(), (largest * torch.tensor(1 / MOST)).double()


def byte_product(x: Tensor, w: QuantTensor) -> Tensor:
    """The definition: x [T, K] fp32, rounded, times w [N, K] transposed, summed in fp64: fp64 [T, N]."""
    groups, factor, (a, t) = unpack(w.format, w.data), FACTORS[w.format.name], rounded(x)
    assert groups.sc is not None
    ints = groups.ints().view(w.rows, -1, w.format.group).double() * groups.sc.unsqueeze(-1)
    integers = (ints * factor).view(w.rows, -1, DEPTH)
    (ah, al), (wh, wl) = two_bytes(a), two_bytes(integers)

    def sums(x_part: Tensor, w_part: Tensor) -> Tensor:
        return torch.einsum("tbk,nbk->tnb", x_part, w_part)

    products = 65536 * sums(ah, wh) + 256 * (sums(al, wh) + sums(ah, wl))
    total = (products * groups.super_scales().double() / factor * t.view(len(x), 1, -1)).sum(2)
    if groups.mn is None or groups.dmin is None:
        return total
    by_16 = (a.view(len(x), -1, DEPTH // 16, 16).sum(3) * t).float()
    high, low = two_terms(by_16)
    mins = groups.mn.view(w.rows, -1, DEPTH // w.format.group).repeat_interleave(w.format.group // 16, 2)
    added = torch.einsum("tbg,nbg->tnb", (high.double() + low.double()), mins.double())
    return total - (added * groups.dmin.double()).sum(2)
