"""All-reduce and all-gather over peer memory against their definition: several ranks' buffers in one process.

The ranks run one after the other, so each finds the words of those behind it written ahead, by their definition; what a
rank itself writes is then compared with that.
"""

import threading
import time

import pytest
import torch
from torch import Tensor

from quengine.kernels.cuda.ranks.peers import UNIT
from quengine.kernels.cuda.ranks.push import BLOCK, push_all_gather, push_all_reduce
from quengine.kernels.ranks.communicator import side_by_side, sum_in_order
from tests.kernels.cuda.ranks.peer_words import CAPACITY, buffers_of, words, write_ahead


def padded(x: Tensor, width: int) -> Tensor:
    wide = x.new_zeros(len(x), width)
    wide[:, : x.shape[1]] = x
    return wide


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("shape", [(1, 64), (3, 320), (1, BLOCK)])
def test_all_ranks_have_the_sum_in_order(ranks: int, shape: tuple[int, int], device: torch.device) -> None:
    """Over more launches than there are turns, each with values of its own."""
    group = buffers_of(ranks, device)
    for sequence in range(1, 6):
        x = [torch.randn(shape, device=device) * 10.0 ** (3 * rank) for rank in range(ranks)]
        for rank in range(1, ranks):
            write_ahead(group, rank, x[rank], sequence)
        wanted = sum_in_order([part.clone() for part in x])
        for rank in range(ranks):
            ahead = [buffers.received.clone() for buffers in group]
            for buffers in group:  # what this rank writes must be what was written ahead for it
                buffers.received[sequence % 3, rank, : x[rank].numel()] = 0
            assert torch.equal(push_all_reduce(x[rank], group[rank]), wanted)
            if rank:
                assert all(torch.equal(a, b.received) for a, b in zip(ahead, group, strict=True))


def test_a_sum_is_added_to_a_residual(device: torch.device) -> None:
    """In place, twice: the last program has values past the end."""
    group = buffers_of(2, device)
    residual = torch.randn(3, 320, device=device)
    for sequence in (1, 2):
        x = [torch.randn(3, 320, device=device) for _ in range(2)]
        write_ahead(group, 1, x[1], sequence)
        write_ahead(group, 0, x[0], sequence)
        for rank in range(2):
            found = residual.clone()
            assert push_all_reduce(x[rank], group[rank], residual=found) is found
            assert torch.equal(found, (x[0] + x[1]) + residual)


def test_small_and_large_launches_follow_each_other(device: torch.device) -> None:
    """Programs that a small launch does not have keep their sequence numbers."""
    group = buffers_of(2, device)
    count = torch.zeros(CAPACITY // BLOCK, dtype=torch.int64)
    for programs in (1, 4, 1, 2, 1, 1, 4):
        x = [torch.randn(1, programs * BLOCK, device=device) for _ in range(2)]
        count[:programs] += 1
        for program in range(programs):
            part = slice(program * BLOCK, (program + 1) * BLOCK)
            sequence = int(count[program])
            group[0].received[sequence % 3, 1, part] = words(x[1][0, part], sequence)
        assert torch.equal(push_all_reduce(x[0], group[0]), x[0] + x[1])
        assert torch.equal(push_all_reduce(x[1], group[1]), x[0] + x[1])
    units = count.repeat_interleave(BLOCK // UNIT).tolist()
    assert group[0].launches.tolist() == units == group[1].launches.tolist()


def test_a_rank_waits_for_words_that_come_late(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("a copy from the host would wait for the kernel")
    group = buffers_of(2, device)
    x = torch.randn(1, 64)

    def write_late() -> None:
        time.sleep(0.05)
        for element in range(64):  # one by one, as they may arrive
            group[0].received[1, 1, element] = words(x[0, element : element + 1], 1)[0]

    writer = threading.Thread(target=write_late)
    writer.start()
    assert torch.equal(push_all_reduce(x, group[0]), x + x)
    writer.join()


@pytest.mark.parametrize("widths", [(48, 48), (32, 49), (16, 16, 17)])
def test_all_ranks_have_the_columns_of_all(widths: tuple[int, ...], device: torch.device) -> None:
    group = buffers_of(len(widths), device)
    starts = torch.tensor([sum(widths[:rank]) for rank in range(len(widths) + 1)], dtype=torch.int32)
    for sequence in range(1, 5):
        x = [torch.randn(3, width, device=device) for width in widths]
        for rank in range(1, len(widths)):
            write_ahead(group, rank, padded(x[rank], max(widths)), sequence)
        wanted = side_by_side(x, widths)
        for rank in range(len(widths)):
            found = push_all_gather(x[rank], widths, starts.to(device), group[rank])
            assert torch.equal(found, wanted)
