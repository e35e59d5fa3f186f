"""The search for scales of the types without minimums: w = d*sc*q, or d*q where a block is one group.

Each group: a scale for each value that its largest weight may be rounded to, by least squares, the best of them kept.
Then the block: d from the largest scale, integers sc near s/d, and d by least squares, while the error falls.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat, Groups
from quengine.kernels.quantize.grid import Grid, grid_ends
from quengine.kernels.quantize.importance import weighted
from quengine.kernels.quantize.layout import by_number, by_row, divided, total

ROUNDS = 2


@dataclass(frozen=True)
class ScaleFit:
    """What is to be approximated: x and the weights of its squared errors, fp32 [group, groups, blocks]."""

    grid: Grid
    x: Tensor
    weights: Tensor

    def values(self, scale: Tensor) -> Tensor:
        """The nearest grid values under a scale [groups, blocks]."""
        return self.grid.nearest(self.x * divided(torch.ones_like(scale), scale))

    def error(self, scale: Tensor) -> Tensor:
        """The weighted squared error of each group, [groups, blocks]."""
        difference = self.values(scale).mul_(scale).sub_(self.x)
        return total(difference.mul_(difference).mul_(self.weights))


@dataclass(frozen=True)
class ScaleFits:
    """What a search finds for blocks in the layout of `by_group`.

    codes  uint8 [group, groups, blocks]
    d      fp16 [blocks]
    sub    int8 [groups, blocks], or None where d is the scale itself
    """

    codes: Tensor
    d: Tensor
    sub: Tensor | None


ScaleSearch = Callable[[BlockFormat, Tensor, Tensor | None], ScaleFits]
"""As `fit_scales`."""


def as_scales(fmt: BlockFormat, found: ScaleFits, count: int) -> Groups:
    """Fits of `count` rows as a type without minimums."""
    sub = None if found.sub is None else by_row(found.sub, count)
    return Groups(fmt, by_row(found.codes, count), by_row(found.d, count), sub)


def fit_scales(fmt: BlockFormat, rows: Tensor, importance: Tensor | None) -> ScaleFits:
    """The search, of fp32 rows [R, K] and their importances, fp32 [R or 1, K], `floored`, or None."""
    x, weights = weighted(fmt, rows, importance)
    fit = ScaleFit(Grid(fmt, x.device), x, weights)
    scale = _group_scales(fit, scale_targets(fmt))
    if not fmt.sub_scale_bits:
        d = _refined(fit, scale)
        return ScaleFits(_codes(fit, d.float()), d[0], None)
    d, sc = _block_scales(fit, scale, 1 << (fmt.sub_scale_bits - 1))
    return ScaleFits(_codes(fit, d.float() * sc), d, sc.to(torch.int8))


def _codes(fit: ScaleFit, scale: Tensor) -> Tensor:
    return fit.grid.codes(fit.x * divided(torch.ones_like(scale), scale))


def scale_targets(fmt: BlockFormat) -> list[float]:
    """The grid values, and values between and beyond them, that the largest weight of a group may become."""
    low, high = ends = grid_ends(fmt)
    if fmt.table is not None:
        return [end + step for end in ends for step in (-6, -4, -2, 0, 2, 4, 6)]
    if fmt.bits == 3:  # few values: what the largest weight becomes decides more
        return [low + i * 0.1 for i in range(-9, 10)] + [high + i * 0.25 for i in range(-3, 4)]
    return [low + i * 0.25 for i in range(-3, 4)] + [high + step for step in (-0.5, 0.0, 0.5)]


def _group_scales(fit: ScaleFit, targets: list[float]) -> Tensor:
    """The scale of least squares for the best of `targets`, [groups, blocks]."""
    high, low = fit.x.amax(0), fit.x.amin(0)
    peak = torch.where(high > -low, high, low)
    inverse = divided(torch.ones_like(peak), peak)
    weighted = fit.weights * fit.x
    best = torch.full_like(peak, -1.0)
    scale = torch.zeros_like(peak)
    for target in targets:
        q = fit.grid.nearest(fit.x * (inverse * target))
        dot = total(weighted * q)
        square = total(q.mul_(q).mul_(fit.weights))
        here = divided(dot, square)
        gain = here * dot
        better = gain > best
        best = torch.where(better, gain, best)
        scale = torch.where(better, here, scale)
    return scale


def _least_squares(fit: ScaleFit, sc: Tensor | None, scale: Tensor) -> Tensor:
    """d of least squares for the values that a scale gives: [blocks], or [1, blocks] without sub-scales."""
    q = fit.values(scale)
    dot, square = total(fit.weights * fit.x * q), total(q * q * fit.weights)
    if sc is None:
        return divided(dot, square)
    return divided(total(dot * sc), total(square * sc * sc))


def _refined(fit: ScaleFit, scale: Tensor) -> Tensor:
    """d of blocks of one group, fp16 [1, blocks]."""
    d = scale.half()
    error = fit.error(d.float())
    for _ in range(ROUNDS):
        other = _least_squares(fit, None, d.float()).half()
        there = fit.error(other.float())
        d = torch.where(there < error, other, d)
        error = torch.minimum(error, there)
    return d


def _block_scales(fit: ScaleFit, scale: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """d fp16 [blocks] and the integers sc as fp32 [groups, blocks], from -limit to limit - 1."""
    d = _common_unit(scale, total(fit.weights * fit.x * fit.x), limit)
    sc = _integers(scale, d, limit)
    error = fit.error(d.float() * sc)
    for _ in range(ROUNDS):
        for step in (-1, 1):
            other = (sc + step).clamp_(-limit, limit - 1)
            there = fit.error(d.float() * other)
            sc = torch.where(there < error, other, sc)
            error = torch.minimum(error, there)
        moved = _least_squares(fit, sc, d.float() * sc).half()
        there = fit.error(moved.float() * sc)
        better = total(there) < total(error)
        d = torch.where(better, moved, d)
        error = torch.where(better, there, error)
    return d, sc


def _common_unit(scale: Tensor, weights: Tensor, limit: int) -> Tensor:
    """fp16 [blocks] d: multiples of d from -limit to limit - 1 are near the scales [groups, blocks].

    A scale's squared error, relative to it, counts as much as the weighted squares of its group.
    """
    high, low = scale.amax(0), scale.amin(0)
    peak = torch.where(high > -low, high, low)
    weights = divided(weights, scale * scale)
    unit, best = by_number(peak, -limit).half(), torch.full_like(peak, torch.inf)
    for target in unit_targets(limit):
        steps = _integers(scale, by_number(peak, target).half(), limit)
        here = divided(total(steps * scale * weights), total(steps * steps * weights)).half()
        difference = here.float() * steps - scale
        error = total(difference * difference * weights)
        unit, best = torch.where(error < best, here, unit), torch.minimum(error, best)
    return unit


def unit_targets(limit: int) -> tuple[float, ...]:
    """What the largest scale of a block may be as a multiple of d."""
    return (-limit - 0.4, -limit - 0.2, -limit, -limit + 0.3, -limit + 0.6, limit - 1.0, limit - 1.3)


def _integers(scale: Tensor, unit: Tensor, limit: int) -> Tensor:
    return (scale * divided(torch.ones_like(scale[0]), unit.float())).round_().clamp_(-limit, limit - 1)
