"""Weights with the elements of a group first, so that sums over groups are elementwise operations.

Every sum here adds halves, in an order that the group's size alone decides. With nothing but elementwise IEEE
operations besides, a quantizer gives the same bytes on every device and for every number of threads.
"""

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat


def by_group(rows: Tensor, fmt: BlockFormat) -> Tensor:
    """Rows [R, K] as [group, groups of a block, R * K/block], contiguous."""
    return rows.reshape(-1, fmt.block // fmt.group, fmt.group).permute(2, 1, 0).contiguous()


def by_row(values: Tensor, rows: int) -> Tensor:
    """The inverse for codes [group, groups, blocks] and, with their first dimension left out, for scales: [R, n]."""
    return values.permute(*range(values.dim() - 1, -1, -1)).reshape(rows, -1)


def total(values: Tensor) -> Tensor:
    """The sum over the first dimension of fp32 [n, ...]."""
    if values.shape[0] == 1:
        return values[0]
    half = values.shape[0] // 2
    sums, rest = values[:half] + values[half : 2 * half], values[2 * half :]
    while half > 1:
        half, odd = half // 2, half % 2
        if odd:
            rest = torch.cat([rest, sums[2 * half : 2 * half + 1]])
        sums[:half] += sums[half : 2 * half]
    return sums[0].clone() if not len(rest) else sums[0] + total(rest)


def by_number(numerator: Tensor, number: float) -> Tensor:
    """The quotient, rounded once. On CUDA torch multiplies by the reciprocal of a Python number, which rounds twice."""
    return numerator / numerator.new_full((), number)


def root(values: Tensor) -> Tensor:
    """The square root of fp32, rounded once. A CPU's fp32 roots may be off by a bit (torch takes them from MKL's vector
    library), and a root in double precision is never so near a midpoint of fp32 that its own error matters."""
    return values.double().sqrt_().float()


def divided(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, 0 where the denominator is 0."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)
