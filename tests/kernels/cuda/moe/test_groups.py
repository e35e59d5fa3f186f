"""Rows grouped by expert, against sorting them in torch."""

from itertools import product

import pytest
import torch

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, operand_shape
from quengine.kernels.cuda.moe import groups as module
from quengine.kernels.cuda.moe.groups import group_rows, number_pairs
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.grouping import BLOCKS, default_block, most_blocks
from tests.kernels.cuda.moe.routings import chosen, empty_groups
from tests.kernels.cuda.weights import ordinary_activations


def expected(experts: torch.Tensor, count: int, block: int) -> tuple[list[int], torch.Tensor]:
    """The expert of each block, and the position of each pair: a stable sort by expert."""
    flat = experts.flatten().long()
    counts = torch.bincount(flat, minlength=count)
    in_blocks = -(-counts // block)
    first = (in_blocks.cumsum(0) - in_blocks) * block
    order = flat.sort(stable=True).indices
    rank = torch.empty_like(flat)
    rank[order] = torch.arange(len(flat)) - (counts.cumsum(0) - counts)[flat[order]]
    return [e for e in range(count) for _ in range(int(in_blocks[e]))], first[flat] + rank


ROUTINGS = {
    "ragged": (chosen(37, 3, 9), 9),
    "all rows to one expert": (torch.full((20, 1), 2, dtype=torch.int32), 5),
    "all experts": (torch.arange(4, dtype=torch.int32).repeat(11, 1), 4),
    "one row": (chosen(1, 8, 128), 128),
}
MANY = {
    "more than a program counts": (chosen(700, 4, 32), 32),
    "more than are numbered at once": (chosen(1500, 6, 20), 20),
}


@pytest.mark.parametrize("block", [8, 256])
@pytest.mark.parametrize("name", ROUTINGS)
def test_pairs_are_sorted_by_expert_in_the_order_of_rows(name: str, block: int, device: torch.device) -> None:
    experts, count = ROUTINGS[name]
    rows, used = experts.shape
    groups = empty_groups(rows * used, count, block, device)
    x = Fp16Operand(
        torch.randn(rows, 128).half().to(device), torch.exp2(torch.arange(rows) % 9 - 4.0).to(device)
    )
    out = Fp16Operand.empty(groups.rows, 128, device)
    group_rows(x, 128, experts.to(device), groups, out)
    of_blocks, positions = expected(experts, count, block)
    assert groups.blocks[0] == len(of_blocks) <= groups.most
    assert groups.blocks[1 : 1 + len(of_blocks)].tolist() == of_blocks
    assert torch.equal(groups.positions.cpu().long(), positions)
    assert torch.equal(out.values[groups.positions.long()], x.values.repeat_interleave(used, 0))
    assert torch.equal(out.row_scale[groups.positions.long()], x.row_scale.repeat_interleave(used, 0))


@pytest.mark.parametrize(("name", "block"), zip(MANY, (8, 128), strict=True))
def test_many_pairs_are_sorted_alike(name: str, block: int, device: torch.device) -> None:
    experts, count = MANY[name]
    groups = empty_groups(experts.numel(), count, block, device)
    number_pairs(experts.to(device), groups)
    of_blocks, positions = expected(experts, count, block)
    assert groups.blocks[: 1 + len(of_blocks)].tolist() == [len(of_blocks), *of_blocks]
    assert torch.equal(groups.positions.cpu().long(), positions)


@pytest.mark.parametrize("first", [0, 3, 9])
@pytest.mark.parametrize("name", ["ragged", "all experts", "more than a program counts"])
def test_pairs_whose_experts_another_device_has_are_in_no_block(
    name: str, first: int, device: torch.device
) -> None:
    """The experts here are two of those chosen, or, from number 9 on, none of them."""
    experts, _ = {**ROUTINGS, **MANY}[name]
    if name == "more than a program counts":
        experts = experts.clamp(max=8)
    rows, used = experts.shape
    groups = empty_groups(rows * used, 2, 8, device, ExpertShare(first, 11))
    x = Fp16Operand(torch.randn(rows, 128).half().to(device), torch.ones(rows, device=device))
    out = Fp16Operand.empty(groups.rows, 128, device)
    out.values.zero_()
    group_rows(x, 128, experts.to(device), groups, out)
    flat = experts.flatten().long() - first
    here = (flat >= 0) & (flat < 2)
    of_blocks, positions = expected(flat[here], 2, 8)
    assert groups.blocks[: 1 + len(of_blocks)].tolist() == [len(of_blocks), *of_blocks]
    found = groups.positions.cpu().long()
    assert torch.equal(found[here], positions) and (found[~here] == -1).all()
    assert torch.equal(out.values[found[here]].cpu(), x.values.cpu().repeat_interleave(used, 0)[here])
    assert int(out.values.any(1).sum()) == int(here.sum())


@pytest.mark.parametrize(
    ("cols", "source", "layout"),
    [
        *product((192, 256), OperandLayout, (OperandLayout.MMA, OperandLayout.WGMMA)),
        (2880, OperandLayout.ROW_MAJOR, OperandLayout.MMA),
        (2880, OperandLayout.MMA, OperandLayout.WGMMA),
    ],
)
def test_rows_are_copied_from_every_layout(
    cols: int, source: OperandLayout, layout: OperandLayout, device: torch.device
) -> None:
    """Behind the last column there are zeros, whatever lay there."""
    experts = chosen(5, 2, 4).to(device)
    plain = Fp16Operand(ordinary_activations(5, cols).half().to(device), torch.ones(5, device=device))
    if source is OperandLayout.WGMMA and cols % 128:
        return
    x = {
        OperandLayout.ROW_MAJOR: lambda: plain,
        OperandLayout.MMA: plain.as_mma,
        OperandLayout.WGMMA: plain.as_wgmma,
    }
    groups, padded = empty_groups(10, 4, 8, device), -(-cols // 128) * 128
    values = torch.full(
        operand_shape(groups.rows, padded, layout), float("nan"), dtype=torch.float16, device=device
    )
    out = Fp16Operand(values, torch.empty(groups.rows, device=device), layout)
    group_rows(x[source](), cols, experts, groups, out)
    made = out.row_major(padded)[groups.positions.long()]
    assert torch.equal(made[:, :cols], plain.values.repeat_interleave(2, 0)) and not made[:, cols:].any()


@pytest.mark.parametrize("rows", [40, 170, 340])
def test_both_ways_to_number_pairs_give_the_same(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, made = chosen(rows, 3, 20).to(device), []
    x = Fp16Operand(torch.zeros(rows, 128).half().to(device), torch.ones(rows, device=device))
    for most in (1024, 0):
        monkeypatch.setattr(module, "_MOST_COUNTED", most)
        groups = empty_groups(3 * rows, 20, 8, device)
        group_rows(x, 128, experts, groups, Fp16Operand.empty(groups.rows, 128, device))
        made.append(groups)
    assert torch.equal(made[0].positions, made[1].positions) and torch.equal(made[0].blocks, made[1].blocks)


def test_a_bound_on_blocks_is_met_and_never_passed() -> None:
    for rows, used, count, block in ((2, 2, 4, 8), (64, 8, 128, 8), (300, 2, 8, 128)):
        for seed in range(20):
            pairs = expected(chosen(rows, used, count, seed), count, block)[0]
            assert len(pairs) <= most_blocks(rows * used, count, block)
    assert most_blocks(4 + 9, 2, 8) == len([0, 1, 1])


def test_blocks_hold_what_an_expert_usually_has() -> None:
    assert [default_block(pairs, 128) for pairs in (2, 64, 512, 513, 2048, 16384, 1 << 17)] == [
        8, 8, 8, 16, 32, 128, 256
    ]  # fmt: skip
    assert all(block == 1 << block.bit_length() - 1 for _, block in BLOCKS)
