"""What ranks that share a model launch beside a single GPU's kernels: sums and logits over peer memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.ranks.push import (
    PeerBuffers,
    push_all_gather,
    push_all_reduce,
    received_buffer_shape,
)
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm

_META = torch.device("meta")
_CAPACITY = 1 << 17

Fields = tuple[str, bool, tuple[int, ...], Callable[[Any], object]]


class _Pushing:
    """A `Communicator` whose launches are compiled."""

    rank = 0

    def __init__(self, size: int, pdl: bool) -> None:
        self.size, self._pdl = size, pdl
        received = _empty(*received_buffer_shape(size, _CAPACITY), dtype=torch.int64)
        launches = _empty(_CAPACITY // 256, dtype=torch.int32)
        self._buffers = PeerBuffers(received, _empty(size, dtype=torch.int64), launches)

    def all_reduce(self, x: Tensor) -> Tensor:
        return push_all_reduce(x, self._buffers, self._pdl)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        starts = _empty(self.size + 1, dtype=torch.int32)
        return push_all_gather(x, widths, starts, self._buffers, self._pdl)

    def broadcast(self, x: Tensor) -> None:
        """Nothing is launched."""


def rank_cases(step: Callable[[int], ForwardBatch]) -> Iterator[Fields]:
    """The end of a layer's branch and the logits, with 2 to 8 ranks; `step`: a decode step of so many rows."""
    for ranks in (2, 4, 8):
        for rows in (1, 16):
            call = partial(_branch_and_logits, ranks, step(rows))
            yield f"{ranks} ranks, decode of {rows}", rows == 1, (80, 90), call


def _branch_and_logits(ranks: int, batch: ForwardBatch, backend: CudaBackend) -> None:
    backend.communicator = _Pushing(ranks, backend.pdl)
    hidden, inner, norm = 4096, 1792, RMSNorm(_empty(4096), 1e-5)
    stream = _empty(len(batch), hidden)
    weight = backend.weight([_tensor("Q4_K", hidden, inner)])
    x = backend.linear_add(batch, _empty(len(batch), inner), weight, stream, norm, partial=True)
    output = backend.weight([_tensor("Q6_K", 4096, hidden)])
    logits = backend.logits(batch, x, norm, output)
    backend.communicator.all_gather(logits, [4096] * ranks)


def _tensor(name: str, rows: int, cols: int) -> QuantTensor:
    form = FORMATS[name]
    return QuantTensor(name, form, (rows, cols), _empty(rows, form.row_bytes(cols), dtype=torch.uint8))


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)
