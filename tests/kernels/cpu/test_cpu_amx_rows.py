"""Decode's products of several rows on AMX tiles, where the processor has them; emulated ones in test_cpu_amx.py."""

import pytest
import torch

from quengine.kernels.cpu.gemm.amx_bytes import has_amx_bytes
from quengine.kernels.cpu.gemv.amx_rows import LEAST_ROWS, TYPES, uses_amx_rows
from tests.kernels.cpu.cpu_runs import decode_linear
from tests.kernels.weights import randn, random_weight


@pytest.mark.parametrize("name", sorted(TYPES))
def test_few_rows_are_not_multiplied_on_tiles(name: str) -> None:
    assert not uses_amx_rows(random_weight(name, 16, 1), LEAST_ROWS - 1)


def test_other_types_are_not_multiplied_on_tiles() -> None:
    assert not uses_amx_rows(random_weight("Q6_K", 16, 1), 16)


@pytest.mark.skipif(not has_amx_bytes(), reason="no AMX tiles of bytes, or not allowed")
@pytest.mark.parametrize("name", sorted(TYPES))
@pytest.mark.parametrize(
    ("weight_rows", "blocks", "count"), [(16, 1, 8), (50, 3, 9), (300, 2, 16), (37, 1, 19)]
)
def test_rows_have_the_bits_of_a_step_of_their_own(
    name: str, weight_rows: int, blocks: int, count: int
) -> None:
    w = random_weight(name, weight_rows, blocks)
    x = randn(count, w.cols)
    x[1] = 0
    alone = torch.cat([decode_linear(row, [w]) for row in x.split(1)])
    assert uses_amx_rows(w, count)
    assert torch.equal(decode_linear(x, [w]), alone)
