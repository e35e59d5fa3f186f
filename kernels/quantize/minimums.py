"""Finds scales and minimums for blocks of weights: w = d*sc*q - dmin*mn, or w = d*q - dmin where a block is one group.

1. Each group: least squares gives a scale and a minimum for codes of several ranges, of which the best are kept.
2. Each block: d and dmin, near whose multiples the groups' scales and minimums lie, and these multiples, sc and mn.
3. The integers, then d and dmin, are improved in turns, where that lowers the error.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat, Groups
from quengine.kernels.quantize.importance import weighted
from quengine.kernels.quantize.layout import by_number, by_row, divided, total

ROUNDS = 2


@dataclass(frozen=True)
class RangeFit:
    """The blocks to approximate: x, and the weights of its squared errors, fp32 [group, groups, blocks].

    `top` is the largest code. `weighted` is weights times x; `sum_w` and `sum_x` are each group's sums of the weights
    and of `weighted`.
    """

    top: int
    x: Tensor
    weights: Tensor
    weighted: Tensor
    sum_w: Tensor
    sum_x: Tensor

    def values(self, scale: Tensor, low: Tensor) -> Tensor:
        """The codes q, as fp32, for which scale*q - low is nearest to x. scale, low: [groups, blocks]."""
        ratio = (self.x + low).mul_(divided(torch.ones_like(scale), scale))
        return ratio.round_().clamp_(0, self.top)

    def error(self, scale: Tensor, low: Tensor) -> Tensor:
        """The weighted squared error of each group, [groups, blocks]."""
        difference = self.values(scale, low).mul_(scale).sub_(low).sub_(self.x)
        return total(difference.mul_(difference).mul_(self.weights))

    def moments(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each group's weighted sums of q, q*q and q*x."""
        first = self.weights * q
        sum_q = total(first)
        return sum_q, total(first.mul_(q)), total(self.weighted * q)


def fit_of(top: int, x: Tensor, weights: Tensor) -> RangeFit:
    weighted = weights * x
    return RangeFit(top, x, weights, weighted, total(weights), total(weighted))


@dataclass(frozen=True)
class RangeFits:
    """The result of a search, for blocks in the layout of `by_group`.

    codes         uint8 [group, groups, blocks]
    d, dmin       fp16 [blocks]
    sub, sub_min  uint8 [groups, blocks], or None where d and dmin are scale and minimum themselves
    """

    codes: Tensor
    d: Tensor
    dmin: Tensor
    sub: Tensor | None
    sub_min: Tensor | None


RangeSearch = Callable[[BlockFormat, Tensor, Tensor | None], RangeFits]
"""As `fit_ranges`."""


def as_ranges(fmt: BlockFormat, found: RangeFits, count: int) -> Groups:
    """The blocks of `count` rows in a type with minimums, from what a search has found."""
    sub, sub_min = (None if each is None else by_row(each, count) for each in (found.sub, found.sub_min))
    d, dmin = by_row(found.d, count), by_row(found.dmin, count)
    return Groups(fmt, by_row(found.codes, count), d, sub, dmin, sub_min)


def fit_ranges(fmt: BlockFormat, rows: Tensor, importance: Tensor | None) -> RangeFits:
    """Finds scales and minimums for fp32 rows [R, K]. importance: fp32 [R or 1, K], `floored`, or None (`weighted`)."""
    x, weights = weighted(fmt, rows, importance)
    fit = fit_of((1 << fmt.bits) - 1, x, weights)
    scale, low = _group_fits(fit, widenings(fmt))
    if not fmt.sub_scale_bits:
        d, dmin = _refined(fit, scale, low)
        return RangeFits(_codes(fit, d.float(), dmin.float()), d[0], dmin[0], None, None)
    d, dmin, sc, mn = _block_fits(fit, scale, low, (1 << fmt.sub_scale_bits) - 1)
    codes = _codes(fit, d.float() * sc, dmin.float() * mn)
    return RangeFits(codes, d, dmin, sc.to(torch.uint8), mn.to(torch.uint8))


def _codes(fit: RangeFit, scale: Tensor, low: Tensor) -> Tensor:
    return fit.values(scale, low).to(torch.uint8)


def widenings(fmt: BlockFormat) -> list[float]:
    """Trial ranges: by how much the code of a group's largest weight exceeds the largest code, before it is clamped."""
    if not fmt.sub_scale_bits:
        return [i * 0.05 for i in range(-20, 21)]
    return [i * 0.1 for i in range(-9, 10)] if fmt.bits == 2 else [i * 0.2 for i in range(-5, 6)]


def _group_fits(fit: RangeFit, wider: list[float]) -> tuple[Tensor, Tensor]:
    """The scale and the negated minimum that least squares gives for the best range, neither negative: [groups, blocks]
    each."""
    least = fit.x.amin(0).clamp_(max=0) + 0.0  # of zeros +0, whatever their signs, and so below
    span = fit.x.amax(0) - least + 0.0
    inverse = divided(torch.ones_like(span), span)
    shifted = fit.x - least
    best = torch.full_like(span, -torch.inf)
    scale, low = by_number(span, fit.top), -least
    for widening in wider:
        q = (shifted * (inverse * (fit.top + widening))).round_().clamp_(0, fit.top)
        here, there = _solved(fit, *(moments := fit.moments(q)))
        gain = here * moments[2] - there * fit.sum_x
        better = (gain > best) & (span > 0)
        best = torch.where(better, gain, best)
        scale, low = torch.where(better, here, scale), torch.where(better, there, low)
    return scale, low


def _solved(fit: RangeFit, sum_q: Tensor, sum_qq: Tensor, sum_qx: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the negated minimum of least squares for codes with these moments. A minimum above 0 becomes 0."""
    determinant = fit.sum_w * sum_qq - sum_q * sum_q
    low = divided(sum_q * sum_qx - sum_qq * fit.sum_x, determinant)
    scale = divided(fit.sum_w * sum_qx - sum_q * fit.sum_x, determinant)
    alone = (low < 0) | (determinant <= 0)
    return torch.where(alone, divided(sum_qx, sum_qq), scale), torch.where(alone, 0.0, low)


NEIGHBOURS = ((1, 0), (-1, 0), (0, 1), (0, -1))
"""Steps of (d, dmin), in units of fp16's last bit, tried around the least-squares solution of blocks of one group."""
LARGEST_BITS = 0x7BFF
"""The bits of the largest finite fp16."""


def _refined(fit: RangeFit, scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """d and dmin of blocks of one group, fp16 [1, blocks]."""
    found = scale.half(), low.half()
    error = fit.error(found[0].float(), found[1].float())
    for _ in range(ROUNDS):
        q = fit.values(found[0].float(), found[1].float())
        scale, low = _solved(fit, *fit.moments(q))
        found, error = _better(fit, found, error, (scale.half(), low.half()))
    for steps in NEIGHBOURS:
        moved = _moved(found[0], steps[0]), _moved(found[1], steps[1])
        found, error = _better(fit, found, error, moved)
    return found


def _moved(half: Tensor, step: int) -> Tensor:
    """fp16 >= 0, moved by so many units of the last bit, but not below 0."""
    return (half.view(torch.int16) + step).clamp_(0, LARGEST_BITS).view(torch.float16)


def _better(
    fit: RangeFit, found: tuple[Tensor, Tensor], error: Tensor, other: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """For each group the other (d, dmin) where its error is less, and the less of the errors."""
    there = fit.error(other[0].float(), other[1].float())
    better = there < error
    d, dmin = (torch.where(better, new, old) for new, old in zip(other, found, strict=True))
    return (d, dmin), torch.minimum(error, there)


def _block_fits(
    fit: RangeFit, scale: Tensor, low: Tensor, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d and dmin, fp16 [blocks], and the integers sc and mn from 0 to limit, as fp32 [groups, blocks]."""
    d, dmin = common_unit(scale, fit.sum_w, limit), common_unit(low, fit.sum_w, limit)
    sc, mn = _integers(scale, d, limit), _integers(low, dmin, limit)
    error = fit.error(d.float() * sc, dmin.float() * mn)
    for _ in range(ROUNDS):
        sc, mn, error = _better_integers(fit, d.float(), dmin.float(), (sc, mn, error), limit)
        other, other_min = _solved_block(fit, sc, mn, d.float(), dmin.float())
        there = fit.error(other.float() * sc, other_min.float() * mn)
        better = total(there) < total(error)
        d, dmin = torch.where(better, other, d), torch.where(better, other_min, dmin)
        error = torch.where(better, there, error)
    return d, dmin, sc, mn


def common_unit(values: Tensor, weights: Tensor, limit: int) -> Tensor:
    """The unit, fp16 [blocks], whose multiples from 0 to limit come nearest to the values [groups, blocks], in weighted
    squares."""
    largest = values.amax(0)
    unit, best = by_number(largest, limit).half(), torch.full_like(largest, torch.inf)
    for top in unit_tops(limit):
        here = by_number(largest, top).half()
        steps = _integers(values, here, limit)
        here = divided(total(steps * values * weights), total(steps * steps * weights)).half()
        difference = here.float() * steps - values
        error = total(difference * difference * weights)
        unit, best = torch.where(error < best, here, unit), torch.minimum(error, best)
    return unit


def unit_tops(limit: int) -> tuple[float, ...]:
    """For each trial unit, the multiple of it, not always whole, that the largest value of a block is."""
    return (limit - 0.4, limit - 0.2, limit, limit + 0.2, limit + 0.4, limit + 0.6)


def _integers(values: Tensor, unit: Tensor, limit: int) -> Tensor:
    return (values * divided(torch.ones_like(values[0]), unit.float())).round_().clamp_(0, limit)


def _better_integers(
    fit: RangeFit, d: Tensor, dmin: Tensor, found: tuple[Tensor, Tensor, Tensor], limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tries each group's scale and its two neighbours, with the minimum that least squares gives their codes. Returns
    the best sc and mn, and their errors."""
    sc, mn, error = found
    first, first_min = sc, mn
    for step in (0, -1, 1):
        other = (first + step).clamp_(0, limit)
        scale = d * other
        sum_q = total(fit.values(scale, dmin * first_min).mul_(fit.weights))
        minimum = divided(scale * sum_q - fit.sum_x, fit.sum_w)
        other_min = _integers(minimum, dmin, limit)
        there = fit.error(scale, dmin * other_min)
        better = there < error
        sc, mn = torch.where(better, other, sc), torch.where(better, other_min, mn)
        error = torch.minimum(error, there)
    return sc, mn, error


def _solved_block(fit: RangeFit, sc: Tensor, mn: Tensor, d: Tensor, dmin: Tensor) -> tuple[Tensor, Tensor]:
    """The d and dmin that least squares gives the codes under these scales, fp16 [blocks]; the given ones where least
    squares has no solution with d > 0 and dmin >= 0."""
    sum_q, sum_qq, sum_qx = fit.moments(fit.values(d * sc, dmin * mn))
    qq, qm = total(sc * sc * sum_qq), total(sc * mn * sum_q)
    mm, qx, mx = total(mn * mn * fit.sum_w), total(sc * sum_qx), total(mn * fit.sum_x)
    determinant = qq * mm - qm * qm
    both = determinant > 0
    other = torch.where(both, divided(mm * qx - qm * mx, determinant), divided(qx, qq))
    other_min = torch.where(both, divided(qm * qx - qq * mx, determinant), 0.0)
    good = (other > 0) & (other_min >= 0)
    return torch.where(good, other, d).half(), torch.where(good, other_min, dmin).half()
