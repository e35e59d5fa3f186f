"""The rows of the residual stream on their way from one pipeline stage to the next."""

from typing import Any

import torch

from quengine.kernels.backend import Backend, Hidden
from quengine.kernels.layer_norm import Norm
from quengine.models.config import Stage


class HandedRows:
    """Sends the rows of a step to the next stage, and receives those of the previous one, bit-identical.

    A single row may travel with what the backend has prepared for the next norm. Its length then depends on the
    sender's weights: it is sent as a number the first time, before any step is captured.
    """

    def __init__(self, stage: Stage, backend: Backend[Any], width: int) -> None:
        self._stage, self._backend, self._width = stage, backend, width
        self._told = False
        self._single = 0

    def send(self, x: Hidden, rows: int) -> None:
        flat, to = self._backend.flat_hidden(x), self._stage.number + 1
        if rows == 1 and not self._told:
            self._told = True
            self._communicator.send(torch.tensor([len(flat)], device=self._backend.device), to)
        self._communicator.send(flat, to)

    def receive(self, rows: int, norm: Norm | None) -> Hidden:
        """Receives `rows` rows from the previous stage. `norm`: the norm that reads them."""
        source, device = self._stage.number - 1, self._backend.device
        if rows == 1 and not self._single:
            length = torch.empty(1, dtype=torch.int64, device=device)
            self._communicator.receive(length, source)
            self._single = int(length)
        count = self._single if rows == 1 else rows * self._width
        flat = torch.empty(count, dtype=self._backend.dtype, device=device)
        self._communicator.receive(flat, source)
        return self._backend.hidden_of(flat, rows, norm)

    @property
    def _communicator(self) -> Any:
        return self._backend.communicator
