"""Which experts a device holds: those used most, once they are used much more."""

import pytest
import torch

from quengine.kernels.moe.expert_counts import ExpertCounts
from quengine.kernels.moe.held_experts import (
    Replacement,
    asking,
    most_used,
    places_of,
    replacements,
)


@pytest.mark.parametrize(
    ("uses", "held", "expected"),
    [
        ([0, 0, 0, 0], [0, 1], []),
        ([5, 0, 8, 9], [0, 1], [Replacement(1, 1, 3)]),
        ([5, 0, 90, 9], [0, 1], [Replacement(1, 1, 2)]),
        ([5, 0, 90, 80], [0, 1], [Replacement(1, 1, 2), Replacement(0, 0, 3)]),
        ([40, 41, 60, 70], [1, 0], []),
        ([1, 2, 3, 4], [0, 1, 2, 3], []),
    ],
    ids=["no uses", "beyond the margin", "the most used", "several", "by less than a factor", "all held"],
)
def test_the_most_used_replace_the_least_used(
    uses: list[int], held: list[int], expected: list[Replacement]
) -> None:
    assert replacements(uses, held) == expected
    mask = torch.zeros(2, len(uses), dtype=torch.bool)
    mask[1, held] = True
    asked = asking(torch.tensor([[0] * len(uses), uses], dtype=torch.int32), mask)
    assert asked == ([1] if expected else [])


def test_counts_of_a_router_without_preference_replace_nearly_none() -> None:
    made = torch.Generator().manual_seed(0)
    uses = torch.bincount(torch.randint(0, 128, (4096,), generator=made), minlength=128).tolist()
    assert len(replacements(uses, list(range(26)))) <= 1


def test_the_most_used_and_their_places() -> None:
    assert most_used([3, 9, 9, 1], 3) == [1, 2, 0]
    assert places_of([2, 0], 4).tolist() == [1, 2, 0, 2]


def test_the_share_of_uses_that_are_held() -> None:
    assert ExpertCounts(device_uses=3, host_uses=1).hits == 0.75 and ExpertCounts().hits == 0.0
