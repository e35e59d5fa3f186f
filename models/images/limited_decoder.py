"""Decodes image files in processes that a hostile file cannot leave: without files, sockets and other processes, and
with limits of memory and processor time.

They are kept for the next image, and replaced when a file ends them. Files and pixels go through shared memory.
"""

import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import TypeGuard

from PIL import Image

from quengine.models.images.decode import MAX_BYTES, MAX_PIXELS, MAX_SIDE, ImageError, check_bytes
from quengine.models.template.limited_process import LimitedProcess, ProcessLimits, ProcessStoppedError

logger = logging.getLogger(__name__)

LIMITS = ProcessLimits(cpu_seconds=20.0, memory_bytes=3 << 30, patience_seconds=60.0)
"""Limits for one image; the largest that may be read takes half of the time (`benchmarks/checks/hostile_images.py
--times`)."""
MOST_PROCESSES = 4
"""Most processes at once."""
_WORKER = Path(__file__).with_name("decode_worker.py")
_MEMORY_BYTES = max(MAX_BYTES, 3 * MAX_PIXELS)
_KEPT_BYTES = 16 << 20
"""Bytes of shared memory that are kept between images."""
_LONGEST_ERROR = 300
"""Characters of an error's line."""


class LimitedDecoder:
    """One process, started with its first image. Not safe for several threads.

    Raises ImageError if this process has no more descriptors or addresses.
    """

    def __init__(self, limits: ProcessLimits = LIMITS) -> None:
        try:
            with ExitStack() as made:
                self._descriptor = os.memfd_create("quengine-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                made.callback(os.close, self._descriptor)
                os.ftruncate(self._descriptor, _MEMORY_BYTES)  # taken as it is used
                # A process that shortens the file would end this one, which has it mapped, with SIGBUS.
                fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                self._memory = mmap.mmap(self._descriptor, _MEMORY_BYTES)
                made.pop_all()
        except OSError as failure:
            raise ImageError(f"image: no memory to decode it in: {failure.strerror or failure}") from None
        setup = {"descriptor": self._descriptor, "size": _MEMORY_BYTES}
        self.process = LimitedProcess(_WORKER, setup, limits, (self._descriptor,))

    def start(self) -> None:
        """Start the process now. Raises ProcessStoppedError."""
        self.process.start()

    def decode(self, data: bytes) -> Image.Image:
        """As `decode_image`. Raises ImageError, also where a limit or a fault ends the process."""
        check_bytes(data)
        self._memory[: len(data)] = data
        used = len(data)
        try:
            width, height = self._size(len(data))
            used = max(used, 3 * width * height)
            with memoryview(self._memory) as memory, memory[: 3 * width * height] as pixels:
                return Image.frombytes("RGB", (width, height), pixels)
        except ProcessStoppedError as problem:
            raise ImageError(f"image: a file of {len(data)} bytes cannot be decoded: {problem}") from None
        finally:
            if used > _KEPT_BYTES:
                self._memory.madvise(mmap.MADV_REMOVE)

    def _size(self, nbytes: int) -> tuple[int, int]:
        """The sides of the image whose pixels are in the memory now. Raises ImageError and ProcessStoppedError."""
        try:
            answer = self.process.ask({"size": nbytes})
        except (ValueError, RecursionError):
            answer = {}
        if not isinstance(answer, dict):
            answer = {}
        if "unsealed" in answer:
            _warn_unsealed(_line(answer["unsealed"]))
        if "error" in answer:
            raise ImageError(_line(answer["error"]))
        width, height = answer.get("width"), answer.get("height")
        if not (_is_side(width) and _is_side(height) and width * height <= MAX_PIXELS):
            raise ProcessStoppedError("it gives no size in pixels")
        return width, height

    def close(self) -> None:
        """End the process and give back the memory."""
        self.process.close()
        self._memory.close()
        os.close(self._descriptor)


def _line(error: object) -> str:
    """An error of the process, which a file may have taken over, as one short line."""
    return " ".join(str(error)[:_LONGEST_ERROR].split())


@cache
def _warn_unsealed(why: str) -> None:
    """Warns, once for each reason, that the processes could not give up system calls."""
    logger.warning("the process that decodes image files has limits, but may open files and sockets: %s", why)


def _is_side(side: object) -> TypeGuard[int]:
    """Whether an answer of the process, which a file may have taken over, is a side of an image."""
    return isinstance(side, int) and 0 < side <= MAX_SIDE


class LimitedDecoders:
    """A process for each thread that decodes at the same time, up to MOST_PROCESSES; further threads wait."""

    def __init__(self) -> None:
        self._turns, self._lock = BoundedSemaphore(MOST_PROCESSES), Lock()
        self._free = list[LimitedDecoder]()

    def decode(self, data: bytes) -> Image.Image:
        """As `LimitedDecoder.decode`."""
        with self._taken() as decoder:
            return decoder.decode(data)

    def start(self) -> None:
        """Starts a process for the first image, unless there is one."""
        with (
            suppress(ProcessStoppedError, ImageError),
            self._taken() as decoder,
        ):  # the first image has that error
            decoder.start()

    def stop(self) -> None:
        """End the processes that decode nothing now; another one starts with the next image."""
        with self._lock:
            free, self._free = self._free, []
        for decoder in free:
            decoder.close()

    @contextmanager
    def _taken(self) -> Iterator[LimitedDecoder]:
        """The decoder that was used last."""
        with self._turns:
            with self._lock:
                decoder = self._free.pop() if self._free else None
            decoder = decoder or LimitedDecoder()
            try:
                yield decoder
            finally:
                with self._lock:
                    self._free.append(decoder)


_decoders = LimitedDecoders()


def decode_limited(data: bytes) -> Image.Image:
    """The image in `data` as `decode_image` gives it, decoded in one of this process's limited ones.

    Raises:
        ImageError: as `decode_image`; or the process crashed, or took too much time or memory.
    """
    return _decoders.decode(data)


def start_decoder() -> None:
    """Starts a limited process, unless there is one, so that the first image need not wait for it."""
    _decoders.start()


def stop_decoders() -> None:
    """Ends those of this process's limited processes that decode nothing now."""
    _decoders.stop()
