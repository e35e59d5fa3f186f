"""A vision encoder with its projector on a device: prepared images in, rows of the text model out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.models.vision.processor import ImageProcessor, PreparedImage
from quengine.models.vision.projector import ImageEncoder

MAX_PATCHES = 1 << 14
"""Patches that are encoded at once: four images of 1024 x 1024 pixels with patches of 16."""


class VisionModel:
    """An encoder of any projector.

    projector: its name. marker: the text that stands for an image in a prompt. text_size: the width of a row as the
    text model takes it. deepstack: extra vectors a row, which are added to the rows of the text model's first layers;
    0: none.
    """

    def __init__(
        self, processor: ImageProcessor, encoder: ImageEncoder, deepstack: int, device: torch.device
    ) -> None:
        self.processor = processor
        self.projector, self.marker = processor.settings.projector, processor.marker
        self.text_size = processor.settings.text_size
        self.deepstack = deepstack
        self.device = device
        self._encoder = encoder

    def prepare(self, data: bytes) -> PreparedImage:
        """The image file `data` as the encoder takes it, made on the CPU. Raises ImageError."""
        return self.processor.prepare(data)

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        """The rows of each image, fp32 [rows, text_size * (1 + deepstack)] on the device.

        Units of equal size, of whichever images, are encoded together, up to MAX_PATCHES patches. A row of deepstack is
        the row itself, then what layer 0, 1, ... of the text model adds to it.
        """
        units = [(index, unit) for index, image in enumerate(images) for unit in image.pixels]
        groups: dict[tuple[int, ...], list[int]] = {}
        for at, (_, unit) in enumerate(units):
            groups.setdefault(tuple(unit.shape), []).append(at)
        rows: dict[int, Tensor] = {}
        for shape, members in groups.items():
            step = self._units_at_once(shape)
            for start in range(0, len(members), step):
                part = members[start : start + step]
                pixels = torch.stack([units[at][1] for at in part]).to(self.device)
                rows |= dict(zip(part, self._encoder(pixels), strict=True))
        of_image: list[list[Tensor]] = [[] for _ in images]
        for at, (index, _) in enumerate(units):
            of_image[index].append(rows[at])
        return [torch.cat(parts) for parts in of_image]

    def _units_at_once(self, shape: tuple[int, ...]) -> int:
        patch = self.processor.settings.patch
        return max(1, MAX_PATCHES // max(1, shape[-1] * shape[-2] // (patch * patch)))
