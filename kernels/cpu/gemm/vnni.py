"""Matmul of many rows on int16: of K-quants, where the processor adds products of pairs to an int32.

A weight is d * sc * q - dmin * m. The integers sc * q of a super-block are exact in 16 bits, and d, dmin and m are left
to the sums:

    x[k] = t * a[k],  a = round(x / t) int16, over DEPTH columns, with the smallest t for which
        |a| <= ACTIVATION_MOST  and  |a|, as a vector of half of the columns, <= HALF_NORM
    y = sum over super-blocks of  d * t * sum(sc * q * a)  -  sum over groups of  dmin * m * t * sum(a)

The inner sums are exact int32, over as many columns as cannot overflow in the end (`FLUSH`), then added up in fp32.
What is rounded is x, to 13 to 15 bits: about 5e-9 of its squared size. A result depends on its two rows alone.

Packed activations, of each block of TILE.rows rows and DEPTH columns, [K / DEPTH, blocks]: pairs of a, int32
[DEPTH / 2, rows], in `ORDER`, then for each row TAIL bytes:
    fp32 -t * sum of a, of each 32 columns | the same of each 16 columns | fp32 t | padding
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import dequantize
from quengine.kernels.cpu.gemm.tiles import DEPTH, Tile
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.quant_tensor import QuantTensor

TILE = Tile(lanes=16, vectors=3, rows=8)
"""Of fp32 lanes, or int32 ones: 24 sums in registers, and fewer rows left over than a taller tile would have."""

ACTIVATION_MOST = 16383
HALF_NORM = 46300
"""The most that the squares of a come to in half of DEPTH columns, as a root; rounding adds less than 6."""
FLUSH = {"Q2_K": 256, "Q3_K": 256, "Q4_K": 256, "Q5_K": 256, "Q6_K": 128, "IQ4_XS": 128}
"""Columns whose products an int32 holds: the roots of the squares of sc * q and of a, multiplied, are below 2^31."""
ORDER = (0, 2, 1, 3)
"""Of each four columns, in packed activations and in panels: pairs of those that unpacking leaves side by side."""

BY_32 = 0
BY_16 = 4 * DEPTH // 32
SCALE = BY_16 + 4 * DEPTH // 16
TAIL = 128
ROW_BYTES = 2 * DEPTH + TAIL
MOST_ROWS = 512  # of activations in one launch
FEW_ROWS = 32  # of activations, up to which a strip's weights are read as one run
MOST_STRIPS = 8  # of a task
MOST_SUMS = 1 << 17
"""fp32 of a task: of all rows of activations and some strips, on the stack and in the L2 cache."""


@dataclass
class VnniPanelArguments(Arguments):
    """Weight rows from some super-block on, one of each, as a panel; the last row is repeated."""

    weights: int
    row_bytes: int
    rows: int
    panel: int
    d: int
    mins: int


def uses_vnni(w: QuantTensor) -> bool:
    """Whether a weight can be multiplied so on this processor."""
    return host_tile().byte_dot_lanes == TILE.lanes and w.format.name in FLUSH


def vnni_product(x: Tensor, w: QuantTensor) -> Tensor:
    """The definition: x [T, K] fp32 times w [N, K], transposed: fp64 [T, N], whose sums are not rounded."""
    groups = x.double().view(x.shape[0], -1, DEPTH)
    largest = groups.abs().amax(2, keepdim=True) / ACTIVATION_MOST
    norm = groups.view(*groups.shape[:2], 2, -1).norm(dim=3).amax(2, keepdim=True) / HALF_NORM
    t = torch.maximum(largest, norm)
    rounded = (groups / t).nan_to_num(0).round() * t
    return rounded.view(x.shape) @ dequantize(w.format, w.data).double().T
