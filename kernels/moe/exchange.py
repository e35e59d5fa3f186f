"""The memory through which a device and its host exchange the rows of a layer's experts, while a step runs.

The device writes rows and their routing to host memory and counts them as sent; the host computes the weighted sums of
their experts, writes them beside, and counts them as summed; the device, which waits meanwhile, adds them. Both sides
count the layers of all steps, so nothing is reset, and captured steps can be replayed. One exchange serves all layers
of a model: a layer's rows are sent when the sums of the layer before have been read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_LINE = 8
"""int64 of a cache line."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """Rows of up to `capacity` tokens, all in host memory but `launches`.

    rows, sums: fp32 [capacity, width]. experts: int32 [capacity, k], -1 for an expert that the device computes.
    weights: fp32 [capacity, k]. counts: int64, a cache line for each count. launches: int64 [2], on the device: the
    layers sent so far, and the programs of the launch under way that have written their rows.
    """

    rows: Tensor
    sums: Tensor
    experts: Tensor
    weights: Tensor
    counts: Tensor
    launches: Tensor

    @classmethod
    def allocate(cls, capacity: int, width: int, used: int, device: torch.device) -> "Exchange":
        """For rows of `width` with `used` experts each. For a CUDA device host memory is page-locked."""

        def held(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")

        return cls(
            held(capacity, width),
            held(capacity, width),
            held(capacity, used, dtype=torch.int32),
            held(capacity, used),
            held(5 * _LINE, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64, device=device),
        )

    @property
    def capacity(self) -> int:
        return len(self.rows)

    @property
    def sent(self) -> Tensor:
        """The layers whose rows the device has sent: int64 [1]."""
        return self.counts[:1]

    @property
    def taken(self) -> Tensor:
        """The layers whose rows the host has taken: int64 [1]."""
        return self.counts[_LINE : _LINE + 1]

    @property
    def summed(self) -> Tensor:
        """The layers whose sums the host has written: int64 [1]."""
        return self.counts[2 * _LINE : 2 * _LINE + 1]

    @property
    def stopped(self) -> Tensor:
        """int64 [1]; 1: the device sends no more rows, and the host stops waiting for them."""
        return self.counts[3 * _LINE : 3 * _LINE + 1]

    @property
    def given_up(self) -> Tensor:
        """int64 [1]; 1: sums did not come in time, say from a stopped process, and the device waits for no more."""
        return self.counts[4 * _LINE : 4 * _LINE + 1]
