"""Several ranks' buffers in one process, and the definition of what a rank writes into them."""

import torch
from torch import Tensor

from quengine.kernels.cuda.ranks.peers import PeerBuffers, peer_buffers, received_buffer_shape

CAPACITY = 1024


def buffers_of(ranks: int, device: torch.device) -> list[PeerBuffers]:
    received = [
        torch.zeros(received_buffer_shape(ranks, CAPACITY), dtype=torch.int64, device=device)
        for _ in range(ranks)
    ]
    addresses = [buffer.data_ptr() for buffer in received]
    return [peer_buffers(received[rank], addresses, rank) for rank in range(ranks)]


def words(x: Tensor, sequence: int) -> Tensor:
    """The definition of what a rank writes: int64, as x."""
    return (sequence << 32) | (x.contiguous().view(torch.int32).long() & 0xFFFFFFFF)


def write_ahead(group: list[PeerBuffers], rank: int, x: Tensor, sequence: int) -> None:
    """What `rank` writes to all ranks in launch number `sequence`."""
    for buffers in group:
        buffers.received[sequence % 3, rank, : x.numel()] = words(x.flatten(), sequence)
