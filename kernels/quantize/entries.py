"""Finds the codebook entry nearest to each of many vectors, exactly, and the same on every device.

A vector has a table of integers [levels, weights]: what its error grows by where a weight takes a level. An entry is
two halves, and a half has few combinations of levels. The sums of the table are computed once for every combination of
each half, and an entry's error is the sum of its two halves. All integers are multiplied by the number of combinations,
and each sum has its combination's number added: the least sum then also says which entry it belongs to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.codebooks import codebook
from quengine.kernels.quantize.layout import divided, total

FARTHEST = 4
"""Values beyond this multiple of the codebook's largest are clamped to it."""
_COLUMNS = 1 << 12
"""Vectors that are searched at a time."""
_ENTRIES = 64
"""Entries that are compared at a time."""


@dataclass(frozen=True)
class BookPart:
    """Entries whose weights take the same levels, in the order of their combinations of levels.

    levels         fp32 [levels, 1, 1]
    first, second  int64 [entries]: the combination of levels of each half of an entry
    number         int64 [combinations of an entry]: its number in the codebook
    """

    levels: Tensor
    first: Tensor
    second: Tensor
    number: Tensor


class EntryBook:
    """A format's codebook, `values` fp32 [width, entries]. That of IQ1 has two parts: an eighth is added or taken away.

    `top` is the largest value, `spread` the root mean square of all values. `books` are the parts, `parts` their
    number. `half`, `combinations` and `digits` are the numbers of combinations of levels: of half an entry, of an
    entry, and of the entries of all parts. `largest` is the largest sum over a vector's table (`tables`).
    """

    def __init__(self, fmt: BlockFormat, device: torch.device) -> None:
        self.name, self.width = fmt.name, fmt.width
        values, parts = _tables(fmt.book, fmt.table or ())
        self.values = values.to(device)
        self.top, self.spread = float(values.abs().max()), float(values.square().mean().sqrt())
        self.books = [BookPart(*(each.to(device) for each in part)) for part in parts]
        self.parts = len(parts)
        self.half: int = len(parts[0][0]) ** (fmt.width // 2)
        self.combinations = self.half * self.half
        self.digits = self.combinations * self.parts
        self.largest = (1 << 31) // self.digits - 1 - fmt.width

    def nearest(self, ratio: Tensor, weights: Tensor, each_part: bool) -> Tensor:
        """The entry with the least weighted squared distance to each vector: int64 [1, n].

        ratio, weights  fp32 [width, n]
        each_part       the nearest entry of each part: [parts, n]
        """
        pieces = zip(torch.split(ratio, _COLUMNS, 1), torch.split(weights, _COLUMNS, 1), strict=True)
        return torch.cat([self._nearest(*piece, each_part) for piece in pieces], 1)

    def _nearest(self, ratio: Tensor, weights: Tensor, each_part: bool) -> Tensor:
        tables = self.tables(ratio, weights)
        found = [
            self.least_sum(place, table) + place * self.combinations
            for place, table in enumerate(tables.unbind(0))
        ]
        if not each_part:
            found = [torch.stack(found).amin(0)]
        numbers = torch.cat([part.number for part in self.books])
        return torch.stack([numbers[(each % self.digits).long()] for each in found])

    def tables(self, ratio: Tensor, weights: Tensor) -> Tensor:
        """What the error of each vector grows by where a weight takes a level: whole numbers in fp32 [parts, levels,
        width, n]."""
        ratio = ratio.clamp(-FARTHEST * self.top, FARTHEST * self.top)
        costs = torch.stack([(part.levels - ratio).square_().mul_(weights) for part in self.books])
        costs -= costs.amin((0, 1))
        return costs.mul_(
            divided(torch.full_like(ratio[0], self.largest), total(costs.amax((0, 1))))
        ).round_()

    def least_sum(self, place: int, table: Tensor) -> Tensor:
        """For each vector the least error of a part's entries, times `digits`, plus the number of that entry's
        combination: int32 [n].

        table  whole numbers in fp32 [levels, width, n]
        """
        part, middle = self.books[place], self.width // 2
        whole = table.int().mul_(self.digits)
        first, second = _sums(whole[:, :middle], self.half), _sums(whole[:, middle:], 1)
        least = None
        halves = torch.split(part.first, _ENTRIES), torch.split(part.second, _ENTRIES)
        for one, other in zip(*halves, strict=True):
            here = first.index_select(0, one).add_(second.index_select(0, other)).amin(0)
            least = here if least is None else torch.minimum(least, here)
        assert least is not None
        return least

    def numbers(self, index: Tensor) -> Tensor:
        """The values of entries [n]: fp32 [width, n]."""
        return self.values.index_select(1, index)


def nearest_entries(
    book: EntryBook, target: Tensor, weights: Tensor, scale: Tensor, each_part: bool
) -> Tensor:
    """`EntryBook.nearest` of groups under scales: int64 [parts or 1, vectors of a group, M].

    target, weights  fp32 [group, M]
    scale            fp32 [M]
    """
    ratio = target * divided(torch.ones_like(scale), scale)
    vectors = len(target) // book.width

    def by_vector(values: Tensor) -> Tensor:
        return values.view(vectors, book.width, -1).transpose(0, 1).reshape(book.width, -1)

    return book.nearest(by_vector(ratio), by_vector(weights), each_part).view(-1, vectors, len(scale))


NearestEntries = Callable[[EntryBook, Tensor, Tensor, Tensor, bool], Tensor]
"""As `nearest_entries`."""


def _sums(table: Tensor, unit: int) -> Tensor:
    """The sums of a table [levels, weights, n] for all combinations of levels, each plus unit times the combination's
    number: int32 [levels ** weights, n]."""
    sums = table[:, 0]
    for weight in table.unbind(1)[1:]:
        sums = (sums.unsqueeze(1) + weight).flatten(0, 1)
    numbers = torch.arange(len(sums), dtype=torch.int32, device=table.device) * unit
    return sums + numbers.unsqueeze(1)


@cache
def _tables(name: str, table: tuple[int, ...]) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The values of the entries, [width, entries], and the fields of each `BookPart`."""
    values = torch.tensor(table, dtype=torch.float32)[codebook(name).int()]
    parts, start = [], 0
    for part in values.chunk(2 if name == "IQ1" else 1):
        parts.append(_part(part, start))
        start += len(part)
    return values.t().contiguous(), parts


def _part(values: Tensor, start: int) -> tuple[Tensor, ...]:
    levels, places = torch.unique(values, return_inverse=True)
    width = values.shape[1]
    half = len(levels) ** (width // 2)
    powers = len(levels) ** torch.arange(width).flip(0)
    combinations, order = (places * powers).sum(1).sort()
    number = torch.zeros(half * half, dtype=torch.int64)
    number[combinations] = order + start
    return levels.view(-1, 1, 1), combinations // half, combinations % half, number
