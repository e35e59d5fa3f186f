"""Asynchronous copies of a step's results to the host, so that the next step can be launched meanwhile."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor on a CUDA device, in stream order: later work may overwrite the tensor. On the CPU, the tensor
    itself.

    rows: those to copy; None: all.
    """

    def __init__(self, tensor: Tensor, rows: Seq[int] | None = None) -> None:
        self._memory = tensor
        self._arrived: torch.cuda.Event | None = None
        if rows is not None and not tensor.is_cuda:
            self._memory = tensor[list(rows)]
        if tensor.is_cuda:
            count = len(tensor) if rows is None else len(rows)
            self._memory = torch.empty(count, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
            for number, row in enumerate(() if rows is None else rows):
                self._memory[number].copy_(tensor[row], non_blocking=True)
            if rows is None:
                self._memory.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> Tensor:
        """The copy in host memory; waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._memory
