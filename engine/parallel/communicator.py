"""`kernels.communicator.Communicator` over torch.distributed: gloo between processes on the CPU."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quengine.kernels.communicator import side_by_side, sum_in_order
from quengine.models.tensor_split import Rank

_LOOPBACK = "127.0.0.1"


class GlooCommunicator:
    """The ranks of one host, which meet in the file `meeting` (in a folder of the user alone), within `seconds`.

    What each rank has goes to all others, which add it up in the order of the ranks.
    """

    def __init__(self, rank: Rank, meeting: Path, seconds: float) -> None:
        self.rank, self.size = rank.number, rank.count
        # Of its own, beside whatever process group the program has made.
        store = dist.FileStore(str(meeting), rank.count)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=seconds)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        self._group: Any = dist.ProcessGroupGloo(store, rank.number, rank.count, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(self._gathered(x))

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        padded = x.new_zeros(len(x), max(widths))
        padded[:, : x.shape[1]] = x
        return side_by_side(self._gathered(padded), widths)

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's x, on all ranks, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([x], options).wait()

    def close(self) -> None:
        """Leave the group: operations of the other ranks fail."""
        self._group = None

    def _gathered(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return parts
