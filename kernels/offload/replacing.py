"""Between steps: the experts that a device holds become those that are used most.

After some rows the counts of uses are copied to the host. Experts that are used much more than held ones then take
their places, a few of one layer at a time. Their weights are copied on a stream of their own beside the steps, which
find an expert in neither place until it is there; so no step waits, and none reads a weight that is being written.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.moe.expert_counts import ExpertCounts
from quengine.kernels.moe.held_experts import FADING, Replacement, asking, replacements
from quengine.kernels.offload.device_experts import DeviceExperts
from quengine.kernels.offload.side_stream import SideStream

logger = logging.getLogger("quengine.experts")

LOOK_AFTER, _LOOK_AFTER_ROWS = 64, 512
"""Steps, or rows of steps, after which uses are looked at."""

_AT_ONCE = 8
"""Number of experts of a layer that are copied between two steps."""


@dataclass(frozen=True)
class _Change:
    """Replacements in one layer that are made together."""

    layer: DeviceExperts
    parts: Sequence[Replacement]


class Replacing:
    """See the module docstring. uses: int32 [layers, E], with a row for each of `layers`, by number.

    `counts`: uses as of the last look, and all replacements so far.
    """

    def __init__(self, layers: dict[int, DeviceExperts], uses: Tensor) -> None:
        self._layers, self._uses = layers, uses
        self._stream = SideStream(uses.device)
        on_gpu = uses.device.type == "cuda"
        self._seen = torch.zeros(uses.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._rows = self._steps = 0
        self._looked: Any = None
        self._looking = False
        self._due = deque[_Change]()
        self._copied: tuple[_Change, Any] | None = None
        self._left = uses.to("cpu", copy=True)
        self._has_looked = False
        self.counts = ExpertCounts()

    def begin_with(self, uses: Tensor) -> None:
        """Sets the uses before the first step."""
        self._uses.copy_(uses)
        self._left.copy_(uses)

    @property
    def last_uses(self) -> list[list[int]] | None:
        """The uses at the last look; None before the first."""
        return self._seen.tolist() if self._has_looked else None

    def between_steps(self, rows: int) -> None:
        """Does the next part of the work, without waiting, after `rows` more rows."""
        self._rows, self._steps = self._rows + rows, self._steps + 1
        if self._copied is not None:
            self._end()
        elif self._due:
            self._begin(self._due.popleft())
        elif self._looking:
            self._choose()
        elif self._steps >= LOOK_AFTER or self._rows >= _LOOK_AFTER_ROWS:
            self._look()

    def _look(self) -> None:
        """Copies the uses to the host, and lets them fade."""
        self._rows, self._steps, self._looking = 0, 0, True
        self._seen.copy_(self._uses, non_blocking=True)
        self._uses -= self._uses >> FADING
        if self._uses.device.type == "cuda":
            self._looked = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._looked.record()

    def _choose(self) -> None:
        """Queues the replacements that the uses call for, once the uses have arrived on the host."""
        if self._looked is not None and not self._looked.query():
            return
        self._looking = False
        self._has_looked = True
        held = torch.zeros(self._seen.shape, dtype=torch.bool)
        for number, layer in self._layers.items():
            held[number, layer.experts] = True
        self._count(held)
        for number in asking(self._seen, held):
            layer = self._layers[number]
            changes = replacements(self._seen[number].tolist(), layer.experts)
            for first in range(0, len(changes), _AT_ONCE):
                self._due.append(_Change(layer, changes[first : first + _AT_ONCE]))

    def _count(self, held: Tensor) -> None:
        """Adds the uses since the last look to `counts`, those of experts on the device and those of others."""
        new = self._seen - self._left
        self._left = self._seen - (self._seen >> FADING)
        on_device = int(new[held].sum())
        counts, there = self.counts, int(held.sum())
        self.counts = ExpertCounts(
            there,
            len(self._layers) * self._seen.shape[1] - there,
            counts.device_uses + on_device,
            counts.host_uses + int(new.sum()) - on_device,
            counts.replaced,
        )

    def _begin(self, change: _Change) -> None:
        change.layer.begin(change.parts)
        with self._stream.after_current():
            try:
                change.layer.copy(change.parts)
            except torch.OutOfMemoryError:
                logger.info(
                    "no memory on the device to replace experts; the CPU computes those that were to go"
                )
                self._due.clear()
                return
        self._copied = change, self._stream.mark()

    def _end(self) -> None:
        assert self._copied is not None
        change, copied = self._copied
        if copied is not None and not copied.query():
            return
        self._copied = None
        change.layer.end(change.parts)
        self.counts = self.counts._replace(replaced=self.counts.replaced + len(change.parts))
