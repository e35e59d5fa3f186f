"""The values that codes of a type stand for, before their scale: rounding to the nearest one."""

from functools import cache

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat

_HALVES = 256
"""Values of tables lie in [-_HALVES / 2, _HALVES / 2), midpoints between them on multiples of 1/2."""


class Grid:
    """The integers low to high, or a table's; `ends` are the outermost, the negative one first."""

    def __init__(self, fmt: BlockFormat, device: torch.device) -> None:
        self._offset = fmt.offset
        self._indices: Tensor | None = None
        self.ends = grid_ends(fmt)
        if fmt.table is None:
            return
        self._indices = _nearest_index(fmt.table).to(device)
        self._values = torch.tensor(fmt.table, dtype=torch.float32, device=device)

    def nearest(self, ratio: Tensor) -> Tensor:
        """The nearest value of each ratio x/scale, fp32; `ratio` is overwritten."""
        if self._indices is None:
            return ratio.round_().clamp_(*self.ends)
        return self._values[self._indices[_cell(ratio)].int()]

    def codes(self, ratio: Tensor) -> Tensor:
        """The stored codes of `nearest`, uint8."""
        if self._indices is None:
            return (self.nearest(ratio) + self._offset).to(torch.uint8)
        return self._indices[_cell(ratio)]


def grid_ends(fmt: BlockFormat) -> tuple[float, float]:
    """The outermost values of a type, the negative one first."""
    if fmt.table is None:
        return -float(fmt.offset), float((1 << fmt.bits) - 1 - fmt.offset)
    return float(fmt.table[0]), float(fmt.table[-1])


def _cell(ratio: Tensor) -> Tensor:
    return ratio.mul_(2).floor_().clamp_(-_HALVES, _HALVES - 1).add_(_HALVES).int()


@cache
def _nearest_index(table: tuple[int, ...]) -> Tensor:
    """The index of the value nearest to each half unit [i/2, (i+1)/2); the upper one at a midpoint."""
    centres = torch.arange(-_HALVES, _HALVES, dtype=torch.float64) / 2 + 0.25
    distances = (centres.unsqueeze(1) - torch.tensor(table, dtype=torch.float64)).abs()
    return distances.argmin(1).to(torch.uint8)
