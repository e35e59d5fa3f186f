"""What the error of a weight counts in the search for scales.

The importance of a column is the mean square of the activation that meets it (an imatrix); a larger weight counts more,
since it usually meets larger activations. With an imatrix the formulas are llama.cpp's for each type. Without one they
are its formulas for types with minimums; those without count x*x and the mean square of the group, between llama.cpp's
x*x and equal weights, so that neither error exceeds that of its search.
"""

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.quantize.layout import by_group, by_number, root, total

_DOUBLED = frozenset(
    ("Q3_K", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_S", "IQ3_XXS", "IQ3_S")
)
"""Types for which a block's mean square counts twice beside a weight's own square."""
BY_IMPORTANCE_ALONE = frozenset(("Q6_K",))
"""Types for which a larger weight counts no more."""
_LEAST = 1e-6
"""Least importance, as a share of the mean: a column that no activation met is still rounded to a near value."""


def floored(importance: Tensor) -> Tensor:
    """fp32 [R, K] without values below the least, and equal ones for rows of zeros.

    A row is multiplied by a power of two that leaves its largest below 1: the same bytes, and no sum overflows.
    """
    exponent = torch.frexp(importance.amax(1, keepdim=True)).exponent
    power = ((127 - exponent.int()).clamp(1, 254) << 23).view(torch.float32)
    importance = importance * power
    mean = by_number(total(importance.t().contiguous()), importance.shape[1]).unsqueeze(1)
    return torch.where(mean > 0, torch.maximum(importance, mean * _LEAST), 1.0)


def weighted(fmt: BlockFormat, rows: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """by_group(rows), and in its layout the weights of squared errors.

    rows        fp32 [R, K]
    importance  fp32 [R or 1, K], `floored`, or None
    """
    x = by_group(rows, fmt)
    square = x * x
    if importance is None:
        mean = total(square) / fmt.group
        if not fmt.has_min:
            return x, square.add_(mean)
        return x, x.abs() if fmt.name == "Q2_K" else x.abs().add_(root(mean))
    q = by_group(importance.expand_as(rows), fmt)
    if fmt.name in BY_IMPORTANCE_ALONE:
        return x, q
    mean = mean_square_of_rows(fmt, rows) if by_row_mean(fmt) else total(total(square)) * mean_factor(fmt)
    return x, q.mul_(root(square.add_(mean)))


def by_row_mean(fmt: BlockFormat) -> bool:
    """Whether a weight's importance uses the mean square of its row, as for blocks of 32 on a uniform grid."""
    return fmt.block == fmt.group and fmt.table is None


def mean_square_of_rows(fmt: BlockFormat, rows: Tensor) -> Tensor:
    """The mean square of each block's row, [blocks]."""
    columns = by_number(total((rows * rows).t().contiguous()), rows.shape[1])
    return columns.repeat_interleave(rows.shape[1] // fmt.block)


def mean_factor(fmt: BlockFormat) -> float:
    """The factor, a power of two, of the sum of a block's squares before it is added to one of them."""
    return (2 if fmt.name in _DOUBLED else 1) / fmt.block
