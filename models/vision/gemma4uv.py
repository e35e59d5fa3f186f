"""Gemma 4 12B: no encoder; one matrix turns each square of 48 x 48 pixels into a row.

Definition: `transformers` models/gemma4_unified (Gemma4UnifiedVisionEmbedder). Images are prepared as for the other
models of Gemma 4 (gemma4v.py); here a patch is a whole square.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

from torch import Tensor

from quengine.kernels.vision_rows import Norm
from quengine.models.gguf.file import GGUFFile
from quengine.models.vision.blocks import Linear, UnitGrid, linear, norm, patches
from quengine.models.vision.files import Weights
from quengine.models.vision.gemma4v import GEMMA4V, POOL, ROWS, arrange
from quengine.models.vision.projector import Projector
from quengine.models.vision.settings import BICUBIC, Keys, VisionSettings, folder_settings, gguf_settings

_EPS = 1e-5
"""eps of all norms but the last: the default of torch's LayerNorm, which no file names."""
_PATCH = 16
_PLAIN = {"layers": 0, "heads": 1, "feed_forward": 0}


def _gguf(file: GGUFFile) -> VisionSettings:
    side = POOL * file.require_int("clip.vision.patch_size", 1, 1 << 8)
    table = file.tensors.get("v.position_embd.weight")
    places = table.shape[-2] if table is not None and len(table.shape) == 3 else 0
    features = {"rows": ROWS, "positions": places}
    return gguf_settings(file, "gemma4uv", patch=side, resample=BICUBIC, features=features, **_PLAIN)


def _folder(config: Keys, vision: Keys, processor: Keys) -> VisionSettings:
    width = vision.integer("mm_embed_dim")
    vision.only("output_proj_dims", width)
    config.of("text_config").only("use_bidirectional_attention", None, "vision")
    patch, pool = vision.integer("patch_size", 1, 1 << 8), vision.integer("pooling_kernel_size", 1, 64)
    processor.only("patch_size", patch)
    processor.only("pooling_kernel_size", pool)
    rows, places = processor.integer("max_soft_tokens", 1, 1 << 16), vision.integer("mm_posemb_size")
    if rows > places:
        raise vision.error("mm_posemb_size", f"{places} positions are fewer than max_soft_tokens, {rows}")
    return folder_settings(
        "gemma4uv",
        config,
        vision,
        processor,
        width=width,
        image_size=1,
        patch=patch * pool,
        eps=vision.number("rms_norm_eps"),
        features={"rows": rows, "positions": places},
        **_PLAIN,
    )


@dataclass(frozen=True, eq=False)
class Gemma4UV:
    """The encoder, which makes a row of each square. norms: those of a square's pixels, of its row, and of the row with
    its position. positions: tables of columns and of rows, [2, P, width]."""

    settings: VisionSettings
    norms: tuple[Norm, Norm, Norm]
    embed: Linear
    positions: Tensor
    project: Linear

    def grid(self, height: int, width: int) -> UnitGrid:
        return UnitGrid(height, width, self.positions[0, None, :width] + self.positions[1, :height, None])

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, H, W] in [0, 1] -> [B, rows, text_size]."""
        of_pixels, of_rows, placed = self.norms
        x = of_pixels(patches(pixels.to(self.positions.dtype), self.settings.patch))
        x = placed(grid.placed(of_rows(self.embed(x))))
        yield from ()
        plain = Norm(None, None, self.settings.eps, centred=False)
        return self.project(plain(x)).flatten(1, 2)


def _encoder(weights: Weights, settings: VisionSettings) -> Gemma4UV:
    size, pixels = settings.width, 3 * settings.patch**2
    first, second, third = (
        norm(weights, f"v.patch_norm.{number}", width, _EPS)
        for number, width in ((1, pixels), (2, size), (3, size))
    )
    return Gemma4UV(
        settings,
        (first, second, third),
        linear(weights, "v.patch_embd", size, pixels),
        weights.tensor("v.position_embd.weight", 2, settings.features["positions"], size),
        linear(weights, "mm.input_projection", settings.text_size, size),
    )


def _channels_first(values: Tensor, settings: VisionSettings) -> Tensor:
    """[..., patch * patch * 3], pixel by pixel -> the same values channel by channel."""
    pixels = values.reshape(*values.shape[:-1], settings.patch**2, 3)
    return pixels.transpose(-1, -2).flatten(-2).contiguous()


def _hf_names(_: VisionSettings) -> Mapping[str, tuple[str, ...]]:
    parts = {"patch_norm.1": "patch_ln1", "patch_norm.2": "patch_ln2", "patch_norm.3": "pos_norm"}
    parts["patch_embd"] = "patch_dense"
    return {
        f"v.{ours}.{kind}": (f"vision_embedder.{theirs}.{kind}",)
        for ours, theirs in parts.items()
        for kind in ("weight", "bias")
    } | {
        "v.position_embd.weight": ("vision_embedder.pos_embedding",),
        "mm.input_projection.weight": ("embed_vision.embedding_projection.weight",),
    }


GEMMA4UV = Projector(
    name="gemma4uv",
    marker=GEMMA4V.marker,
    hf_types=("gemma4_unified",),
    gguf=_gguf,
    folder=_folder,
    vision_defaults={
        "patch_size": _PATCH,
        "pooling_kernel_size": POOL,
        "mm_embed_dim": 3840,
        "mm_posemb_size": 1120,
        "output_proj_dims": 3840,
        "rms_norm_eps": 1e-6,
    },
    processor_defaults=GEMMA4V.processor_defaults,
    hf_names=_hf_names,
    hf_parts=("vision_embedder.", "embed_vision."),
    hf_changes={
        "v.patch_embd.weight": _channels_first,
        "v.patch_norm.1.weight": _channels_first,
        "v.patch_norm.1.bias": _channels_first,
        "v.position_embd.weight": lambda table, _: table.transpose(0, 1).contiguous(),
    },
    arrange=arrange,
    encoder=_encoder,
    bidirectional=lambda _: True,
)
