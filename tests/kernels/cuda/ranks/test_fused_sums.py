"""Kernels that sum over the ranks what they multiplied, against the kernel of one rank and the definition of a sum."""

import pytest
import torch

from quengine.kernels import activations as definition
from quengine.kernels.cuda.gemv.activations import quantize_activations
from quengine.kernels.cuda.gemv.matvec_norm import matvec_norm
from quengine.kernels.cuda.post_norm import post_norm_add
from quengine.kernels.cuda.ranks.push import push_all_reduce
from quengine.kernels.cuda.weights.geometry import Geometry
from quengine.kernels.cuda.weights.packed import pack
from quengine.kernels.ranks.communicator import sum_in_order
from quengine.kernels.rms_norm import RMSNorm, rms_norm
from tests.kernels.cuda.ranks.peer_words import buffers_of, write_ahead
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight

EPS = 1e-5


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("geometry", [(2, 2, 1), (1, 2, 1), (4, 1, 1)])
def test_a_projection_sums_over_the_ranks_before_the_norm_begins(
    ranks: int, geometry: tuple[int, int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last program has tiles past the edge; twice, followed by a launch of other programs."""
    monkeypatch.setattr(
        "quengine.kernels.cuda.gemv.matvec_norm.matvec_geometry", lambda *_: Geometry(*geometry)
    )
    weights = [pack(ordinary_weight("Q4_K", 96, 512, rank), device) for rank in range(ranks)]
    x = [quantize_activations(ordinary_activations(1, 512, rank).to(device)) for rank in range(ranks)]
    residual, norm = torch.randn(1, 96, device=device), torch.rand(96, device=device) + 0.5
    bias, zeros = torch.randn(96, device=device), torch.zeros(1, 96, device=device)
    parts = [matvec_norm(x[rank], weights[rank], zeros, norm, EPS).hidden for rank in range(ranks)]
    total = sum_in_order([part.clone() for part in parts])
    group = buffers_of(ranks, device)
    for sequence in (1, 2):
        for rank in range(1, ranks):
            write_ahead(group, rank, parts[rank], sequence)
        for rank in range(ranks):
            given = bias if sequence == 2 else None
            normed = matvec_norm(
                *(x[rank], weights[rank], residual, norm, EPS), bias=given, peers=group[rank]
            )
            wanted = (total if given is None else total + bias) + residual
            assert torch.equal(normed.hidden, wanted)
            exact = rms_norm(wanted.double(), norm.double(), EPS)
            assert nmse(normed.rms_normed.dequantize(), exact) < 1e-8
            quantized = definition.quantize_activations(wanted.cpu() * norm.cpu())
            assert torch.equal(normed.rms_normed.ints().cpu(), quantized.a)
    for rank in range(1, ranks):
        write_ahead(group, rank, parts[rank], 3)
    assert all(torch.equal(push_all_reduce(parts[rank], group[rank]), total) for rank in range(ranks))
    with pytest.raises(ValueError, match="ranks exchange up to 1024 values, not 2048"):
        wide = pack(ordinary_weight("Q4_0", 2048, 64), device)
        row, long = quantize_activations(torch.ones(1, 64, device=device)), torch.ones(1, 2048, device=device)
        matvec_norm(row, wide, long, long[0], EPS, peers=group[0])


@pytest.mark.parametrize("post", [False, True])
def test_rows_of_products_are_summed_before_they_are_added(post: bool, device: torch.device) -> None:
    """Three rows, behind a norm of the sum or not: the stream and its norm are those of the sum of the products."""
    ranks, width = 2, 160
    products = [torch.randn(3, width, device=device) for _ in range(ranks)]
    norm = RMSNorm(torch.rand(width, device=device) + 0.5, EPS)
    group = buffers_of(ranks, device)
    for sequence in (1, 2):
        write_ahead(group, 1, products[1], sequence)
        for rank in range(ranks):
            wanted, found = torch.ones(3, width, device=device), torch.ones(3, width, device=device)
            post_norm = norm if post else None
            post_norm_add(sum_in_order([part.clone() for part in products]), wanted, post_norm)
            post_norm_add(products[rank], found, post_norm, peers=group[rank])
            assert torch.equal(found, wanted)
