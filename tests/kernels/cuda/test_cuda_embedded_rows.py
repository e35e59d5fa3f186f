"""Rows given as embeddings, placed by the kernel, against the definition."""

import pytest
import torch

from quengine.kernels.cuda.embedded_rows import place_embeddings
from quengine.kernels.embedded_rows import EmbeddedRows
from quengine.kernels.embedded_rows import place_embeddings as defined

pytestmark = pytest.mark.cuda_kernel


@pytest.mark.parametrize(("rows", "columns"), [(5, 32), (3, 1500)])
def test_given_rows_stand_in_their_places(rows: int, columns: int, device: torch.device) -> None:
    x, values = torch.randn(rows, columns, device=device), torch.randn(4, columns, device=device)
    given = EmbeddedRows(torch.tensor([2, -1, 0, -1], device=device), values)
    expected = defined(x.clone(), given)
    assert torch.equal(place_embeddings(x.clone(), given), expected)
    assert torch.equal(expected[2], values[0]) and torch.equal(expected[1], x[1])
    assert place_embeddings(x, None) is x
