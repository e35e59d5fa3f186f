"""Turns of steps and the image encoder on a CUDA device, so that streams go on while images are encoded.

The encoder's kernels fill the device. If both ran at once, each of a step's hundred kernels or more would wait for one
of them: a step of 3 ms took 20. So a slice of the encoder's layers begins when the steps launched before it end, and
the step launched after it begins when the slice ends. While steps run, slices get a share of the device's time, in
which a waiting image counts as much as a stream.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

LEAST_SHARE = 0.2
"""The encoder's least share of the device's time while steps run, however many streams there are."""

_IDLE = 0.01
"""Seconds after a step's launch until a device without steps counts as idle; the host may be about to launch the
next."""

_LOOK = 0.001
"""Seconds between two looks of the encoder whether the device is idle."""

_SAVED = 0.02
"""The most seconds of its share that the encoder may save up while it waits for steps in flight."""

_MOST_SLICES = 8
"""The most slices of one turn: 20 ms, for which a step waits at most."""


class DeviceTurns:
    """The turns of one device. The engine's thread takes the turns of steps, another one those of slices.

    Args:
        device: a CUDA device.
        clock: gives seconds.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device, self._clock, self._sleep = device, clock, sleep
        self._lock = threading.Lock()
        self._step_end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        timed = {"enable_timing": True, "blocking": True}
        self._began, self._slice_end = torch.cuda.Event(**timed), torch.cuda.Event(**timed)  # type: ignore[no-untyped-call]
        self._stream: torch.cuda.Stream | None = None
        self._streams, self._slices, self._share = 0, 0, 1.0
        self._launched, self._due = -_IDLE, 0.0

    @contextmanager
    def step(self, streams: int) -> Iterator[None]:
        """A turn in which a step is launched, on the current stream. streams: the number of sequences that decode."""
        with self._lock:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._slice_end)
            self._streams = streams
            try:
                yield
            finally:
                self._step_end.record(current)
                self._launched = self._clock()

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Images are encoded in this context, on a CUDA stream of their own; at its end the stream has finished."""
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                if self._slices:
                    self._end_turn()
            self._stream.synchronize()

    @contextmanager
    def slice(self, images: int) -> Iterator[None]:
        """A slice of layers is launched in this context, on the stream of `encoding`. images: how many are being
        encoded or wait. A turn has 2 * images / streams slices, at least one, since two steps are in flight before
        each turn."""
        begins = not self._slices
        if begins:
            self._rest()
            self._lock.acquire()
        self._slices += 1
        if begins:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._step_end)
            self._began.record(current)
        self._share = max(LEAST_SHARE, images / (images + self._streams))
        yield
        if self._slices >= min(2 * images // max(1, self._streams), _MOST_SLICES):
            self._end_turn()

    def _end_turn(self) -> None:
        self._slices = 0
        try:
            self._slice_end.record(torch.cuda.current_stream(self._device))
        finally:
            self._lock.release()
        self._slice_end.synchronize()
        self._due += self._began.elapsed_time(self._slice_end) / 1e3 / self._share

    def _rest(self) -> None:
        """Waits until the encoder has time left, or no step runs."""
        while True:
            now = self._clock()
            if self._step_end.query() and now - self._launched > _IDLE:  # type: ignore[no-untyped-call]
                self._streams, self._due = 0, now
                return
            if now >= self._due:
                self._due = max(self._due, now - _SAVED)
                return
            self._sleep(min(self._due - now, _LOOK))
