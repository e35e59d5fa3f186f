"""CUDA graphs of an encoder: one for each slice of layers, by the number and size of the units that it encodes.

A layer is some ten launches of 50 microseconds; in a graph the host, whose interpreter decoding steps need as well, has
one launch for a slice.
"""

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.collection_pause import paused
from quengine.kernels.cuda.launch.one_capture import CAPTURING
from quengine.models.vision.blocks import UnitGrid
from quengine.models.vision.projector import ImageEncoder

CLASSES = 8
"""Numbers and sizes of units whose graphs are kept; those used longest ago make room."""


@dataclass(frozen=True, eq=False)
class _Captured:
    """The graphs of one number and size of units. host, pixels: what they are given, pinned and on the device, once
    `copied`; rows: what they give."""

    host: Tensor
    pixels: Tensor
    copied: torch.cuda.Event
    graphs: list[torch.cuda.CUDAGraph]
    grid: UnitGrid
    rows: Tensor


class EncoderGraphs:
    """An encoder on a CUDA device, captured for units that come a second time. One thread at a time may use it, always
    on the same stream; on the default one, where nothing can be captured, it launches kernel by kernel."""

    def __init__(self, encoder: ImageEncoder, device: torch.device) -> None:
        self._encoder, self._device = encoder, device
        self._captured: OrderedDict[tuple[int, ...], _Captured] = OrderedDict()
        self._seen: OrderedDict[tuple[int, ...], None] = OrderedDict()
        # Graphs of all classes share memory: one class is computed at a time, and its rows are copied.
        self._pool: Any = None

    def rows(self, pixels: Tensor, grid: UnitGrid, layers: int) -> Generator[None, None, Tensor]:
        """pixels [B, 3, H, W] in host memory -> rows [B, rows, N]; yields after each `layers` layers."""
        key = tuple(pixels.shape)
        if self._is_default_stream or (key not in self._captured and not self._comes_again(key)):
            return (yield from in_slices(self._encoder.layers(pixels.to(self._device), grid), layers))
        if key not in self._captured:
            while len(self._captured) >= CLASSES:
                self._captured.popitem(last=False)
            self._captured[key] = self._capture(pixels, grid, layers)
        self._captured.move_to_end(key)
        return (yield from self._replayed(self._captured[key], pixels))

    @property
    def _is_default_stream(self) -> bool:
        return torch.cuda.current_stream(self._device) == torch.cuda.default_stream(self._device)

    def _comes_again(self, key: tuple[int, ...]) -> bool:
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > 8 * CLASSES:
            self._seen.popitem(last=False)
        return False

    def _replayed(self, captured: _Captured, pixels: Tensor) -> Generator[None, None, Tensor]:
        captured.copied.synchronize()  # the units before have left the host
        captured.host.copy_(pixels)
        captured.pixels.copy_(captured.host, non_blocking=True)
        captured.copied.record()
        for graph in captured.graphs:
            graph.replay()
            yield
        return captured.rows.clone()

    def _capture(self, pixels: Tensor, grid: UnitGrid, layers: int) -> _Captured:
        """The graphs of units like these, of which some were encoded before: all kernels are loaded."""
        host = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
        given = torch.empty(pixels.shape, dtype=pixels.dtype, device=self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graphs, computed = list[torch.cuda.CUDAGraph](), in_slices(self._encoder.layers(given, grid), layers)
        rows: Tensor | None = None
        with CAPTURING, paused():
            while rows is None:
                graph = torch.cuda.CUDAGraph()
                # Steps of the engine's thread go on meanwhile: their calls are none of this capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    next(computed)
                except StopIteration as end:
                    rows = end.value
                finally:
                    graph.capture_end()
                graphs.append(graph)
        return _Captured(host, given, torch.cuda.Event(), graphs, grid, rows)  # type: ignore[no-untyped-call]


def in_slices(layers: Generator[None, None, Tensor], count: int) -> Generator[None, None, Tensor]:
    """`layers` (`ImageEncoder.layers`), yielding after each `count` of them."""
    done = 0
    while True:
        try:
            next(layers)
        except StopIteration as end:
            rows: Tensor = end.value
            return rows
        done += 1
        if done % count == 0:
            yield
