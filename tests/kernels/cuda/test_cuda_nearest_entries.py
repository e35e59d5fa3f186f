"""The nearest entries of codebooks on CUDA against their definition, bit for bit."""

import pytest
import torch

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.quantize.nearest_entries import nearest_entries
from quengine.kernels.quantize.entries import EntryBook
from quengine.kernels.quantize.entries import nearest_entries as definition


@pytest.mark.parametrize("name", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_entries_are_those_of_the_definition(name: str, device: torch.device) -> None:
    """Also of groups whose scale, weights or values are 0, and of values far from any entry."""
    book, draw = EntryBook(FORMATS[name], torch.device("cpu")), torch.Generator().manual_seed(3)
    vectors = 1 if name.startswith("IQ1") else 2
    target = 0.02 * torch.randn(vectors * book.width, 133, generator=draw)
    weights = torch.randn(target.shape, generator=draw).exp()
    scale = 0.002 * torch.rand(133, generator=draw)
    scale[3], weights[:, 7], target[:, 8], scale[9] = 0.0, 0.0, 0.0, 1e-7
    each_part = name == "IQ1_S"
    given = [each.to(device) for each in (target, weights, scale)]
    found = nearest_entries(book, *given, each_part)
    assert torch.equal(found.cpu(), definition(book, target, weights, scale, each_part).int())
