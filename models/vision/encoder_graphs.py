"""CUDA graphs of an encoder: one for each slice of layers, by the number and size of the units that it encodes.

A layer takes about ten launches of 50 microseconds. With a graph the host has one launch for a slice, which leaves the
interpreter to decoding steps.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.collection_pause import paused
from quengine.kernels.cuda.launch.one_capture import CAPTURING
from quengine.models.vision.blocks import UnitGrid
from quengine.models.vision.projector import ImageEncoder

logger = logging.getLogger(__name__)

CLASSES = 8
"""Most (number, size) of units whose graphs are kept; the least recently used make room."""

Turn = Callable[[], AbstractContextManager[object]]
"""What each slice of layers is launched within."""


@dataclass(frozen=True, eq=False)
class _Captured:
    """The graphs of one number and size of units. host, pixels: their input, pinned and on the device; `copied` is
    recorded after the copy from one to the other. rows: their output."""

    host: Tensor
    pixels: Tensor
    copied: torch.cuda.Event
    graphs: list[torch.cuda.CUDAGraph]
    grid: UnitGrid
    rows: Tensor


class EncoderGraphs:
    """An encoder on a CUDA device, captured for a number and size of units once these come a second time.

    One thread at a time may use it, always on the same stream. On the default stream, where nothing can be captured, it
    launches kernel by kernel. After a capture runs out of memory, it captures no others.
    """

    def __init__(self, encoder: ImageEncoder, device: torch.device) -> None:
        self._encoder, self._device = encoder, device
        self._captured: OrderedDict[tuple[int, ...], _Captured] = OrderedDict()
        self._seen: OrderedDict[tuple[int, ...], None] = OrderedDict()
        # All graphs share memory: only one `_Captured` is computed at a time, and its rows are copied.
        self._pool: Any = None
        self._has_memory = True

    def rows(self, units: Sequence[Tensor], grid: UnitGrid, layers: int, turn: Turn) -> Tensor:
        """units [3, H, W] of one size in host memory -> rows [units, rows, N]; `layers` layers are launched within a
        `turn`."""
        captured = self._graphs_of((len(units), *units[0].shape), grid, layers)
        if captured is None:
            pixels = torch.stack(list(units)).to(self._device)
            return in_slices(self._encoder.layers(pixels, grid), layers, turn)
        return self._replayed(captured, units, turn)

    def _graphs_of(self, key: tuple[int, ...], grid: UnitGrid, layers: int) -> _Captured | None:
        if self._is_default_stream or (key not in self._captured and not self._may_capture(key)):
            return None
        if key not in self._captured:
            while len(self._captured) >= CLASSES:
                self._captured.popitem(last=False)
            try:
                self._captured[key] = self._capture(key, grid, layers)
            except torch.OutOfMemoryError:
                self._has_memory = False
                logger.warning(
                    "no device memory left to capture the encoder of images: its kernels are launched one by one"
                )
                return None
        self._captured.move_to_end(key)
        return self._captured[key]

    @property
    def _is_default_stream(self) -> bool:
        return torch.cuda.current_stream(self._device) == torch.cuda.default_stream(self._device)

    def _may_capture(self, key: tuple[int, ...]) -> bool:
        """Whether units of this number and size have come before and memory is left. Records that they have come."""
        if not self._has_memory or key in self._seen:
            return self._has_memory
        self._seen[key] = None
        if len(self._seen) > 8 * CLASSES:
            self._seen.popitem(last=False)
        return False

    def _replayed(self, captured: _Captured, units: Sequence[Tensor], turn: Turn) -> Tensor:
        captured.copied.synchronize()  # the last units have left `host`
        torch.stack(list(units), out=captured.host)
        captured.pixels.copy_(captured.host, non_blocking=True)
        captured.copied.record()
        for graph in captured.graphs:
            with turn():
                graph.replay()
        return captured.rows.clone()

    def _capture(self, shape: tuple[int, ...], grid: UnitGrid, layers: int) -> _Captured:
        """The graphs for units [B, 3, H, W]. Units of this size were encoded before, so all kernels are loaded."""
        host = torch.empty(shape, dtype=torch.float32, pin_memory=True)
        given = torch.empty(shape, dtype=torch.float32, device=self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graphs, computed = list[torch.cuda.CUDAGraph](), self._encoder.layers(given, grid)
        rows: Tensor | None = None
        with CAPTURING, paused():
            while rows is None:
                graph = torch.cuda.CUDAGraph()
                # The engine's thread goes on meanwhile: its CUDA calls are not part of this capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    rows = advanced(computed, layers)
                except BaseException:
                    with suppress(RuntimeError):  # unless the failure has ended the capture already
                        graph.capture_end()
                    raise
                graph.capture_end()
                graphs.append(graph)
        return _Captured(host, given, torch.cuda.Event(), graphs, grid, rows)  # type: ignore[no-untyped-call]


def in_slices(layers: Generator[None, None, Tensor], count: int, turn: Turn) -> Tensor:
    """The rows that `layers` (`ImageEncoder.layers`) returns; `count` layers are launched within each `turn`."""
    rows: Tensor | None = None
    while rows is None:
        with turn():
            rows = advanced(layers, count)
    return rows


def advanced(layers: Generator[None, None, Tensor], count: int) -> Tensor | None:
    """Launches `count` more layers. Returns the encoder's rows after its last layer, else None."""
    for _ in range(count):
        try:
            next(layers)
        except StopIteration as end:
            rows: Tensor = end.value
            return rows
    return None
