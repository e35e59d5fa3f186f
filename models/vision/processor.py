"""Prepares the bytes of an image for an encoder, on the CPU and without weights."""

import hashlib
from dataclasses import dataclass

from torch import Tensor

from quengine.models.images.limited_decoder import decode_limited
from quengine.models.vision.projector import Projector
from quengine.models.vision.settings import VisionSettings


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image as the encoder takes it, and the part of a prompt that it becomes.

    digest: SHA-256 over the file's bytes, the projector file and the preprocessing.
    pixels: fp32 [units, 3, H, W], or units [3, H, W] of different sizes; a unit is a tile, or the image. Rows attend to
    one another within a unit.
    layout: what replaces an image's marker: text of special tokens, and counts of rows, which are taken in order.
    grid: (t, h, w) in rows, for a model that rotates by three positions; None: rows have consecutive positions.
    bidirectional: rows of the image attend to one another both ways in the text model.
    """

    digest: bytes
    pixels: Tensor | tuple[Tensor, ...]
    layout: tuple[str | int, ...]
    grid: tuple[int, int, int] | None
    bidirectional: bool

    @property
    def rows(self) -> int:
        """Rows of the prompt that the encoder makes."""
        return sum(part for part in self.layout if isinstance(part, int))

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """The shape [3, H, W] of each unit."""
        return tuple((int(unit.shape[0]), int(unit.shape[1]), int(unit.shape[2])) for unit in self.pixels)


class ImageProcessor:
    """The preprocessing of a projector. marker: stands for an image in a prompt. identity: of the projector's file."""

    def __init__(self, projector: Projector, settings: VisionSettings, identity: bytes) -> None:
        self._projector, self.marker = projector, projector.marker
        self.settings = settings
        self._identity = identity + repr(settings).encode()

    def prepare(self, data: bytes) -> PreparedImage:
        """The image file `data` (JPEG, PNG, WebP, GIF), decoded, resized and normalized.

        Raises:
            ImageError: it cannot be read, or is beyond a limit.
        """
        digest = hashlib.sha256(hashlib.sha256(self._identity).digest() + data).digest()
        made = self._projector.arrange(decode_limited(data), self.settings)
        return PreparedImage(
            digest, made.pixels, made.layout, made.grid, self._projector.bidirectional(self.settings)
        )
