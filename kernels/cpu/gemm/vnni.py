"""Prefill matmul on int16: K-quants, on processors that add the products of int16 pairs in int32, in one instruction
(VNNI) or in two (AVX2, still at twice the rate of fp32).

A weight is d * sc * q - dmin * m. The integers sc * q of a super-block are exact in 16 bits; d, dmin and m are
applied to the sums:

    x[k] = t * a[k],  a = round(x / t) int16, over DEPTH columns, with the smallest t for which
                      |a| <= ACTIVATION_MOST  and  the 2-norm of each half of the columns' a <= HALF_NORM
    y = sum over super-blocks of  d * t * sum(sc * q * a)  -  sum over groups of  dmin * m * t * sum(a)

The inner sums are exact int32 over at most `FLUSH` columns, which cannot overflow, then accumulated in fp32. Only x
is rounded, to 13 to 15 bits: a relative squared error of about 5e-9. An element of the result depends on its two rows
alone.

Packed activations are [K / DEPTH, blocks]; a block of `int16_tile().rows` rows and DEPTH columns has pairs of a as
int32 [DEPTH / 2, rows], in `ORDER`, then TAIL bytes for each row:
    fp32 -t * sum of a over each 32 columns | the same over each 16 columns | fp32 t | padding
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quengine.kernels.block_formats import dequantize
from quengine.kernels.cpu.gemm.tiles import DEPTH, Tile
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.target import host_target, host_tile
from quengine.kernels.quant_tensor import QuantTensor

PANEL_ROWS = 16
"""Weight rows that are unpacked at once; a panel has a multiple of them."""

ACTIVATION_MOST = 16383
HALF_NORM = 46300
"""The largest 2-norm of a over half of DEPTH columns, before rounding, which adds less than 6."""
FLUSH = {"Q2_K": 256, "Q3_K": 256, "Q4_K": 256, "Q5_K": 256, "Q6_K": 128, "IQ4_XS": 128}
"""Columns that an int32 can accumulate: the 2-norms of sc * q and of a multiply to less than 2^31."""
ORDER = (0, 2, 1, 3)
"""The order of each four columns in packed activations and in panels: unpacking yields pairs (0, 2) and (1, 3)."""

BY_32 = 0
BY_16 = 4 * DEPTH // 32
SCALE = BY_16 + 4 * DEPTH // 16
TAIL = 128
ROW_BYTES = 2 * DEPTH + TAIL
MOST_ROWS = 512  # activation rows per launch
FEW_ROWS = 32  # activation rows up to which a strip's weights are read as one run
MOST_STRIPS = 8  # per task
MOST_SUMS = 1 << 17
"""fp32 sums per task, all activation rows times its strips: on the stack and in the L2 cache."""


@dataclass
class VnniPanelArguments(Arguments):
    """One super-block of each of some weight rows, to unpack into a panel; the last row repeats to fill the strip."""

    weights: int
    row_bytes: int
    rows: int
    panel: int
    d: int
    mins: int


@cache
def int16_tile() -> Tile:
    """The tile in fp32 or int32 lanes, with 24 of 32 registers as accumulators, or 12 of 16. A taller tile would leave
    more rows unused in the last block."""
    wide = host_tile().byte_dot_lanes == 16
    return Tile(lanes=16, vectors=3, rows=8) if wide else Tile(lanes=8, vectors=2, rows=6)


@cache
def has_int16() -> bool:
    """Whether this processor multiplies int16 faster than fp32. AVX-512 without VNNI does not."""
    tile = host_tile()
    return tile.byte_dot_lanes == 16 or (tile.lanes == 8 and "+avx2" in host_target().features.split(","))


def uses_vnni(w: QuantTensor) -> bool:
    """Whether this processor multiplies the weight as int16."""
    return w.format.name in FLUSH and has_int16()


def vnni_product(x: Tensor, w: QuantTensor) -> Tensor:
    """The definition: x [T, K] fp32, rounded, times w [N, K] transposed, summed in fp64: fp64 [T, N]."""
    groups = x.double().view(x.shape[0], -1, DEPTH)
    largest = groups.abs().amax(2, keepdim=True) / ACTIVATION_MOST
    norm = groups.view(*groups.shape[:2], 2, -1).norm(dim=3).amax(2, keepdim=True) / HALF_NORM
    t = torch.maximum(largest, norm)
    rounded = (groups / t).nan_to_num(0).round() * t
    return rounded.view(x.shape) @ dequantize(w.format, w.data).double().T
