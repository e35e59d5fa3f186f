"""Sums and logits of tensor-parallel ranks on the meta device: their kernels are launched, and nothing is sent."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels.cuda.aot.meta_backend import empty
from quengine.kernels.cuda.ranks import two_shot
from quengine.kernels.cuda.ranks.peers import UNIT, PeerBuffers, received_buffer_shape
from quengine.kernels.cuda.ranks.push import GATHERED_VALUES, push_all_gather, push_all_reduce, pushed_values


class PushingRanks:
    """A `Communicator` whose launches are compiled, on the meta device."""

    rank = 0

    def __init__(self, size: int, pdl: bool) -> None:
        self.size, self._pdl = size, pdl
        self._sums, self._logits = (_buffers(size, most) for most in (pushed_values(size), GATHERED_VALUES))
        self._many = _many(size)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel() <= self._sums.capacity:
            return push_all_reduce(x, self._sums, self._pdl)
        return (
            x if x.numel() > self._many.capacity else two_shot.two_shot_all_reduce(x, self._many, self._pdl)
        )

    def peers(self, rows: int, width: int) -> PeerBuffers | None:
        return self._sums.for_rows(rows, width)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        if len(x) * max(widths) > self._logits.capacity:
            return empty(len(x), sum(widths))
        starts = empty(self.size + 1, dtype=torch.int32)
        return push_all_gather(x, widths, starts, self._logits, self._pdl)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Nothing is launched."""

    def send(self, x: Tensor, to: int) -> None:
        """Nothing is launched."""

    def receive(self, x: Tensor, source: int) -> None:
        """Nothing is launched."""


def _buffers(ranks: int, capacity: int) -> PeerBuffers:
    received = empty(*received_buffer_shape(ranks, capacity), dtype=torch.int64)
    launches = empty(capacity // UNIT, dtype=torch.int32)
    return PeerBuffers(received, empty(ranks, dtype=torch.int64), launches)


def _many(ranks: int) -> two_shot.SharedSums:
    values = two_shot.SUMMED_VALUES
    launches = empty(two_shot.programs_for(values, ranks), dtype=torch.int32)
    shared = empty(two_shot.shared_words(ranks, values))
    return two_shot.SharedSums(shared, empty(ranks, dtype=torch.int64), launches, 0)
