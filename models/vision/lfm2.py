"""LFM2-VL: SigLIP 2 over images of any size, tiles of large ones and the whole, pixel unshuffle, two matrices.

Definition: `transformers` models/lfm2_vl (Lfm2VlImageProcessor, Lfm2VlMultiModalProjector) and models/siglip2. That
image processor resizes with torchvision, which rounds a few pixels differently from Pillow.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from math import isqrt

import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor

from quengine.kernels.vision_rows import Norm
from quengine.models.gguf.file import GGUFFile
from quengine.models.vision.blocks import (
    HF_ACTIVATIONS,
    Linear,
    Mlp,
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
from quengine.models.vision.qwen_images import sized
from quengine.models.vision.settings import BILINEAR, Keys, VisionSettings, folder_settings, gguf_settings
from quengine.models.vision.siglip import SIGLIP_DEFAULTS, siglip_blocks, siglip_names
from quengine.models.vision.tiles import cut_tiles, tile_counts
from quengine.models.vision.vision_block import VisionBlock, through

_MIN_ROWS, _MAX_ROWS = 64, 256
_TILE, _MIN_TILES, _MAX_TILES, _TOLERANCE = 512, 2, 10, 2.0
_NORM_EPS = 1e-5
"""torch's default, which the projector's LayerNorm has."""


def _gguf(file: GGUFFile) -> VisionSettings:
    merge = file.get_int("clip.vision.projector.scale_factor", 1, 64) or 2
    settings = gguf_settings(
        file,
        "lfm2",
        merge=merge,
        resample=BILINEAR,
        tile=_TILE,
        features={"tiles": (_MIN_TILES, _MAX_TILES), "tolerance": _TOLERANCE, "thumbnail": True},
    )
    step = (settings.patch * merge) ** 2
    least = file.get_int("clip.vision.image_min_pixels") or _MIN_ROWS * step
    most = file.get_int("clip.vision.image_max_pixels") or _MAX_ROWS * step
    return replace(settings, min_pixels=min(least, most), max_pixels=most)


def _folder(config: Keys, vision: Keys, processor: Keys) -> VisionSettings:
    vision.only("hidden_act", *HF_ACTIVATIONS)
    config.only("projector_hidden_act", None, "gelu")
    config.only("vision_feature_layer", None, -1)
    merge = config.integer("downsample_factor", 1, 64) if config.get("downsample_factor") is not None else 2
    patch = vision.integer("patch_size")
    processor.only("encoder_patch_size", patch)
    processor.only("downsample_factor", merge)
    tiles = processor.integer("min_tiles", 1, 64), processor.integer("max_tiles", 1, 64)
    if tiles[0] > tiles[1]:
        raise processor.error("min_tiles", f"{tiles[0]} is over max_tiles, {tiles[1]}")
    split = processor.flag("do_image_splitting") and tiles != (1, 1)
    step = (patch * merge) ** 2
    return folder_settings(
        "lfm2",
        config,
        vision,
        processor,
        image_size=isqrt(vision.integer("num_patches")) * patch,
        merge=merge,
        activation=HF_ACTIVATIONS[str(vision.get("hidden_act"))],
        tile=processor.integer("tile_size", patch * merge, 1 << 14),
        split=split,
        min_pixels=processor.integer("min_image_tokens") * step,
        max_pixels=processor.integer("max_image_tokens") * step,
        features={
            "tiles": tiles,
            "tolerance": processor.number("max_pixels_tolerance"),
            "thumbnail": processor.flag("use_thumbnail"),
        },
    )


def arrange(image: Image.Image, settings: VisionSettings) -> Arranged:
    """The image in whole merged patches; a large one as tiles, then the whole image."""
    step = settings.patch * settings.merge
    size = sized(image.height, image.width, step, settings, least=step)
    cols, rows = _tiles(image, settings) if settings.split else (1, 1)
    units = cut_tiles(image, cols, rows, settings.tile, settings.resample) if cols * rows > 1 else []
    of_tile = (settings.tile // step) ** 2
    layout: list[str | int] = []
    text = "<|image_start|>"
    for index in range(len(units)):
        layout += [f"{text}<|img_row_{index // cols + 1}_col_{index % cols + 1}|>", of_tile]
        text = ""
    if not units or settings.features["thumbnail"]:
        text += "<|img_thumbnail|>" if units else ""
        layout += [text, size[0] // step * (size[1] // step)]
        units.append(resized(image, *size, settings.resample))
    pixels = tuple(normalized(unit, settings.mean, settings.std, settings.rescale) for unit in units)
    return Arranged(pixels, (*layout, "<|image_end|>"))


def _tiles(image: Image.Image, settings: VisionSettings) -> tuple[int, int]:
    """(columns, rows) of an image that is too large for one unit; (1, 1) of any other."""
    step, patch = settings.patch * settings.merge, settings.patch
    height, width = (max(patch, round(side / step) * step) for side in (image.height, image.width))
    if height * width <= settings.max_pixels * settings.features["tolerance"]:
        return 1, 1
    return tile_counts(image.width, image.height, settings.tile, *settings.features["tiles"])


@dataclass(frozen=True, eq=False)
class Lfm2:
    """The encoder. project_norm: absent in some models."""

    settings: VisionSettings
    embed: Linear
    positions: Tensor
    blocks: tuple[VisionBlock, ...]
    post_norm: Norm
    project_norm: Norm | None
    project: Mlp

    def grid(self, height: int, width: int) -> UnitGrid:
        return UnitGrid(height, width, self._positions(height, width))

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, H, W] -> [B, rows, text_size]."""
        x = grid.placed(self.embed(patches(pixels.to(self.positions.dtype), self.settings.patch)))
        x = yield from through(self.blocks, x.flatten(1, 2), grid)
        x = self.post_norm(x).view(-1, grid.height, grid.width, self.settings.width)
        x = merged(x, self.settings.merge).flatten(1, 2)
        return self.project(x if self.project_norm is None else self.project_norm(x))

    def _positions(self, height: int, width: int) -> Tensor:
        """[height, width, D] of the square table, in fp32."""
        side = isqrt(len(self.positions))
        table = self.positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        found = F.interpolate(table, (height, width), mode="bilinear", align_corners=False, antialias=True)
        return found[0].permute(1, 2, 0).to(self.positions.dtype)


def _encoder(weights: Weights, settings: VisionSettings) -> Lfm2:
    size, wide = settings.width, settings.width * settings.merge**2
    hidden = weights.count("mm.1.weight") // wide
    has_norm = weights.has("mm.input_norm.weight")
    up, down = linear(weights, "mm.1", hidden, wide), linear(weights, "mm.2", settings.text_size, hidden)
    return Lfm2(
        settings,
        patch_linear(weights, size, settings.patch),
        weights.tensor("v.position_embd.weight", (settings.image_size // settings.patch) ** 2, size),
        siglip_blocks(weights, settings),
        norm(weights, "v.post_ln", size, settings.eps),
        norm(weights, "mm.input_norm", wide, _NORM_EPS) if has_norm else None,
        Mlp(up, down, "gelu"),
    )


def as_convolution(weight: Tensor, settings: VisionSettings) -> Tensor:
    """The patch embedding from [N, patch * patch * 3], channels last, to [N, 3, patch, patch]."""
    return weight.view(len(weight), settings.patch, settings.patch, 3).permute(0, 3, 1, 2)


_PROJECTOR = {"mm.input_norm": "layer_norm", "mm.1": "linear_1", "mm.2": "linear_2"}

LFM2 = Projector(
    name="lfm2",
    marker="<image>",
    hf_types=("lfm2_vl",),
    gguf=_gguf,
    folder=_folder,
    vision_defaults=SIGLIP_DEFAULTS
    | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_patches": 256},
    processor_defaults={
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "resample": BILINEAR,
        "encoder_patch_size": 16,
        "downsample_factor": 2,
        "do_image_splitting": True,
        "min_tiles": _MIN_TILES,
        "max_tiles": _MAX_TILES,
        "use_thumbnail": True,
        "min_image_tokens": _MIN_ROWS,
        "max_image_tokens": _MAX_ROWS,
        "tile_size": _TILE,
        "max_pixels_tolerance": _TOLERANCE,
    },
    hf_names=lambda _: (
        siglip_names(("vision_tower.vision_model.", "vision_tower."))
        | {
            f"{ours}.{end}": (f"multi_modal_projector.{theirs}.{end}",)
            for ours, theirs in _PROJECTOR.items()
            for end in ("weight", "bias")
        }
    ),
    hf_parts=("vision_tower.", "multi_modal_projector."),
    hf_changes={"v.patch_embd.weight": as_convolution},
    hf_ignored=(".head.",),
    arrange=arrange,
    encoder=_encoder,
)
