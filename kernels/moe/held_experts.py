"""Which experts of a layer a device holds while the others are in host memory: those that are used most.

A device has room for `count` experts of each such layer. Uses are counted on the device; now and then the host reads
them, and experts that are used much more than held ones take their places. Counts fade, so that they follow a change
of subject.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FADING = 3
"""Uses lose one part in 2**FADING at each look."""

_RATIO, _MARGIN = 2, 8
"""How much more an expert must be used than the held one that it replaces: a factor, and a number of uses, beyond the
noise of counts. With a router that prefers no expert, nearly none is replaced."""


@dataclass(frozen=True, eq=False)
class HeldExperts:
    """The device's table of a layer's held experts.

    places: int32 [E], the place of each expert on the device; `count`: it is not there. uses: int32 [E], how often each
    was used, fading. count: number of places.
    """

    places: Tensor
    uses: Tensor
    count: int


@dataclass(frozen=True)
class Replacement:
    """Expert number `expert` takes place `place` on the device from expert `before`."""

    place: int
    before: int
    expert: int


def replacements(uses: Sequence[int], held: Sequence[int]) -> list[Replacement]:
    """The experts that replace held ones, `held[place]`: the most used for the least used, of `uses` [E]."""
    absent = sorted(set(range(len(uses))) - set(held), key=lambda expert: (-uses[expert], expert))
    least = sorted(range(len(held)), key=lambda place: (uses[held[place]], place))
    pairs = zip(least, absent, strict=False)
    return [
        Replacement(place, held[place], expert)
        for place, expert in pairs
        if uses[expert] > _RATIO * uses[held[place]] + _MARGIN
    ]


def asking(uses: Tensor, held: Tensor) -> list[int]:
    """The numbers of the layers that have `replacements`, given uses int32 [layers, E] and held bool [layers, E]."""
    most = uses.masked_fill(held, -1).amax(1)
    least = uses.masked_fill(~held, torch.iinfo(torch.int32).max // 4).amin(1)
    return (most > _RATIO * least + _MARGIN).nonzero().flatten().tolist()


def most_used(uses: Sequence[int], count: int) -> list[int]:
    """The `count` experts that are used most; of experts with equal uses, the first."""
    return sorted(range(len(uses)), key=lambda expert: (-uses[expert], expert))[:count]


def places_of(held: Sequence[int], experts: int) -> Tensor:
    """`HeldExperts.places` for a device whose place p has expert `held[p]`: int32 [experts]."""
    places = torch.full((experts,), len(held), dtype=torch.int32)
    places[list(held)] = torch.arange(len(held), dtype=torch.int32)
    return places
