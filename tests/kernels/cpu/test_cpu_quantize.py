"""The compiled searches of quantizers against their definitions, bit for bit."""

import pytest
import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.quantize.quantizers import COMPILED
from quengine.kernels.quantize.plain import FORMULAS
from quengine.kernels.quantize.quantize import PLAIN, WRITTEN, quantize
from tests.kernels.quantize.test_quantize import BOOKS, drawn, drawn_importance, peculiar

SEARCHED = [name for name in WRITTEN if FORMATS[name].is_quantized and name not in PLAIN]


def importances() -> Tensor:
    importance = drawn_importance()
    importance[:100] = 0
    return torch.from_numpy(importance)


@pytest.mark.parametrize("kind", ["tails", "uneven", "peculiar"])
@pytest.mark.parametrize("name", SEARCHED)
def test_bytes_are_those_of_the_definition(name: str, kind: str) -> None:
    """Of numbers of blocks that are a multiple of the kernel's 16, and that are none."""
    rows = torch.from_numpy(peculiar() if kind == "peculiar" else drawn(kind, 11 if name in BOOKS else 40))
    for importance in (importances(), None):
        found = quantize(FORMATS[name], rows, importance, COMPILED)
        assert torch.equal(found, quantize(FORMATS[name], rows, importance))


def test_integers_that_tie_are_chosen_in_the_order_of_the_definition() -> None:
    """One weight in each group: a scale of 1 with a code of 3 is a scale of 3 with a code of 1."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randn(64, 32, 1, generator=generator) * 30 ** torch.randn(64, 1, 1, generator=generator)
    places = torch.randint(16, (64, 32, 1), generator=generator)
    rows = torch.zeros(64, 32, 16).scatter_(2, places, sizes).reshape(64, 512)
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        for importance in (importances(), None):
            found = quantize(FORMATS[name], rows, importance, COMPILED)
            assert torch.equal(found, quantize(FORMATS[name], rows, importance)), name


def test_each_row_may_have_its_own_importance() -> None:
    rows = torch.from_numpy(drawn("uneven", 3))
    each = torch.stack([importances() * (row + 1) ** 2 for row in range(3)])
    for name in ("IQ2_XS", "Q4_K", "Q6_K"):
        found = quantize(FORMATS[name], rows, each, COMPILED)
        assert torch.equal(found, quantize(FORMATS[name], rows, each))


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_formulas_have_the_bytes_of_the_definition(name: str) -> None:
    for rows in (drawn("tails"), peculiar()):
        found = quantize(FORMATS[name], torch.from_numpy(rows), None, COMPILED)
        assert torch.equal(found, quantize(FORMATS[name], torch.from_numpy(rows)))
