"""The queue of images that wait for the encoder, which has a thread and a CUDA stream of its own beside the steps.

Images are encoded in the order in which they come, those of one size together, whatever their requests. On a CUDA
device the encoder takes turns with the steps after every few layers (`runners/device_turns.py`).
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
"""The nice value of the encoding thread on the CPU: it gets a quarter of a core that a decoding thread wants too."""


class Encoder(Protocol):
    """The part of `models.vision.VisionModel` that the queue uses."""

    def encode(
        self, images: Seq["PreparedImage"], turn: Callable[[], AbstractContextManager[object]]
    ) -> list[Tensor]: ...


class ImageQueue:
    """Encodes images in the order in which they come. Threads may share it.

    Args:
        vision: the encoder.
        turns: the turns that it takes with the steps on a CUDA device; None: the encoder is on the CPU.
        alone: each image is encoded by itself, so that the bits of its features depend on no other image.

    Attributes:
        encoded: number of images that were encoded.
        batches: number of batches, each of one image or more.
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
        """Ends the thread once it has encoded the images that wait."""
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
    """Lowers the priority of this thread, and of those that its operations start. On a processor that decodes as well,
    a step would otherwise wait for a time slice of the system's scheduler, which is longer than the step."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
