"""Idefics3 and SmolVLM: SigLIP over square tiles of an image and the whole of it, pixel shuffle, one matrix.

Definition: `transformers` models/idefics3 and models/smolvlm (Idefics3ImageProcessor, Idefics3VisionTransformer,
Idefics3Connector). An image is resized to its longest edge, then to multiples of a tile's side, and cut into tiles;
the last unit is the whole image in one tile.
"""

from collections.abc import Generator
from dataclasses import dataclass
from math import ceil

import torch
from PIL import Image
from torch import Tensor

from quengine.kernels.vision_rows import Norm
from quengine.models.gguf.file import GGUFFile
from quengine.models.vision.blocks import (
    HF_ACTIVATIONS,
    Linear,
    UnitGrid,
    linear,
    merged,
    norm,
    patch_linear,
    patches,
)
from quengine.models.vision.files import Weights
from quengine.models.vision.pixels import normalized, resized
from quengine.models.vision.projector import Arranged, Projector
from quengine.models.vision.settings import (
    LANCZOS,
    MAX_IMAGE_SIDE,
    Keys,
    VisionSettings,
    folder_settings,
    gguf_settings,
)
from quengine.models.vision.siglip import SIGLIP_DEFAULTS, siglip_blocks, siglip_names
from quengine.models.vision.vision_block import VisionBlock, through

MAX_SIDE = 4096
"""Largest edge in pixels, whatever the settings say."""
_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


def _gguf(file: GGUFFile) -> VisionSettings:
    size = file.require_int("clip.vision.image_size", 1, MAX_IMAGE_SIDE)
    longest = file.get_int("clip.vision.preproc_image_size", 1, MAX_IMAGE_SIDE) or size
    merge = file.require_int("clip.vision.projector.scale_factor", 1, 64)
    settings = gguf_settings(file, "idefics3", merge=merge, resample=LANCZOS, tile=size, longest_edge=longest)
    if settings.tile // settings.patch % merge:
        raise file.error("clip.vision.projector.scale_factor", f"{merge} does not divide a tile's patches")
    return settings


def _folder(config: Keys, vision: Keys, processor: Keys) -> VisionSettings:
    vision.only("hidden_act", *HF_ACTIVATIONS)
    merge = config.integer("scale_factor", 1, 64) if config.get("scale_factor") is not None else 2
    settings = folder_settings(
        "idefics3",
        config,
        vision,
        processor,
        merge=merge,
        activation=HF_ACTIVATIONS[str(vision.get("hidden_act"))],
        tile=processor.of("max_image_size").integer("longest_edge", 1, MAX_IMAGE_SIDE),
        longest_edge=processor.of("size").integer("longest_edge", 1, MAX_IMAGE_SIDE),
        split=processor.flag("do_image_splitting"),
    )
    if settings.tile % settings.patch or settings.tile // settings.patch % merge:
        raise processor.error(
            "max_image_size", f"{settings.tile} pixels are no whole number of merged patches"
        )
    return settings


def arrange(image: Image.Image, settings: VisionSettings) -> Arranged:
    """The tiles and the whole image, [tiles + 1, 3, tile, tile]; for an image of one tile only that tile."""
    tile = settings.tile
    rows = cols = 0
    image = resized(image, *_longest(image.height, image.width, settings), settings.resample)
    if settings.split:
        image = resized(image, *_tiled(image.height, image.width, tile), settings.resample)
        if max(image.size) > tile:
            rows, cols = image.height // tile, image.width // tile
    boxes = [(c * tile, r * tile, (c + 1) * tile, (r + 1) * tile) for r in range(rows) for c in range(cols)]
    units = [image.crop(box) for box in boxes] + [resized(image, tile, tile, settings.resample)]
    pixels = [normalized(unit, settings.mean, settings.std, settings.rescale) for unit in units]
    count = (tile // settings.patch // settings.merge) ** 2
    return Arranged(torch.stack(pixels), _layout(rows, cols, count))


def _longest(height: int, width: int, settings: VisionSettings) -> tuple[int, int]:
    """(height, width) with the longest edge that the settings have, the other one even, and at most MAX_SIDE."""
    wide = width >= height
    height, width = _at_edge(height, width, settings.longest_edge)
    height, width = (height + height % 2, width) if wide else (height, width + width % 2)
    height, width = max(height, 1), max(width, 1)
    return _at_edge(height, width, MAX_SIDE) if max(height, width) > MAX_SIDE else (height, width)


def _at_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    ratio = width / height
    return (int(edge / ratio), edge) if width >= height else (edge, int(edge * ratio))


def _tiled(height: int, width: int, tile: int) -> tuple[int, int]:
    """(height, width) in whole tiles: the longer side rounded up, the other from it by the ratio, also rounded up."""
    ratio = width / height
    if width >= height:
        width = ceil(width / tile) * tile
        return ceil(int(width / ratio) / tile) * tile, width
    height = ceil(height / tile) * tile
    return height, ceil(int(height * ratio) / tile) * tile


def _layout(rows: int, cols: int, count: int) -> tuple[str | int, ...]:
    layout: list[str | int] = []
    text = ""
    for row in range(rows):
        for col in range(cols):
            layout += [f"{text}{_FAKE}<row_{row + 1}_col_{col + 1}>", count]
            text = ""
        text = "\n"
    whole = f"{text}\n" if rows else ""
    return (*layout, f"{whole}{_FAKE}{_GLOBAL}", count, _FAKE)


@dataclass(frozen=True, eq=False)
class Idefics3:
    """The encoder: patches with learned positions, blocks, a norm, squares of patches as one row, a matrix."""

    settings: VisionSettings
    embed: Linear
    positions: Tensor
    blocks: tuple[VisionBlock, ...]
    post_norm: Norm
    project: Linear

    def grid(self, height: int, width: int) -> UnitGrid:
        return UnitGrid(height, width, self.positions[self._position_ids(height, width)])

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, tile, tile] -> [B, rows, text_size]."""
        x = grid.placed(self.embed(patches(pixels.to(self.positions.dtype), self.settings.patch)))
        x = yield from through(self.blocks, x.flatten(1, 2), grid)
        x = self.post_norm(x).view(-1, grid.height, grid.width, x.shape[-1])
        return self.project(merged(x, self.settings.merge)).flatten(1, 2)

    def _position_ids(self, height: int, width: int) -> Tensor:
        """Position ids [height, width] of a grid. A grid of another size than the table takes the ids at the same
        fractions, computed in fp32 as in `transformers`."""
        side = self.settings.image_size // self.settings.patch
        boundaries = torch.arange(1 / side, 1.0, 1 / side)
        ids = []
        for count in (height, width):
            fractions = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
            ids.append(torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True))
        return (ids[0][:, None] * side + ids[1]).to(self.positions.device)


def _encoder(weights: Weights, settings: VisionSettings) -> Idefics3:
    size, merge = settings.width, settings.merge
    count = (settings.image_size // settings.patch) ** 2
    return Idefics3(
        settings,
        patch_linear(weights, size, settings.patch),
        weights.tensor("v.position_embd.weight", count, size),
        siglip_blocks(weights, settings),
        norm(weights, "v.post_ln", size, settings.eps),
        linear(weights, "mm.model.fc", settings.text_size, size * merge * merge),
    )


IDEFICS3 = Projector(
    name="idefics3",
    marker="<image>",
    hf_types=("idefics3", "smolvlm"),
    gguf=_gguf,
    folder=_folder,
    vision_defaults=SIGLIP_DEFAULTS | {"intermediate_size": 3072, "patch_size": 32},
    processor_defaults={
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "do_image_splitting": True,
        "resample": LANCZOS,
    },
    hf_names=lambda _: {
        **siglip_names(("vision_model.",)),
        "mm.model.fc.weight": ("connector.modality_projection.proj.weight",),
    },
    hf_parts=("vision_model.", "connector."),
    arrange=arrange,
    encoder=_encoder,
)
