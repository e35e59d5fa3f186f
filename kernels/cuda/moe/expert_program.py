"""What the kernels of a mixture of experts share in decode: rows and their experts, and the memory they reuse."""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.gemv.matvec_program import MatvecProgram, QuantizationScratch, QuantizedRow
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.weights.launch_table import Geometry
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.moe.router import Routing

_LEAST_ROWS = 8


@triton.jit
def row_at(x, index, squares, COLS: tl.constexpr):
    """Row `index` of quantized activations [n, COLS] whose first row is `x`; squares: of the row."""
    return QuantizedRow(
        x.high + index * COLS,
        x.low + index * COLS,
        x.scale + index * (COLS // 32),
        x.sums + index * (COLS // 16),
        squares,
        x.eps,
    )


def expert_program(
    part: PackedPart, tiles: int, geometry: Geometry, x: QuantizedActivations, pdl: bool
) -> MatvecProgram:
    """The program of one expert's `tiles` tiles in a part."""
    program = MatvecProgram.of(part, geometry, x, pdl)
    return replace(program, even=tiles % geometry.tiles == 0 and part.chunks % geometry.k_warps == 0)


def check_rows(x: QuantizedActivations, weights: ExpertWeights, rows: int) -> None:
    """Raises ValueError where x is not `rows` rows of the weights' width."""
    if (x.rows, x.cols) != (rows, weights.cols):
        raise ValueError(f"activations are {[x.rows, x.cols]}, for these experts {[rows, weights.cols]}")


def check_routing(routing: Routing, weights: ExpertWeights) -> None:
    """Raises ValueError where the routing is not contiguous int32 and fp32 [T, k], k no more than the experts."""
    experts, factors = routing.experts, routing.weights
    fits = experts.ndim == 2 and experts.shape == factors.shape and experts.shape[1] <= weights.count
    kinds = (experts.dtype, factors.dtype) == (torch.int32, torch.float32)
    if not (fits and kinds and experts.is_contiguous() and factors.is_contiguous()):
        raise ValueError(
            f"a routing is contiguous int32 and fp32 [T, k], k up to {weights.count}, not {experts.dtype} "
            f"{list(experts.shape)} and {factors.dtype} {list(factors.shape)}"
        )


class GrowingScratch:
    """Memory for launches of up to so many rows, made by `allocate(rows)` in steps of powers of two.

    All that was made is kept: a captured graph may write to it. Each launch of the stream uses it only after the one
    before it has ended.
    """

    def __init__(self, allocate: Callable[[int], QuantizationScratch]) -> None:
        self._allocate = allocate
        self._kept: dict[int, QuantizationScratch] = {}

    def of(self, rows: int) -> QuantizationScratch:
        capacity = max(_LEAST_ROWS, triton.next_power_of_2(rows))
        if capacity not in self._kept:
            self._kept[capacity] = self._allocate(capacity)
        return self._kept[capacity]


def plain_rows(rows: int, width: int, device: torch.device) -> Tensor:
    """fp32 [rows, width], not filled."""
    return torch.empty(rows, width, dtype=torch.float32, device=device)
