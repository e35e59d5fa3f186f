"""GLM-4.1V, 4.5V and 4.6V: RMSNorm, resampled learned positions, axial rotation, a convolution, a gated projector.

Definition: `transformers` models/glm4v (Glm4vImageProcessor, Glm4vVisionModel).
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch
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
    axial_angles,
    linear,
    merged,
    norm,
    patch_linear_of_two,
    patches,
    rotation_of_halves,
)
from quengine.models.vision.files import Weights
from quengine.models.vision.pixels import normalized, resized
from quengine.models.vision.projector import Arranged, Projector
from quengine.models.vision.qwen3vl import ENDS, FRAMES, PATCH_NAMES
from quengine.models.vision.qwen25vl import gated_block
from quengine.models.vision.qwen_images import (
    QWEN_DEFAULTS,
    check_folder,
    folder_pixels,
    gguf_pixels,
    sized,
)
from quengine.models.vision.settings import Keys, VisionSettings, folder_settings, gguf_settings
from quengine.models.vision.vision_block import VisionBlock, through

MIN_PIXELS, MAX_PIXELS = 112 * 112 // 2, 28 * 28 * 6144
"""Pixels of a resized image in the released models, which count each image as two frames."""
_NORM_EPS = 1e-5
"""torch's default, which the projector's LayerNorm has."""


def _gguf(file: GGUFFile) -> VisionSettings:
    return gguf_settings(
        file,
        "glm4v",
        merge=file.get_int("clip.vision.spatial_merge_size", 1, 64) or 2,
        activation="silu" if file.get_bool("clip.use_silu") else "gelu",
        **gguf_pixels(file, MIN_PIXELS, MAX_PIXELS),
    )


def _folder(config: Keys, vision: Keys, processor: Keys) -> VisionSettings:
    vision.only("hidden_act", *HF_ACTIVATIONS)
    of_two = folder_pixels(processor)
    settings = folder_settings(
        "glm4v",
        config,
        vision,
        processor,
        layers=vision.integer("depth"),
        heads=vision.integer("num_heads"),
        merge=vision.integer("spatial_merge_size", 1, 64),
        eps=vision.number("rms_norm_eps"),
        activation=HF_ACTIVATIONS[str(vision.get("hidden_act"))],
        min_pixels=-(-of_two["min_pixels"] // 2),
        max_pixels=of_two["max_pixels"] // 2,
    )
    vision.only("out_hidden_size", settings.text_size)
    return check_folder(settings, processor)


def arrange(image: Image.Image, settings: VisionSettings) -> Arranged:
    """The image in whole merged patches, [1, 3, H, W], between the tokens of its beginning and end."""
    step = settings.patch * settings.merge
    height, width = image.height, image.width
    if min(height, width) < step:
        scale = max(step / height, step / width)
        height, width = int(height * scale), int(width * scale)
    height, width = sized(height, width, step, settings)
    image = resized(image, height, width, settings.resample)
    pixels = normalized(image, settings.mean, settings.std, settings.rescale)
    grid = (1, height // step, width // step)
    return Arranged(pixels[None], ("<|begin_of_image|>", grid[1] * grid[2], "<|end_of_image|>"), grid)


@dataclass(frozen=True, eq=False)
class Glm4V:
    """The encoder. down: merges each square of patches into one row. `project`, a norm, GELU and `mlp` follow."""

    settings: VisionSettings
    embed: Linear
    embed_norm: Norm
    positions: Tensor
    blocks: tuple[VisionBlock, ...]
    post_norm: Norm
    down: Linear
    project: Linear
    project_norm: Norm
    mlp: Mlp

    def grid(self, height: int, width: int) -> UnitGrid:
        settings, device = self.settings, self.positions.device
        angles = axial_angles(height, width, settings.head_dim, settings.theta, device)
        return UnitGrid(height, width, self._positions(height, width), rotation_of_halves(angles))

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, H, W] -> [B, rows, text_size]."""
        settings = self.settings
        x = self.embed(patches(pixels.to(self.positions.dtype), settings.patch))
        x = yield from through(self.blocks, grid.placed(self.embed_norm(x)).flatten(1, 2), grid)
        x = self.post_norm(x).view(-1, grid.height, grid.width, settings.width)
        x = merged(x, settings.merge).flatten(1, 2)
        x = self.project(self.down(x), bounded=False)
        return self.mlp(F.gelu(self.project_norm(x)))

    def _positions(self, height: int, width: int) -> Tensor:
        """[height, width, D] of the square table, bicubic between the patches' centres, in fp32."""
        side = self.settings.image_size // self.settings.patch
        table = self.positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        down, across = (
            (torch.arange(count, dtype=torch.float32, device=table.device) + 0.5) / count * 2 - 1
            for count in (height, width)
        )
        at = torch.stack([across[None].expand(height, width), down[:, None].expand(height, width)], -1)
        found = F.grid_sample(table, at[None], mode="bicubic", align_corners=False, padding_mode="border")
        return found[0].permute(1, 2, 0).to(self.positions.dtype)


def _convolution(weights: Weights, settings: VisionSettings) -> Linear:
    """The convolution over squares of patches as a matrix over their rows, patch by patch."""
    size, text, side = settings.width, settings.text_size, settings.merge
    matrix = weights.tensor("mm.patch_merger.weight", text, size, side, side, dtype=weights.matrix)
    bias = weights.tensor("mm.patch_merger.bias", text)
    return Linear(matrix.permute(0, 2, 3, 1).flatten(1), bias, weights.matrix)


def _encoder(weights: Weights, settings: VisionSettings) -> Glm4V:
    size, text, hidden = settings.width, settings.text_size, settings.feed_forward
    gate, up = (linear(weights, f"mm.{part}", hidden, text) for part in ("gate", "up"))
    return Glm4V(
        settings,
        patch_linear_of_two(weights, size, settings.patch),
        norm(weights, "v.norm_embd", size, settings.eps, centred=False),
        weights.tensor("v.position_embd.weight", (settings.image_size // settings.patch) ** 2, size),
        tuple(
            gated_block(weights, settings, settings.text_size, f"v.blk.{layer}")
            for layer in range(settings.layers)
        ),
        norm(weights, "v.post_ln", size, settings.eps, centred=False),
        _convolution(weights, settings),
        linear(weights, "mm.model.fc", text, text),
        norm(weights, "mm.post_norm", text, _NORM_EPS),
        Mlp(up, linear(weights, "mm.down", text, hidden), settings.activation, gate),
    )


_NAMES = {
    "v.norm_embd": "post_conv_layernorm",
    "v.position_embd": "embeddings.position_embedding",
    "v.blk.{}.ln1": "blocks.{}.norm1",
    "v.blk.{}.ln2": "blocks.{}.norm2",
    "v.blk.{}.attn_qkv": "blocks.{}.attn.qkv",
    "v.blk.{}.attn_out": "blocks.{}.attn.proj",
    "v.blk.{}.ffn_gate": "blocks.{}.mlp.gate_proj",
    "v.blk.{}.ffn_up": "blocks.{}.mlp.up_proj",
    "v.blk.{}.ffn_down": "blocks.{}.mlp.down_proj",
    "v.post_ln": "post_layernorm",
    "mm.patch_merger": "downsample",
    "mm.model.fc": "merger.proj",
    "mm.post_norm": "merger.post_projection_norm",
    "mm.gate": "merger.gate_proj",
    "mm.up": "merger.up_proj",
    "mm.down": "merger.down_proj",
}


def _hf_names(_: VisionSettings) -> dict[str, tuple[str, ...]]:
    names = {f"{ours}.{end}": (f"visual.{theirs}.{end}",) for ours, theirs in _NAMES.items() for end in ENDS}
    return names | PATCH_NAMES


GLM4V = Projector(
    name="glm4v",
    marker="<|begin_of_image|><|image|><|end_of_image|>",
    hf_types=("glm4v", "glm4v_moe"),
    gguf=_gguf,
    folder=_folder,
    vision_defaults={
        "depth": 24,
        "hidden_size": 1536,
        "hidden_act": "silu",
        "num_heads": 12,
        "image_size": 336,
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "out_hidden_size": 4096,
        "intermediate_size": 13_696,
    },
    processor_defaults=QWEN_DEFAULTS
    | {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15_000}},
    hf_names=_hf_names,
    hf_parts=("visual.",),
    hf_changes=FRAMES,
    arrange=arrange,
    encoder=_encoder,
)
