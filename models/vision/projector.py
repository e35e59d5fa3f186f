"""The declaration of a projector: which files it is in, how images are prepared for it, and what computes it."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from PIL import Image
from torch import Tensor

from quengine.models.gguf.file import GGUFFile
from quengine.models.vision.blocks import UnitGrid
from quengine.models.vision.files import Change, Weights
from quengine.models.vision.settings import Keys, VisionSettings


@dataclass(frozen=True, eq=False)
class Arranged:
    """A prepared image's pixels, layout and grid (`processor.PreparedImage`)."""

    pixels: Tensor | tuple[Tensor, ...]
    layout: tuple[str | int, ...]
    grid: tuple[int, int, int] | None = None


class ImageEncoder(Protocol):
    """A vision encoder and its projector with weights."""

    def grid(self, height: int, width: int) -> UnitGrid:
        """The part of a unit that follows from its `height` x `width` patches, on the device."""
        ...

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, H, W] on the device -> [B, rows, text_size * (1 + deepstack)], fp32 or wider.

        Yields after each layer. Computes from `grid` and `pixels` on the device alone, so that it can be captured.
        """
        ...


@dataclass(frozen=True)
class Projector:
    """A kind of projector.

    name: `clip.projector_type` in GGUF. marker: what the model's chat template writes for an image; the layout replaces
    it. hf_types: `model_type` in config.json. hf_vision: `model_type` in its vision_config, where models of these types
    have several. gguf, folder: read the settings; folder is given config.json, its vision_config and the image
    processor's configuration. vision_defaults, processor_defaults: what `transformers` takes for absent keys of the
    latter two. hf_names, hf_changes, hf_parts, hf_ignored: see `files.FolderSource`. gguf_ignored: tensors that a GGUF
    file may have and nothing needs. arrange: RGB image -> pixels and layout. encoder: makes the encoder from weights.
    bidirectional: rows of an image attend to one another both ways in the text model. deepstack: extra vectors per row.
    """

    name: str
    marker: str
    hf_types: tuple[str, ...]
    gguf: Callable[[GGUFFile], VisionSettings]
    folder: Callable[[Keys, Keys, Keys], VisionSettings]
    vision_defaults: Mapping[str, object]
    processor_defaults: Mapping[str, object]
    hf_names: Callable[[VisionSettings], Mapping[str, tuple[str, ...]]]
    hf_parts: tuple[str, ...]
    arrange: Callable[[Image.Image, VisionSettings], Arranged]
    encoder: Callable[[Weights, VisionSettings], ImageEncoder]
    hf_changes: Mapping[str, Change] = field(default_factory=dict)
    hf_ignored: tuple[str, ...] = ()
    hf_vision: tuple[str, ...] = ()
    gguf_ignored: tuple[str, ...] = ()
    bidirectional: Callable[[VisionSettings], bool] = lambda _: False
    deepstack: Callable[[VisionSettings], int] = lambda _: 0
