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
"""Types whose mean square of a block counts twice beside a weight's own."""
_LEAST = 1e-6
"""Least importance, as a share of the mean: a column that no activation met is still rounded to a near value."""


def error_weights(fmt: BlockFormat, rows: Tensor, x: Tensor, importance: Tensor | None) -> Tensor:
    """Weights of squared errors, fp32 in the layout of `x` = by_group(rows).

    rows        fp32 [R, K]
    importance  fp32 [R or 1, K], not negative, or None
    """
    if importance is None:
        square = x * x
        mean = total(square) / fmt.group
        if not fmt.has_min:
            return square.add_(mean)
        return x.abs() if fmt.name == "Q2_K" else x.abs().add_(root(mean))
    mean = by_number(total(importance.t().contiguous()), importance.shape[1]).unsqueeze(1)
    floored = torch.maximum(importance, mean * _LEAST)
    q = by_group(torch.where(mean > 0, floored, 1.0).expand_as(rows), fmt)
    if fmt.name == "Q6_K":
        return q
    square = x * x
    return q.mul_(root(square.add_(_mean_square(fmt, rows, square))))


def _mean_square(fmt: BlockFormat, rows: Tensor, square: Tensor) -> Tensor:
    """The mean square of each block's weights or, where blocks are 32 weights of a uniform grid, of each row's;
    [blocks]."""
    if fmt.block == fmt.group and fmt.table is None:
        columns = by_number(total((rows * rows).t().contiguous()), rows.shape[1])
        return columns.repeat_interleave(rows.shape[1] // fmt.block)
    mean = total(total(square)) / fmt.block
    return mean * 2 if fmt.name in _DOUBLED else mean
