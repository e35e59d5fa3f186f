"""Images of all requests on their way through the encoder: in a thread and on a stream of its own, beside steps.

Images wait in the order in which they come. Those of one size are encoded together, of whichever requests, in slices
of some layers that take turns with steps (`runners/device_turns.py`).
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quengine.runners.device_turns import DeviceTurns

if TYPE_CHECKING:
    from quengine.models.vision import PreparedImage

logger = logging.getLogger(__name__)

TOGETHER = 1 << 20
"""Pixels of the images that are encoded together: one of 1024 x 1024, which keeps an H200 busy, or 16 of 256 x 256."""


_NICE = 5
"""Of the thread that encodes on the CPU: it has a quarter of a processor that a thread which decodes wants as well."""


class Encoder(Protocol):
    """`models.vision.VisionModel`, as far as images that wait need it."""

    def encode(
        self, images: Seq["PreparedImage"], turn: Callable[[], AbstractContextManager[object]]
    ) -> list[Tensor]: ...


class ImageQueue:
    """Encodes images in the order in which they come. Threads may share it.

    Args:
        vision: the encoder.
        turns: those of the steps, on a CUDA device; None: the encoder is on the CPU.
        alone: each image by itself, so that its features follow from it alone to the last bit.

    Attributes:
        encoded: number of images that were encoded.
        batches: number of times that some were encoded together, or one alone.
    """

    def __init__(self, vision: Encoder, turns: DeviceTurns | None, alone: bool) -> None:
        self._vision, self._turns, self._alone = vision, turns, alone
        self._waiting: deque[tuple[PreparedImage, Future[Tensor]]] = deque()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "images", initializer=_yield_to_steps if turns is None else None)
        self.encoded = self.batches = 0

    def add(self, images: Seq["PreparedImage"]) -> list["Future[Tensor]"]:
        """The features of each image, once it is encoded: fp32 [rows, text_size * (1 + deepstack)] on the
        encoder's device."""
        added = [(image, Future[Tensor]()) for image in images]
        with self._lock:
            self._waiting.extend(added)
        self._thread.submit(self._encode_waiting)
        return [future for _, future in added]

    def close(self) -> None:
        """Ends the thread, once it has encoded what waits."""
        self._thread.shutdown()

    def _encode_waiting(self) -> None:
        while batch := self._next():
            try:
                values = self._encoded([image for image, _ in batch])
            except BaseException as error:
                for _, future in batch:
                    future.set_exception(error)
                continue
            self.encoded, self.batches = self.encoded + len(batch), self.batches + 1
            for (_, future), rows in zip(batch, values, strict=True):
                future.set_result(rows)

    def _next(self) -> list[tuple["PreparedImage", "Future[Tensor]"]]:
        """The image that has waited longest, with others of its size up to TOGETHER pixels."""
        with self._lock:
            if not self._waiting:
                return []
            first = self._waiting[0][0].shapes
            pixels = sum(height * width for _, height, width in first)
            most = 1 if self._alone else max(1, TOGETHER // pixels)
            batch = [each for each in self._waiting if each[0].shapes == first][:most]
            for each in batch:
                self._waiting.remove(each)
        return batch

    def _encoded(self, images: Seq["PreparedImage"]) -> list[Tensor]:
        turns, waiting = self._turns, self._waiting
        with torch.no_grad(), nullcontext() if turns is None else turns.encoding():
            turn = nullcontext if turns is None else lambda: turns.slice(len(images) + len(waiting))
            values = [rows.float() for rows in self._vision.encode(images, turn)]
        logger.info("%d images encoded to %s rows", len(images), ", ".join(str(len(v)) for v in values))
        return values


def _yield_to_steps() -> None:
    """Lowers the priority of this thread, and of those that its operations start: on a processor that decodes as well,
    steps would wait for a turn of the scheduler's, which is longer than they are."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
