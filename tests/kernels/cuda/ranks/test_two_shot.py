"""The all-reduce of many rows against its definition: several ranks' memory in one process, and ranks as processes.

In one process ranks run one after the other, so each finds what the others write in its launch written ahead, by its
definition; what it writes itself is then compared with that.
"""

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from quengine.kernels.cuda.ranks import two_shot
from quengine.kernels.cuda.ranks.peers import peer_buffers, received_buffer_shape
from quengine.kernels.cuda.ranks.push import push_all_reduce
from quengine.kernels.cuda.ranks.two_shot import (
    SharedSums,
    programs_for,
    shared_sums,
    shared_words,
    two_shot_all_reduce,
)
from quengine.kernels.ranks.communicator import sum_in_order

BLOCK = 64
SHAPES = [(1, 40), (5, 96), (3, 128), (5, 96)]
"""Less than a block; the last program without values for the last rank; whole programs; fewer programs again."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_shot, "BLOCK", BLOCK)


class Parts:
    """Views of what ranks write into the memory of one."""

    def __init__(self, sums: SharedSums) -> None:
        values = sums.ranks * sums.programs * BLOCK
        self.sums = sums.shared[:values].view(sums.programs, sums.ranks, BLOCK)
        self.values = sums.shared[values : 2 * values].view(sums.ranks, sums.programs, BLOCK)
        self.flags = sums.shared[2 * values :].view(torch.int32).view(2, sums.ranks, sums.programs)


def blocks_of(x: Tensor, ranks: int) -> Tensor:
    """[programs, ranks, BLOCK], with zeros behind the values."""
    flat = x.new_zeros(programs_for(x.numel(), ranks) * ranks * BLOCK)
    flat[: x.numel()] = x.flatten()
    return flat.view(-1, ranks, BLOCK)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_sum_in_order(ranks: int, device: torch.device) -> None:
    shared = [torch.zeros(shared_words(ranks, 640), device=device) for _ in range(ranks)]
    addresses = [each.data_ptr() for each in shared]
    group = [shared_sums(shared[rank], addresses, rank, 640) for rank in range(ranks)]
    launches = torch.zeros(group[0].programs, dtype=torch.int32, device=device)
    for shape in SHAPES:
        x = [torch.randn(shape, device=device) * 10.0 ** (3 * rank) for rank in range(ranks)]
        wanted = sum_in_order([part.clone() for part in x])
        blocks, total = [blocks_of(part, ranks) for part in x], blocks_of(wanted, ranks)
        used = slice(0, len(total))
        launches[used] += 1
        for rank in range(ranks):
            own, others = Parts(group[rank]), [peer for peer in range(ranks) if peer != rank]
            for peer in others:
                own.values[peer, used], own.sums[used, peer] = blocks[peer][:, rank], total[:, peer]
                own.flags[:, peer, used] = launches[used]
            assert torch.equal(two_shot_all_reduce(x[rank], group[rank]), wanted)
            for peer in others:
                there = Parts(group[peer])
                assert torch.equal(there.values[rank, used], blocks[rank][:, peer])
                assert torch.equal(there.sums[used, rank], total[:, rank])
                assert (there.flags[:, rank, used] == launches[used]).all()
            assert torch.equal(group[rank].launches, launches)


def run_rank(
    rank: int, received: list[Tensor], shared: list[Tensor], x: list[list[Tensor]], found: Tensor
) -> None:
    """A process: all sums, by either kernel in turns."""
    two_shot.BLOCK = BLOCK
    pushed = peer_buffers(received[rank], [each.data_ptr() for each in received], rank)
    sums = shared_sums(shared[rank], [each.data_ptr() for each in shared], rank, 640)
    for number, parts in enumerate(x):
        whole = parts[rank]
        found[rank, 0, number, : whole.numel()] = two_shot_all_reduce(whole, sums).flatten()
        found[rank, 1, number, : whole.numel()] = push_all_reduce(whole, pushed).flatten()


def test_ranks_that_run_at_once_wait_for_each_other(device: torch.device) -> None:
    """In Triton's interpreter, over memory that processes share."""
    if device.type == "cuda":
        pytest.skip("processes of the interpreter")
    received = [
        torch.zeros(received_buffer_shape(2, 1024), dtype=torch.int64).share_memory_() for _ in range(2)
    ]
    shared = [torch.zeros(shared_words(2, 640)).share_memory_() for _ in range(2)]
    x = [[torch.randn(shape) for _ in range(2)] for shape in SHAPES]
    found = torch.zeros(2, 2, len(SHAPES), 640).share_memory_()
    multiprocessing.spawn(run_rank, (received, shared, x, found), nprocs=2)
    for number, (a, b) in enumerate(x):
        wanted = (a + b).flatten()
        for rank in range(2):
            for kernel in range(2):
                assert torch.equal(found[rank, kernel, number, : len(wanted)], wanted)
