"""A stream beside the current one, for copies; on a device without streams, the current order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Within this context launches go to this stream, after those of the current one so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def mark(self) -> Any:
        """An event after all launches of this stream so far; None if the device has no streams."""
        if self._side is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        return event

    @staticmethod
    def wait(event: Any) -> None:
        """Makes later launches of the current stream wait for `event`."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
