"""Rows normed by the launch that groups them: blocks, places and bits of the two launches that it stands for."""

import pytest
import torch

from quengine.kernels.cuda.attention.attention_prefill import is_hopper
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.moe.groups import group_rows
from quengine.kernels.cuda.rms_norm import rms_norm_fp16
from quengine.kernels.cuda.rms_norm_grouped import group_normed_rows
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.rms_norm import RMSNorm
from tests.kernels.cuda.moe.routings import chosen, empty_groups


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    ("rows", "used", "experts", "cols", "block"),
    [
        (2, 8, 128, 2048, 8),
        (64, 8, 128, 2048, 8),
        (33, 2, 8, 4096, 16),
        (128, 8, 16, 320, 64),
        (5, 1, 3, 96, 8),
    ],
)
def test_bits_are_those_of_a_norm_and_a_copy(
    rows: int, used: int, experts: int, cols: int, block: int, pdl: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, cols, generator=generator) * torch.logspace(-3, 3, rows)[:, None]).to(device)
    norm = RMSNorm((torch.rand(cols, generator=generator) + 0.5).to(device), 1e-6)
    routing = chosen(rows, used, experts).to(device)
    made = []
    for together in (True, False):
        groups = empty_groups(rows * used, experts, block, device)
        out = Fp16Operand.empty(groups.rows, cols, device, OperandLayout.WGMMA)
        out.values.zero_()
        out.row_scale.zero_()
        if together:
            group_normed_rows(x, norm, routing, groups, out, pdl)
        else:
            of_norm = Fp16Operand.empty(rows, cols, device, OperandLayout.WGMMA)
            rms_norm_fp16(x, norm.weight, norm.eps, of_norm, pdl)
            group_rows(of_norm, cols, routing, groups, out, pdl)
        made.append((groups.blocks, groups.positions, out.values.view(torch.int16), out.row_scale))
    for ours, wanted in zip(*made, strict=True):
        assert torch.equal(ours, wanted)
    assert made[0][0][0] > 0 and made[0][2].any()


@pytest.mark.parametrize("first", [0, 2, 64, 126])
def test_rows_of_experts_that_are_here(first: int, device: torch.device) -> None:
    """Two experts of 128, of which the last ones have no row."""
    rows, used, cols = 19, 8, 2048
    x, norm = torch.randn(rows, cols, device=device), RMSNorm(torch.ones(cols, device=device), 1e-6)
    routing = chosen(rows, used, 126).to(device)
    made = []
    for share in (ExpertShare(first, 128), None):
        groups = empty_groups(rows * used, 128 if share is None else 2, 8, device, share)
        out = Fp16Operand.empty(groups.rows, cols, device, OperandLayout.WGMMA)
        out.values.zero_()
        group_normed_rows(x, norm, routing, groups, out)
        made.append((groups, out))
    (groups, out), (whole, wanted) = made
    here = ((routing >= first) & (routing < first + 2)).flatten()
    positions = groups.positions.long()
    assert bool((positions[~here] == -1).all())
    assert torch.equal(out.values[positions[here]], wanted.values[whole.positions.long()[here]])
    assert int(out.values.any(1).sum()) == int(here.sum())
    blocks = whole.blocks[1 : 1 + int(whole.blocks[0])]
    own = blocks[(blocks >= first) & (blocks < first + 2)] - first
    assert groups.blocks[: 1 + len(own)].tolist() == [len(own), *own.tolist()]
