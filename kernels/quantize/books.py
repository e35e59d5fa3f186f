"""Finds codebook entries and scales for blocks of weights: w = d*(2n + 1)*q, where q is the values of an entry, with
signs, or in IQ1 with an eighth added or taken away.

1. Each group: the nearest entries under several trial scales. Those are kept that come nearest with the scale that
   least squares gives them.
2. Each block: d, and for each group an odd multiple of it near the group's scale. Then the nearest entries under these
   scales.
3. Once more, with the d and the multiples that least squares gives those entries. The result is kept where the block's
   error falls.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat, Groups, from_book
from quengine.kernels.quantize.entries import EntryBook, NearestEntries, nearest_entries
from quengine.kernels.quantize.importance import weighted
from quengine.kernels.quantize.layout import by_number, by_row, divided, root, total

EVEN = frozenset(("IQ2_XXS", "IQ2_XS", "IQ3_XXS"))
"""Types with an even number of negative signs in each eight weights."""
SPREADS = (0.85, 1.1)
"""Trial scales of a group: this multiple of the scale that gives the codebook the group's root mean square."""
PEAKS = (0.85, 1.0)
"""Further trial scales: this multiple of the one that gives the codebook's largest value the group's largest weight.
IQ1 has none, as its values are all near -1, 0 and 1."""
UNIT_STEPS = range(-12, 5)
"""Trial values of d: by how many halves of d the largest scale of a block lies above the largest odd multiple of d."""


@dataclass(frozen=True)
class BookFits:
    """The result of a search, for blocks in the layout of `by_group`.

    index  integers [vectors of a group, groups, blocks]: numbers of entries
    signs  uint8 [group / 8, groups, blocks]: a bit for each negative weight; IQ1 does not use it
    d      fp16 [blocks]
    sub    uint8 [groups, blocks]: n of the multiples 2n + 1 of d
    """

    index: Tensor
    signs: Tensor
    d: Tensor
    sub: Tensor


@dataclass(frozen=True)
class _Fit:
    """Entries of M groups, found under a scale for each group.

    index   int64 [vectors of a group, M]
    target  fp32 [group, M]: what the entries' values times the scale approximate; magnitudes where a format stores
            signs apart
    error, dot, square
            fp32 [M]: weighted sums of the squared error, of target times value, and of the squared values
    """

    index: Tensor
    target: Tensor
    error: Tensor
    dot: Tensor
    square: Tensor

    def or_else(self, other: "_Fit", better: Tensor) -> "_Fit":
        """This fit in the groups where `better`, bool [M], is true, and the other fit elsewhere."""
        return _Fit(
            *(torch.where(better, a, b) for a, b in zip(self._tensors(), other._tensors(), strict=True))
        )

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.index, self.target, self.error, self.dot, self.square


class _Groups:
    """The groups to approximate: x, and the weights of its squared errors, fp32 [group, M]."""

    def __init__(self, fmt: BlockFormat, x: Tensor, weights: Tensor, entries: NearestEntries) -> None:
        self._entries = entries
        self.book = EntryBook(fmt, x.device)
        self.x, self.weights = x, weights
        self.vectors = x.shape[0] // fmt.width
        self._same_eighth = fmt.name == "IQ1_S"  # for all vectors of a group
        self._magnitude = x if fmt.book == "IQ1" else x.abs()
        self._odd: Tensor | None = None
        if fmt.name in EVEN:
            self._odd = ((x < 0).view(-1, 8, x.shape[1]).sum(1, keepdim=True) & 1).bool()

    def _values(self, index: Tensor) -> Tensor:
        """The values of entries [vectors, M], in the order of the weights: fp32 [group, M]."""
        found = self.book.numbers(index.reshape(-1)).view(self.book.width, self.vectors, -1)
        return found.transpose(0, 1).reshape(self.x.shape)

    def target(self, q: Tensor | None) -> Tensor:
        """The magnitudes of x. Where a format needs an even number of negative signs in eight weights and x has an odd
        one, the sign that costs least is turned: that magnitude is negative. q: the values of the entries; None: there
        are none yet."""
        if self._odd is None:
            return self._magnitude
        cost = self.weights * self._magnitude if q is None else self.weights * self._magnitude * q
        places = torch.arange(8, dtype=torch.int32, device=cost.device).view(8, 1)
        order = (cost.view(torch.int32).view(-1, 8, cost.shape[1]) & -8) | places  # no two are equal
        turned = (order == order.amin(1, keepdim=True)) & self._odd
        return torch.where(turned.view(cost.shape), -self._magnitude, self._magnitude)

    def negative(self, fit: _Fit) -> Tensor:
        """Whether each weight of a fit is negative, bool [group, M]; a 0 may become -0."""
        return (self.x < 0) ^ torch.signbit(fit.target)

    def nearest(self, scale: Tensor, target: Tensor) -> _Fit:
        """The nearest entries under scales [M]."""
        first, *rest = self._entries(self.book, target, self.weights, scale, self._same_eighth)
        fit = self._fit(scale, first)
        for index in rest:
            other = self._fit(scale, index)
            fit = other.or_else(fit, other.error < fit.error)
        return fit

    def _fit(self, scale: Tensor, index: Tensor) -> _Fit:
        q = self._values(index)
        target = self.target(q)
        weighted = self.weights * q
        difference = (q * scale).sub_(target)
        error = total(difference.mul_(difference).mul_(self.weights))
        return _Fit(index, target, error, total(weighted * target), total(weighted.mul_(q)))


BookSearch = Callable[[BlockFormat, Tensor, Tensor | None], BookFits]
"""As `fit_books`."""


def as_books(fmt: BlockFormat, found: BookFits, count: int) -> Groups:
    """The blocks of `count` rows in a codebook format, from what a search has found."""
    blocks = count, found.d.numel() // count, -1
    index, stored = (by_row(each, count).view(blocks) for each in (found.index, found.sub))
    signs = None if fmt.book == "IQ1" else by_row(found.signs, count).view(blocks)
    return from_book(fmt, index, signs, by_row(found.d, count), stored)


def fit_books(
    fmt: BlockFormat, rows: Tensor, importance: Tensor | None, entries: NearestEntries = nearest_entries
) -> BookFits:
    """Finds entries and scales for fp32 rows [R, K]. importance: fp32 [R or 1, K], `floored`, or None (`weighted`)."""
    x, weights = weighted(fmt, rows, importance)
    groups = _Groups(fmt, x.flatten(1), weights.flatten(1), entries)
    fit, d, sub = _block_fits(fmt, groups, _group_fits(groups), x.shape[1])
    signs = _sign_bytes(groups.negative(fit))
    stored = ((sub - 1) / 2).to(torch.uint8)
    return BookFits(fit.index.view(-1, *sub.shape), signs.view(-1, *sub.shape), d, stored)


def _sign_bytes(negative: Tensor) -> Tensor:
    """bool [group, M] as bits, eight to a byte: uint8 [group / 8, M]."""
    places = torch.arange(8, dtype=torch.uint8, device=negative.device).view(8, 1)
    bits = negative.view(-1, 8, negative.shape[1]).to(torch.uint8) << places
    return bits.sum(1, dtype=torch.uint8)


def _group_fits(groups: _Groups) -> _Fit:
    """For each group the entries that come nearest with the scale that least squares gives them."""
    target = groups.target(None)
    spread = root(divided(total(groups.weights * target * target), total(groups.weights)))
    peak = target.amax(0) if groups.x is not target else target.abs().amax(0)
    best: _Fit | None = None
    gain = torch.empty_like(peak)
    for scale in _first_scales(groups.book, spread, peak):
        fit = groups.nearest(scale, target)
        here = divided(fit.dot, fit.square) * fit.dot
        best = fit if best is None else fit.or_else(best, here > gain)
        gain = here if best is fit else torch.maximum(here, gain)
    assert best is not None
    return best


def _first_scales(book: EntryBook, spread: Tensor, peak: Tensor) -> list[Tensor]:
    scales = [by_number(spread * share, book.spread) for share in SPREADS]
    return scales if book.parts > 1 else scales + [by_number(peak * share, book.top) for share in PEAKS]


def _block_fits(fmt: BlockFormat, groups: _Groups, fit: _Fit, count: int) -> tuple[_Fit, Tensor, Tensor]:
    """The entries, d fp16 [blocks], and the odd multiples of d that are the scales, fp32 [count, blocks]. count: groups
    of a block."""
    top = (1 << fmt.sub_scale_bits) - 1

    def scales(d: Tensor, sub: Tensor) -> Tensor:
        return (d.float() * fmt.unit * sub).view(-1)

    def by_block(values: Tensor) -> Tensor:
        return values.view(count, -1)

    d = _common_unit(by_block(fit.dot), by_block(fit.square), fmt.unit, top)
    sub = _odd_multiples(divided(by_block(fit.dot), by_block(fit.square)), d.float() * fmt.unit, top)
    fit = groups.nearest(scales(d, sub), fit.target)
    other = _odd_multiples(divided(by_block(fit.dot), by_block(fit.square)), d.float() * fmt.unit, top)
    moved = _solved_unit(by_block(fit.dot), by_block(fit.square), other, fmt.unit)
    there = groups.nearest(scales(moved, other), fit.target)
    falls = total(by_block(there.error)) < total(by_block(fit.error))
    return (
        there.or_else(fit, falls.repeat(count)),
        torch.where(falls, moved, d),
        torch.where(falls, other, sub),
    )


def _odd_multiples(scale: Tensor, unit: Tensor, top: int) -> Tensor:
    """Odd numbers 2n + 1, n from 0 to top, that times the unit are nearest to the scales [groups, blocks]."""
    ratio = scale * divided(torch.ones_like(unit), unit)
    return ratio.sub_(1).mul_(0.5).round_().clamp_(0, top).mul_(2).add_(1)


def _solved_unit(dot: Tensor, square: Tensor, sub: Tensor, unit: float) -> Tensor:
    """The d that least squares gives entries and the multiples of d, fp16 [blocks]."""
    return by_number(divided(total(dot * sub), total(square * sub * sub)), unit).half()


def _common_unit(dot: Tensor, square: Tensor, unit: float, top: int) -> Tensor:
    """d, fp16 [blocks], whose odd multiples come nearest to the scales that least squares gives the groups [groups,
    blocks]."""
    scale = divided(dot, square)
    largest = scale.amax(0)
    best = torch.full_like(largest, torch.inf)
    d = torch.zeros_like(largest, dtype=torch.float16)
    for step in UNIT_STEPS:
        first = by_number(largest, unit * (2 * top + 1 + 0.5 * step)).half()
        sub = _odd_multiples(scale, first.float() * unit, top)
        here = _solved_unit(dot, square, sub, unit)
        difference = here.float() * unit * sub - scale
        error = total(difference * difference * square)
        d, best = torch.where(error < best, here, d), torch.minimum(error, best)
    return d
