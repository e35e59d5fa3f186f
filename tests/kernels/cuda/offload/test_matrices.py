"""Stored experts on their way to a device: in any order, of one tensor or of one each."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.offload.matrices import copied
from tests.kernels.cuda.weights import ordinary_weight


@pytest.mark.parametrize("experts", [[0, 1, 2, 3], [2, 3, 0], [3], [1, 0]])
@pytest.mark.parametrize("alone", [False, True], ids=["one tensor", "a tensor each"])
def test_copies_are_those_of_the_file(experts: list[int], alone: bool, device: torch.device) -> None:
    kind = ordinary_weight("Q4_K", 4 * 8, 256, 0).row_slices(8)
    kind = [replace(each, data=each.data.clone()) for each in kind] if alone else kind
    room = torch.zeros(4 * kind[0].nbytes, dtype=torch.uint8, device=device)
    for given in (None, room):
        made = copied(kind, experts, given, device)
        assert torch.equal(made.cpu(), torch.stack([kind[expert].data for expert in experts]))
    assert room.any()
