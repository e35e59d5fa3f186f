"""InternVL 2.5, 3 and 3.5: InternViT over square tiles and the whole image, pixel shuffle, two matrices.

Definition: `transformers` models/internvl (InternVLVisionModel, InternVLMultiModalProjector) and models/got_ocr2
(GotOcr2ImageProcessor).
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from quengine.kernels.vision_rows import Norm
from quengine.models.gguf.file import GGUFFile
from quengine.models.vision.blocks import (
    HF_ACTIVATIONS,
    Linear,
    Mlp,
    UnitGrid,
    VisionAttention,
    linear,
    merged,
    norm,
    patch_linear,
    patches,
    qkv_linear,
)
from quengine.models.vision.files import Weights
from quengine.models.vision.pixels import normalized, resized
from quengine.models.vision.projector import Arranged, Projector
from quengine.models.vision.settings import BICUBIC, Keys, VisionSettings, folder_settings, gguf_settings
from quengine.models.vision.tiles import cut_tiles, tile_counts
from quengine.models.vision.vision_block import VisionBlock, through

_MAX_TILES = 12
_NORM_EPS = 1e-5
"""torch's default, which the projector's LayerNorm has."""
_QK_EPS = 1e-6


def _gguf(file: GGUFFile) -> VisionSettings:
    least = file.get_int("clip.vision.preproc_min_tiles", 1, 64) or 1
    most = file.get_int("clip.vision.preproc_max_tiles", 1, 64) or _MAX_TILES
    merge = file.get_int("clip.vision.projector.scale_factor", 1, 64) or 2
    return gguf_settings(
        file,
        "internvl",
        merge=merge,
        activation="silu" if file.get_bool("clip.use_silu") else "gelu",
        features={"tiles": (min(least, most), most)},
    )


def _folder(config: Keys, vision: Keys, processor: Keys) -> VisionSettings:
    vision.only("hidden_act", *HF_ACTIVATIONS)
    for key, value in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
        config.only(key, None, value)
    config.only("projector_hidden_act", None, "gelu")
    vision.only("use_mean_pooling", True)
    vision.only("use_absolute_position_embeddings", True)
    vision.only("use_mask_token", False)
    ratio = config.number("downsample_ratio") if config.get("downsample_ratio") is not None else 0.5
    most = processor.integer("max_patches", 1, 64) if processor.flag("crop_to_patches") else 1
    size, patch = _side(vision, "image_size"), _side(vision, "patch_size")
    settings = folder_settings(
        "internvl",
        config,
        vision,
        processor,
        image_size=size,
        patch=patch,
        merge=round(1 / ratio),
        activation=HF_ACTIVATIONS[str(vision.get("hidden_act"))],
        features={"tiles": (min(processor.integer("min_patches", 1, 64), most), most)},
    )
    processor.of("size").only("height", size)
    processor.of("size").only("width", size)
    return settings


def _side(vision: Keys, key: str) -> int:
    """A size, given as a number or as two equal ones."""
    value = vision.get(key)
    if (
        isinstance(value, list | tuple)
        and len(set(value)) == 1
        and isinstance(value[0], int)
        and value[0] > 0
    ):
        return value[0]
    return vision.integer(key)


def arrange(image: Image.Image, settings: VisionSettings) -> Arranged:
    """Tiles, and if there are several the whole image in one tile: [units, 3, tile, tile]."""
    tile, (least, most) = settings.image_size, settings.features["tiles"]
    cols, rows = tile_counts(image.width, image.height, tile, min(least, most), most) if most > 1 else (1, 1)
    units = cut_tiles(image, cols, rows, tile, settings.resample)
    if len(units) > 1:
        units.append(resized(image, tile, tile, settings.resample))
    pixels = [normalized(unit, settings.mean, settings.std, settings.rescale) for unit in units]
    count = (tile // settings.patch // settings.merge) ** 2
    return Arranged(torch.stack(pixels), ("<img>", count * len(units), "</img>"))


@dataclass(frozen=True, eq=False)
class InternVL:
    """The encoder. first: the class row before those of patches, which takes part in attention and is then dropped."""

    settings: VisionSettings
    embed: Linear
    first: Tensor
    positions: Tensor
    blocks: tuple[VisionBlock, ...]
    project_norm: Norm
    project: Mlp

    def grid(self, height: int, width: int) -> UnitGrid:
        return UnitGrid(height, width)

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, tile, tile] -> [B, rows, text_size]."""
        x = self.embed(patches(pixels.to(self.positions.dtype), self.settings.patch).flatten(1, 2))
        x = torch.cat([self.first.expand(len(x), 1, -1), x], 1) + self.positions
        x = yield from through(self.blocks, x, grid)
        x = x[:, 1:].reshape(-1, grid.height, grid.width, self.settings.width)
        x = merged(x, self.settings.merge)
        return self.project(self.project_norm(x.flatten(1, 2)))


def _block(weights: Weights, settings: VisionSettings, name: str) -> VisionBlock:
    size, hidden = settings.width, settings.feed_forward
    centred = weights.has(f"{name}.ln1.bias")
    first, second = (norm(weights, f"{name}.{part}", size, settings.eps, centred) for part in ("ln1", "ln2"))
    normed = weights.has(f"{name}.attn_q_norm.weight")
    of_parts = [
        norm(weights, f"{name}.attn_{part}_norm", size, _QK_EPS, centred=False) if normed else None
        for part in "qk"
    ]
    attention = VisionAttention(
        qkv_linear(weights, name, size, size),
        linear(weights, f"{name}.attn_out", size, size),
        settings.heads,
        norms=(of_parts[0], of_parts[1], None),
        norm_heads=False,
    )
    up, down = (
        linear(weights, f"{name}.ffn_up", hidden, size),
        linear(weights, f"{name}.ffn_down", size, hidden),
    )
    scales = (weights.tensor(f"{name}.ls1.weight", size), weights.tensor(f"{name}.ls2.weight", size))
    return VisionBlock(first, attention, second, Mlp(up, down, settings.activation), scales)


def _encoder(weights: Weights, settings: VisionSettings) -> InternVL:
    size, text, wide = settings.width, settings.text_size, settings.width * settings.merge**2
    count = (settings.image_size // settings.patch) ** 2
    up, down = linear(weights, "mm.model.mlp.1", text, wide), linear(weights, "mm.model.mlp.3", text, text)
    return InternVL(
        settings,
        patch_linear(weights, size, settings.patch),
        weights.tensor("v.class_embd", 1, size),
        weights.tensor("v.position_embd.weight", count + 1, size),
        tuple(_block(weights, settings, f"v.blk.{layer}") for layer in range(settings.layers)),
        norm(weights, "mm.model.mlp.0", wide, _NORM_EPS),
        Mlp(up, down, "gelu"),
    )


_LAYER = {
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_out": "attention.projection_layer",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def _hf_names(_: VisionSettings) -> Mapping[str, tuple[str, ...]]:
    names = {
        f"v.blk.{{}}.{ours}": f"vision_tower.encoder.layer.{{}}.{theirs}" for ours, theirs in _LAYER.items()
    }
    names |= {"v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection"}
    parts = {"0": "layer_norm", "1": "linear_1", "3": "linear_2"}
    names |= {f"mm.model.mlp.{n}": f"multi_modal_projector.{name}" for n, name in parts.items()}
    found = {f"{o}.{end}": (f"{theirs}.{end}",) for o, theirs in names.items() for end in ("weight", "bias")}
    return found | {
        "v.class_embd": ("vision_tower.embeddings.cls_token",),
        "v.position_embd.weight": ("vision_tower.embeddings.position_embeddings",),
        "v.blk.{}.ls1.weight": ("vision_tower.encoder.layer.{}.lambda_1",),
        "v.blk.{}.ls2.weight": ("vision_tower.encoder.layer.{}.lambda_2",),
    }


INTERNVL = Projector(
    name="internvl",
    marker="<IMG_CONTEXT>",
    hf_types=("internvl",),
    gguf=_gguf,
    folder=_folder,
    vision_defaults={
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "image_size": 448,
        "patch_size": 14,
        "use_mean_pooling": True,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
    },
    processor_defaults={
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "size": {"height": 384, "width": 384},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": _MAX_TILES,
        "resample": BICUBIC,
    },
    hf_names=_hf_names,
    hf_parts=("vision_tower.", "multi_modal_projector."),
    arrange=arrange,
    encoder=_encoder,
)
