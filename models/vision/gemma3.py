"""Gemma 3: SigLIP over one square of the image, averaged squares of patches, RMSNorm and a matrix.

Definition: `transformers` models/gemma3 (Gemma3ImageProcessor, Gemma3MultiModalProjector). Rows of an image attend to
one another both ways in the text model.
"""

from collections.abc import Generator
from dataclasses import dataclass
from math import isqrt

from PIL import Image
from torch import Tensor

from quengine.kernels.vision_rows import Norm
from quengine.models.gguf.file import GGUFFile
from quengine.models.vision.blocks import HF_ACTIVATIONS, Linear, UnitGrid, norm, patch_linear, patches
from quengine.models.vision.files import Weights
from quengine.models.vision.pixels import normalized, resized
from quengine.models.vision.projector import Arranged, Projector
from quengine.models.vision.settings import BILINEAR, Keys, VisionSettings, folder_settings, gguf_settings
from quengine.models.vision.siglip import SIGLIP_DEFAULTS, siglip_blocks, siglip_names
from quengine.models.vision.vision_block import VisionBlock, through


def _gguf(file: GGUFFile) -> VisionSettings:
    merge = file.get_int("clip.vision.projector.scale_factor", 1, 64) or 4
    settings = gguf_settings(file, "gemma3", merge=merge, resample=BILINEAR)
    if settings.image_size // settings.patch % merge:
        raise file.error(
            "clip.vision.projector.scale_factor", f"{merge} does not divide the patches of a side"
        )
    return settings


def _folder(config: Keys, vision: Keys, processor: Keys) -> VisionSettings:
    vision.only("hidden_act", *HF_ACTIVATIONS)
    processor.only("do_pan_and_scan", None, False)
    count = config.integer("mm_tokens_per_image", 1, 1 << 16) if config.get("mm_tokens_per_image") else 256
    side, step = vision.integer("image_size") // vision.integer("patch_size"), isqrt(count)
    if step * step != count or side % step:
        raise config.error("mm_tokens_per_image", f"{count} rows are no squares of {side} x {side} patches")
    settings = folder_settings(
        "gemma3",
        config,
        vision,
        processor,
        merge=side // step,
        activation=HF_ACTIVATIONS[str(vision.get("hidden_act"))],
    )
    size = processor.of("size")
    size.only("height", settings.image_size)
    size.only("width", settings.image_size)
    return settings


def arrange(image: Image.Image, settings: VisionSettings) -> Arranged:
    """The image resized to the encoder's square, [1, 3, size, size], whatever its ratio of sides."""
    size = settings.image_size
    image = resized(image, size, size, settings.resample)
    count = (size // settings.patch // settings.merge) ** 2
    layout = ("\n\n<start_of_image>", count, "<end_of_image>\n\n")
    return Arranged(normalized(image, settings.mean, settings.std, settings.rescale)[None], layout)


@dataclass(frozen=True, eq=False)
class Gemma3:
    """The encoder."""

    settings: VisionSettings
    embed: Linear
    positions: Tensor
    blocks: tuple[VisionBlock, ...]
    post_norm: Norm
    project_norm: Norm
    project: Linear

    def grid(self, height: int, width: int) -> UnitGrid:
        return UnitGrid(height, width)

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, size, size] -> [B, rows, text_size]."""
        x = self.embed(patches(pixels.to(self.positions.dtype), self.settings.patch).flatten(1, 2))
        x = yield from through(self.blocks, x + self.positions, grid)
        return self.project(self.project_norm(self._averaged(self.post_norm(x))))

    def _averaged(self, x: Tensor) -> Tensor:
        """The mean of each square of patches, [B, patches, width] -> [B, rows, width]."""
        step = self.settings.merge
        count = self.settings.image_size // self.settings.patch // step
        return x.view(-1, count, step, count, step, self.settings.width).mean((2, 4)).flatten(1, 2)


def _encoder(weights: Weights, settings: VisionSettings) -> Gemma3:
    size, text = settings.width, settings.text_size
    matrix = weights.tensor("mm.input_projection.weight", size, text, dtype=weights.matrix)
    return Gemma3(
        settings,
        patch_linear(weights, size, settings.patch),
        weights.tensor("v.position_embd.weight", (settings.image_size // settings.patch) ** 2, size),
        siglip_blocks(weights, settings),
        norm(weights, "v.post_ln", size, settings.eps),
        norm(weights, "mm.soft_emb_norm", size, settings.eps, centred=False),
        Linear(matrix.T.contiguous(), None, weights.matrix),
    )


def _plus_one(weight: Tensor, _: VisionSettings) -> Tensor:
    return weight.float() + 1


GEMMA3 = Projector(
    name="gemma3",
    marker="<start_of_image>",
    hf_types=("gemma3",),
    gguf=_gguf,
    folder=_folder,
    vision_defaults=SIGLIP_DEFAULTS,
    processor_defaults={
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "size": {"height": 224, "width": 224},
        "resample": BILINEAR,
    },
    hf_names=lambda _: {
        **siglip_names(("vision_tower.vision_model.", "vision_tower.")),
        "mm.soft_emb_norm.weight": ("multi_modal_projector.mm_soft_emb_norm.weight",),
        "mm.input_projection.weight": ("multi_modal_projector.mm_input_projection_weight",),
    },
    hf_parts=("vision_tower.", "multi_modal_projector."),
    hf_changes={"mm.soft_emb_norm.weight": _plus_one},
    hf_ignored=(".head.",),
    arrange=arrange,
    encoder=_encoder,
    bidirectional=lambda _: True,
)
