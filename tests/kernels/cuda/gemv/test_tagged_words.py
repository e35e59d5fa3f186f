"""Values handed to the next launch as words with tags."""

import pytest
import torch

from quengine.kernels.cuda.embedding import embedding
from quengine.kernels.cuda.gemv.activations import quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.tagged_words import LAUNCHES, UNTAGGED, Tagged, TaggedWords
from quengine.kernels.cuda.weights.packed import pack
from tests.kernels.cuda.weights import ordinary_activations, ordinary_weight


def tags_and_values(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    halves = words.view(torch.int32).view(-1, 2).cpu()
    return halves[:, 1], halves[:, 0].contiguous().view(torch.float32)


@pytest.mark.parametrize("kinds", [("Q4_K",), ("Q4_K", "Q6_K")])
def test_a_matvec_leaves_its_values_under_a_tag_of_its_own(
    kinds: tuple[str, ...], device: torch.device
) -> None:
    weights = [ordinary_weight(kind, 40, 256, seed=n) for n, kind in enumerate(kinds)]
    x = quantize_activations(ordinary_activations(1, 256).to(device))
    tagged = TaggedWords.empty(device)
    tagged.step.fill_(7)
    rows = 40 * len(kinds)
    for launch in range(2):
        y = matvec(x, pack(weights, device), tagged=tagged)
        tags, values = tags_and_values(tagged.words)
        assert (tags[:rows] == 7 * LAUNCHES.value + launch).all() and (tags[rows:] == -1).all()
        assert torch.equal(values[:rows], matvec(x, pack(weights, device)).cpu()[0])
        assert tagged.consume(y) == (Tagged(tagged.words, tagged.step), launch)
        assert tagged.consume(y.clone()) == (UNTAGGED, 0)
    tagged.restart()
    assert tagged.consume(y) == (UNTAGGED, 0)


def test_parts_of_several_launches_are_not_tagged(device: torch.device) -> None:
    weights = [ordinary_weight(kind, 32, 256, seed=n) for n, kind in enumerate(("Q4_K", "F16"))]
    x = quantize_activations(torch.ones(1, 256, device=device))
    tagged = TaggedWords.empty(device)
    tagged.last = y = torch.empty(1, 64, device=device)
    assert matvec(x, pack(weights, device), out=y, tagged=tagged) is y
    assert tagged.consume(y) == (UNTAGGED, 0) and (tagged.words == -1).all()


def test_what_has_no_room_for_its_words_is_not_tagged(device: torch.device) -> None:
    tagged, result = TaggedWords.empty(device), object()
    assert tagged.produce(result, tagged.words.numel() + 1) == (UNTAGGED, 0)
    assert tagged.consume(result) == (UNTAGGED, 0)
    tagged.launches = LAUNCHES.value
    assert tagged.produce(result, 1) == (UNTAGGED, 0)


@pytest.mark.parametrize("kind", ["Q6_K", "F16"])
def test_a_step_is_counted_once_by_its_first_launch(kind: str, device: torch.device) -> None:
    weight = pack([ordinary_weight(kind, 16, 10240)], device)
    step = torch.full((1,), 3, dtype=torch.int32, device=device)
    ids = torch.tensor([1, 5, 2], device=device)
    rows = embedding(weight, ids, step=step)
    assert step.item() == 4
    assert torch.equal(rows, embedding(weight, ids))
