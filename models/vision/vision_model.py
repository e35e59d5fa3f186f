"""A vision encoder with its projector on a device: prepared images in, rows of the text model out."""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice

import torch
from torch import Tensor

from quengine.models.vision.blocks import UnitGrid
from quengine.models.vision.encoder_graphs import EncoderGraphs, Turn, in_slices
from quengine.models.vision.processor import ImageProcessor, PreparedImage
from quengine.models.vision.projector import ImageEncoder

MAX_PATCHES = 1 << 14
"""Most patches that are encoded at once: four images of 1024 x 1024 pixels with patches of 16."""
COMMON_SIDE = 1024
"""Side, in pixels, of the images that memory is reserved for."""
SLICE = 1 << 14
"""Patches times layers of a slice: it takes 2 ms on an H200 with layers of width 1,152."""
_GRIDS = 16


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
        self._graphs = EncoderGraphs(encoder, device) if device.type == "cuda" else None
        self._grids: OrderedDict[tuple[int, int], UnitGrid] = OrderedDict()

    @property
    def workspace(self) -> int:
        """Bytes that encoding an image of COMMON_SIDE takes on a CUDA device beside the weights: once launched kernel
        by kernel and once captured, as each has its own memory."""
        settings = self.processor.settings
        if self.device.type != "cuda":
            return 0
        # A row's fp32 stream; in fp16 its norm, product and parts of queries, keys and values, attention and result;
        # in fp16 the products of up and gate, and their combination.
        row = 22 * settings.width + 6 * settings.feed_forward
        return 2 * row * (COMMON_SIDE // settings.patch) ** 2

    def prepare(self, data: bytes) -> PreparedImage:
        """The image file `data` as the encoder takes it, made on the CPU. Raises ImageError."""
        return self.processor.prepare(data)

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage], turn: Turn = nullcontext) -> list[Tensor]:
        """The rows of each image, fp32 [rows, text_size * (1 + deepstack)] on the device. One thread at a time may call
        it.

        Units of equal size, of whichever images, are encoded together, up to MAX_PATCHES patches. With deepstack a
        result's row holds the row itself, then what layers 0, 1, ... of the text model add to it. turn: entered once
        for each slice of layers: patches times layers are at most SLICE, or it is one layer.
        """
        units = [(index, unit) for index, image in enumerate(images) for unit in image.pixels]
        groups: dict[tuple[int, ...], list[int]] = {}
        for at, (_, unit) in enumerate(units):
            groups.setdefault(tuple(unit.shape), []).append(at)
        rows: dict[int, Tensor] = {}
        for shape, members in groups.items():
            left = iter(members)
            while part := list(islice(left, self._units_at_once(shape))):
                made = self._rows([units[at][1] for at in part], turn)
                rows |= dict(zip(part, made, strict=True))
        of_image: list[list[Tensor]] = [[] for _ in images]
        for at, (index, _) in enumerate(units):
            of_image[index].append(rows[at])
        return [torch.cat(parts) for parts in of_image]

    def _rows(self, units: Sequence[Tensor], turn: Turn) -> Tensor:
        """units [3, H, W] of one size in host memory -> [units, rows, N] on the device."""
        patch = self.processor.settings.patch
        grid = self._grid(units[0].shape[-2] // patch, units[0].shape[-1] // patch)
        layers = max(1, SLICE // (len(units) * grid.height * grid.width))
        if self._graphs is not None:
            return self._graphs.rows(units, grid, layers, turn)
        return in_slices(self._encoder.layers(torch.stack(list(units)), grid), layers, turn)

    def _grid(self, height: int, width: int) -> UnitGrid:
        key = height, width
        if key not in self._grids:
            self._grids[key] = self._encoder.grid(height, width)
        self._grids.move_to_end(key)
        if len(self._grids) > _GRIDS:
            self._grids.popitem(last=False)
        return self._grids[key]

    def _units_at_once(self, shape: tuple[int, ...]) -> int:
        patch = self.processor.settings.patch
        return max(1, MAX_PATCHES // max(1, shape[-1] * shape[-2] // (patch * patch)))
