"""Qwen2.5-VL: axial rotation, attention within windows of 112 pixels in most layers, gated feed-forwards.

Definition: `transformers` models/qwen2_5_vl (Qwen2_5_VisionTransformerPretrainedModel).
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.models.gguf.file import GGUFFile
from quengine.models.vision.blocks import (
    HF_ACTIVATIONS,
    Linear,
    Mlp,
    UnitGrid,
    VisionAttention,
    Windows,
    axial_angles,
    linear,
    norm,
    patch_linear_of_two,
    patches,
    qkv_linear,
    rotation_of_halves,
)
from quengine.models.vision.files import Weights
from quengine.models.vision.projector import Projector
from quengine.models.vision.qwen3vl import ENDS, FRAMES, PATCH_NAMES, Merger
from quengine.models.vision.qwen_images import (
    QWEN_DEFAULTS,
    arrange,
    check_folder,
    folder_pixels,
    gguf_pixels,
)
from quengine.models.vision.settings import Keys, VisionSettings, folder_settings, gguf_settings
from quengine.models.vision.vision_block import VisionBlock

MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 16_384
"""Pixels of a resized image in the released models."""
WINDOW = 112
_EPS = 1e-6


def _gguf(file: GGUFFile) -> VisionSettings:
    layers = file.require_int("clip.vision.block_count", 1, 1 << 10)
    pattern = file.get_int("clip.vision.n_wa_pattern", 0, 1 << 10) or 1
    return gguf_settings(
        file,
        "qwen2.5vl_merger",
        merge=file.get_int("clip.vision.spatial_merge_size", 1, 64) or 2,
        eps=_EPS,
        activation="silu" if file.get_bool("clip.use_silu") else "gelu",
        features={"full": tuple(n for n in range(layers) if (n + 1) % pattern == 0), "window": WINDOW},
        **gguf_pixels(file, MIN_PIXELS, MAX_PIXELS),
    )


def _folder(config: Keys, vision: Keys, processor: Keys) -> VisionSettings:
    vision.only("hidden_act", *HF_ACTIVATIONS)
    settings = folder_settings(
        "qwen2.5vl_merger",
        config,
        vision,
        processor,
        layers=vision.integer("depth"),
        heads=vision.integer("num_heads"),
        image_size=1,
        text_size=vision.integer("out_hidden_size"),
        merge=vision.integer("spatial_merge_size", 1, 64),
        eps=_EPS,
        activation=HF_ACTIVATIONS[str(vision.get("hidden_act"))],
        features={"full": vision.integers("fullatt_block_indexes"), "window": vision.integer("window_size")},
        **folder_pixels(processor),
    )
    if vision.integer("window_size") < settings.patch * settings.merge:
        raise vision.error("window_size", f"{vision.get('window_size')} is less than a merged patch")
    return check_folder(settings, processor)


@dataclass(frozen=True, eq=False)
class Qwen25VL:
    """The encoder."""

    settings: VisionSettings
    embed: Linear
    blocks: tuple[VisionBlock, ...]
    merger: Merger
    dtype: torch.dtype

    def grid(self, height: int, width: int) -> UnitGrid:
        settings, device = self.settings, self.embed.matrix.device
        angles = axial_angles(height, width, settings.head_dim, settings.theta, device)
        side = settings.features["window"] // settings.merge // settings.patch * settings.merge
        windows = Windows.of(height, width, side, device)
        return UnitGrid(height, width, rotation=rotation_of_halves(angles), windows=windows)

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, H, W] -> [B, rows, text_size]."""
        settings = self.settings
        x = self.embed(patches(pixels.to(self.dtype), settings.patch).flatten(1, 2))
        for layer, block in enumerate(self.blocks):
            x = block(x, grid.rotation, None if layer in settings.features["full"] else grid.windows)
            yield
        return self.merger(x.view(-1, grid.height, grid.width, settings.width))


def gated_block(weights: Weights, settings: VisionSettings, hidden: int, name: str) -> VisionBlock:
    """A layer with RMSNorms and a gated feed-forward of length `hidden`."""
    size = settings.width
    first, second = (
        norm(weights, f"{name}.{part}", size, settings.eps, centred=False) for part in ("ln1", "ln2")
    )
    attention = VisionAttention(
        qkv_linear(weights, name, size, size), linear(weights, f"{name}.attn_out", size, size), settings.heads
    )
    gate, up = (linear(weights, f"{name}.ffn_{part}", hidden, size) for part in ("gate", "up"))
    mlp = Mlp(up, linear(weights, f"{name}.ffn_down", size, hidden), settings.activation, gate)
    return VisionBlock(first, attention, second, mlp)


def _encoder(weights: Weights, settings: VisionSettings) -> Qwen25VL:
    size, wide = settings.width, settings.width * settings.merge**2
    up, down = linear(weights, "mm.0", wide, wide), linear(weights, "mm.2", settings.text_size, wide)
    before = norm(weights, "v.post_ln", size, settings.eps, centred=False)
    return Qwen25VL(
        settings,
        patch_linear_of_two(weights, size, settings.patch),
        tuple(
            gated_block(weights, settings, settings.feed_forward, f"v.blk.{layer}")
            for layer in range(settings.layers)
        ),
        Merger(before, Mlp(up, down, "gelu"), settings.merge, before=True),
        weights.vector,
    )


_LAYER = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_names(_: VisionSettings) -> dict[str, tuple[str, ...]]:
    names = {f"v.blk.{{}}.{ours}": f"blocks.{{}}.{theirs}" for ours, theirs in _LAYER.items()}
    names |= {"v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}
    found = {f"{ours}.{end}": (f"visual.{theirs}.{end}",) for ours, theirs in names.items() for end in ENDS}
    return found | PATCH_NAMES


QWEN25VL = Projector(
    name="qwen2.5vl_merger",
    marker="<|vision_start|><|image_pad|><|vision_end|>",
    hf_types=("qwen2_5_vl",),
    gguf=_gguf,
    folder=_folder,
    vision_defaults={
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": WINDOW,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
    processor_defaults=QWEN_DEFAULTS,
    hf_names=_hf_names,
    hf_parts=("visual.",),
    hf_changes=FRAMES,
    arrange=arrange,
    encoder=_encoder,
)
