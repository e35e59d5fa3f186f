"""Hopper's matmul on weights whose columns are no whole chunks of 256: a turn of its loop takes two chunks of 128, and
of an odd number the second one of the last turn counts nothing."""

import pytest
import torch

from quengine.kernels.cuda.attention.attention_prefill import is_hopper
from quengine.kernels.cuda.gemm import matmul_wgmma
from quengine.kernels.cuda.gemm.matmul import matmul
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.weights.geometry import WgmmaGeometry
from quengine.kernels.cuda.weights.packed import pack
from tests.kernels.cuda.gemm.test_matmul import FP16_ROUNDING, expected
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("columns", [96, 128, 384, 576, 896, 1152])
@pytest.mark.parametrize("name", ["MXFP4", "Q5_1"])
def test_any_number_of_chunks_overlapped_or_not(
    name: str, columns: int, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1, 3, 5, 7 and 9 chunks, some with a part of the last one; 3 splits of 7 have 3, 3 and 1. The same bits
    whether the matrix units overlap or not, and whether a program takes the splits in turn."""
    weight = ordinary_weight(name, 200, columns)
    packed, room = pack(weight, device), MatmulWorkspace(0, device)
    for rows in (8, 100, 300):
        x, made = ordinary_activations(rows, columns), []
        for stages, overlap in ((2, True), (3, True), (3, False), (3, True)):
            many = {"block": 128, "in_turn": stages == 2} if rows > 128 else {}
            geometry = WgmmaGeometry(4, splits, stages, overlap, **many)
            monkeypatch.setattr(matmul_wgmma, "wgmma_geometry", lambda *_, given=geometry: given)
            made.append(matmul(x.to(device), packed, room, exact=True))
        assert nmse(made[0], expected(x, [weight])) < FP16_ROUNDING
        assert all(torch.equal(other, made[0]) for other in made)
