"""Asynchronous copies of a step's results to the host, so that the next step can be launched meanwhile."""

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor, in stream order: later work may overwrite the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._memory.copy_(tensor, non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> Tensor:
        """The copy in host memory; waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._memory
