"""Quantizes rows in pieces: on the CPU each thread takes pieces that fit its cache; on a GPU pieces are large."""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeAlias

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.block_formats import BlockFormat, dequantize
from quengine.kernels.cpu.quantize.quantizers import COMPILED
from quengine.kernels.cpu.runtime.scratch import keep_freed_memory
from quengine.kernels.quantize.quantize import Quantizers, quantize

_PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Number of weights of a piece."""
_PIECES_AHEAD = 4
"""Number of pieces for each thread that are quantized before the first of them is written."""

_LARGEST_HALF = 65504.0
_LARGEST = {
    "F32": math.inf,
    "BF16": torch.finfo(torch.bfloat16).max,
    "MXFP4": math.inf,
    "NVFP4": 448.0 * 6,
}
"""The largest weights of types whose scales are not in fp16; the limit of all other types is the largest fp16
number."""

Added: TypeAlias = Callable[[int, int], Tensor]
"""What is added to rows: given the first one and their number, fp32 [rows, K] on the quantizer's device."""


class UnfitWeightsError(ValueError):
    """A type cannot hold the weights. The message is worded to follow the tensor's name."""


def quantizers_on(device: torch.device) -> Quantizers:
    """The quantizers of a device. Those of all devices give the same bits."""
    if device.type == "cpu":
        keep_freed_memory()  # new pages for each piece took a third as long as the work
        return COMPILED
    from quengine.kernels.cuda.quantize.quantizers import LAUNCHED  # Triton takes 0.2 s

    return LAUNCHED


class Quantizer:
    """Quantizes rows on a device. Within `with`, torch uses one thread per operation, as each thread has its own piece.

    Raises EngineError for a number of threads below 1.
    """

    def __init__(self, device: torch.device, threads: int | None) -> None:
        self.device = device
        if threads is not None and threads < 1:
            raise EngineError(f"threads {threads}: must be 1 or more")
        self._threads = 1 if device.type == "cuda" else threads or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self._threads)

    def __enter__(self) -> "Quantizer":
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._torch_threads)

    def blocks(
        self,
        stored: BlockFormat,
        data: Tensor,
        fmt: BlockFormat,
        importance: Tensor | None,
        added: Added | None = None,
    ) -> Iterator[Tensor]:
        """The rows `data`, uint8 [R, row_bytes] of format `stored`, as blocks of `fmt` on the CPU, in order.

        importance: of the columns, fp32 [K], or None. added: what is added to the rows.

        Raises UnfitWeightsError: weights are not finite, or larger than `fmt` holds.
        """
        values = None if importance is None else importance.to(self.device)
        step = max(1, _PIECE.get(self.device.type, 1 << 26) // stored.cols(data.shape[1]))
        pieces = [(start, data[start : start + step]) for start in range(0, len(data), step)]
        group = self._threads * _PIECES_AHEAD
        for first in range(0, len(pieces), group):
            part = pieces[first : first + group]
            yield from self._pool.map(
                lambda piece: self._piece(stored, piece[0], piece[1], fmt, values, added), part
            )

    def _piece(
        self,
        stored: BlockFormat,
        first: int,
        data: Tensor,
        fmt: BlockFormat,
        values: Tensor | None,
        added: Added | None,
    ) -> Tensor:
        rows = dequantize(stored, data.to(self.device))
        if added is not None:
            rows = rows + added(first, len(rows))
        low, high = torch.aminmax(rows)  # NaN if a weight is NaN
        largest = max(abs(float(low)), abs(float(high)))
        if not math.isfinite(largest):
            raise UnfitWeightsError("has weights that are not finite")
        if largest > (most := _LARGEST.get(fmt.name, _LARGEST_HALF)):
            raise UnfitWeightsError(
                f"has weights up to {largest:g}, and {fmt.name} holds {most:g} at most: choose F32 or BF16"
            )
        return quantize(fmt, rows, values, quantizers_on(self.device)).cpu()
