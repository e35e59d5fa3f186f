"""The cases of tensor-parallel ranks: their sums and logits over peer memory, besides a single GPU's kernels."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.cuda.aot.meta_backend import empty, stored
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.ranks import two_shot
from quengine.kernels.cuda.ranks.peers import UNIT, PeerBuffers, received_buffer_shape
from quengine.kernels.cuda.ranks.push import GATHERED_VALUES, push_all_gather, push_all_reduce, pushed_values
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.rms_norm import RMSNorm

Fields = tuple[str, bool, tuple[int, ...], Callable[[Any], object]]


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


def rank_cases(steps: Sequence[ForwardBatch]) -> Iterator[Fields]:
    """The end of a layer's branch, and the logits, with 2 to 8 ranks."""
    for ranks in (2, 4, 8):
        for batch in steps:
            call = partial(_branch_and_logits, ranks, batch)
            yield f"{ranks} ranks, {batch.phase} of {len(batch)}", len(batch) == 1, (80, 90), call


def _branch_and_logits(ranks: int, batch: ForwardBatch, backend: CudaBackend) -> None:
    backend.communicator = PushingRanks(ranks, backend.pdl)
    hidden, inner, norm = 4096, 1792, RMSNorm(empty(4096), 1e-5)
    stream = empty(len(batch), hidden)
    weight = backend.weight([stored("Q4_K", hidden, inner)])
    output = backend.weight([stored("Q6_K", 4096, hidden)])
    x = backend.linear_add(batch, empty(len(batch), inner), weight, stream, norm, partial=True)
    backend.linear_add(batch, empty(len(batch), inner), weight, x, post_norm=norm, partial=True)
    logits = backend.logits(batch, x, norm, output)
    backend.communicator.all_gather(logits, [4096] * ranks)
