"""Between steps: the experts that a device holds become those that are used most.

After some rows the counts of uses are copied to the host. Experts that are used much more than held ones then take
their places, a few of one layer at a time. Their weights are copied on a stream of their own beside the steps, which
find an expert in neither place until it is there; so no step waits, and none reads a weight that is being written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.moe.held_experts import FADING, Replacement, hit_share, replacements
from quengine.kernels.offload.device_experts import DeviceExperts

LOOK_AFTER = 64
"""Rows of steps after which uses are looked at."""

_WEIGHTS_AT_ONCE = 1 << 24
"""Weights copied at once, by some two hundred torch operations."""


@dataclass(frozen=True)
class _Change:
    """Replacements in one layer that are made together."""

    layer: DeviceExperts
    parts: Sequence[Replacement]


class _Stream:
    """A stream beside the current one; on a device that has none, the current one."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

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
        """An event after all launches of this stream so far."""
        if self._side is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        return event


class Replacing:
    """See the module docstring. uses: int32 [layers, E], with a row for each of `layers`, by number. held: experts of a
    layer on the device.

    hits: the share of the rows' experts that the device held, as of the last look; None before the first. replaced: how
    many experts took another's place.
    """

    def __init__(self, layers: dict[int, DeviceExperts], uses: Tensor, held: int) -> None:
        self._layers, self._uses, self._held = layers, uses, held
        self._stream = _Stream(uses.device)
        on_gpu = uses.device.type == "cuda"
        self._seen = torch.zeros(uses.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._rows = 0
        self._looked: Any = None
        self._looking = False
        self._due = deque[_Change]()
        self._copied: tuple[_Change, Any] | None = None
        self.hits: float | None = None
        self.replaced = 0

    def between_steps(self, rows: int) -> bool:
        """Does the next part of the work, without waiting, after `rows` more rows. Returns whether captured steps are
        stale (`DeviceExperts.copy`)."""
        self._rows += rows
        if self._copied is not None:
            self._end()
        elif self._due:
            return self._begin(self._due.popleft())
        elif self._looking:
            self._choose()
        elif self._rows >= LOOK_AFTER:
            self._look()
        return False

    def _look(self) -> None:
        """Copies the uses to the host, and lets them fade."""
        self._rows, self._looking = 0, True
        self._seen.copy_(self._uses, non_blocking=True)
        self._uses -= self._uses >> FADING
        if self._uses.device.type == "cuda":
            self._looked = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._looked.record()

    def _choose(self) -> None:
        """The replacements that the uses ask for, once they have arrived."""
        if self._looked is not None and not self._looked.query():
            return
        self._looking = False
        held = self._held_places()
        self.hits = hit_share(self._seen, held, self._held)
        for number, layer in self._layers.items():
            changes = replacements(self._seen[number].tolist(), layer.experts)
            at_once = max(1, _WEIGHTS_AT_ONCE // layer.weights_of_one)
            for first in range(0, len(changes), at_once):
                self._due.append(_Change(layer, changes[first : first + at_once]))

    def _held_places(self) -> Tensor:
        """`places`, as the host knows them."""
        places = torch.full(self._seen.shape, self._held, dtype=torch.int32)
        for number, layer in self._layers.items():
            for place, expert in enumerate(layer.experts):
                places[number, expert] = place
        return places

    def _begin(self, change: _Change) -> bool:
        change.layer.begin(change.parts)
        with self._stream.after_current():
            stale = change.layer.copy(change.parts)
        self._copied = change, self._stream.mark()
        return stale

    def _end(self) -> None:
        assert self._copied is not None
        change, copied = self._copied
        if copied is not None and not copied.query():
            return
        self._copied = None
        change.layer.end(change.parts)
        self.replaced += len(change.parts)
