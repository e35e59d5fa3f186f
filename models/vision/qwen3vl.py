"""Qwen3-VL and Qwen3.5, 3.6, 3.8: interpolated learned positions and axial rotation, with features of several layers.

Definition: `transformers` models/qwen3_vl (Qwen3VLVisionModel) and models/qwen3_5. With deepstack a row has its own
vector, then one for each of the text model's first layers, made of the encoder's rows after one of its middle layers.
"""

from collections.abc import Generator
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from quengine.kernels.vision_rows import Norm
from quengine.models.gguf.file import GGUFFile
from quengine.models.vision.blocks import (
    HF_ACTIVATIONS,
    Linear,
    Mlp,
    UnitGrid,
    VisionAttention,
    axial_angles,
    linear,
    merged,
    norm,
    patch_linear_of_two,
    patches,
    qkv_linear,
    rotation_of_halves,
)
from quengine.models.vision.files import Weights
from quengine.models.vision.projector import Projector
from quengine.models.vision.qwen_images import (
    QWEN_DEFAULTS,
    arrange,
    check_folder,
    folder_pixels,
    gguf_pixels,
)
from quengine.models.vision.settings import Keys, VisionSettings, folder_settings, gguf_settings
from quengine.models.vision.vision_block import VisionBlock

MIN_PIXELS, MAX_PIXELS = 1 << 16, 1 << 24
"""Pixels of a resized image in the released models."""
_EPS = 1e-6


def _gguf(file: GGUFFile) -> VisionSettings:
    flags = file.get_bools("clip.vision.is_deepstack_layers") or []
    return gguf_settings(
        file,
        "qwen3vl_merger",
        merge=file.get_int("clip.vision.spatial_merge_size", 1, 64) or 2,
        eps=_EPS,
        features={"deepstack": tuple(layer for layer, flag in enumerate(flags) if flag)},
        **gguf_pixels(file, MIN_PIXELS, MAX_PIXELS),
    )


def _folder(config: Keys, vision: Keys, processor: Keys) -> VisionSettings:
    vision.only("hidden_act", *HF_ACTIVATIONS)
    has_deepstack = str(config.get("model_type")).startswith("qwen3_vl")
    given = vision.get("deepstack_visual_indexes")
    layers = vision.integers("deepstack_visual_indexes") if given is not None else (8, 16, 24)
    patch = vision.integer("patch_size")
    settings = folder_settings(
        "qwen3vl_merger",
        config,
        vision,
        processor,
        layers=vision.integer("depth"),
        heads=vision.integer("num_heads"),
        image_size=isqrt(vision.integer("num_position_embeddings")) * patch,
        merge=vision.integer("spatial_merge_size", 1, 64),
        eps=_EPS,
        activation=HF_ACTIVATIONS[str(vision.get("hidden_act"))],
        features={"deepstack": layers if has_deepstack or given else ()},
        **folder_pixels(processor),
    )
    vision.only("out_hidden_size", settings.text_size)
    return check_folder(settings, processor)


@dataclass(frozen=True, eq=False)
class Merger:
    """Merges each square of patches into one row, through two matrices. before: each patch is normalized, not the
    square."""

    norm: Norm
    mlp: Mlp
    side: int
    before: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, H, W, width] -> [B, rows, text_size]"""
        x = merged(self.norm(x), self.side) if self.before else self.norm(merged(x, self.side))
        return self.mlp(x.flatten(1, 2))


@dataclass(frozen=True, eq=False)
class Qwen3VL:
    """The encoder. deepstack: layer -> merger that makes an extra vector of the layer's rows."""

    settings: VisionSettings
    embed: Linear
    positions: Tensor
    blocks: tuple[VisionBlock, ...]
    merger: Merger
    deepstack: dict[int, Merger]

    def grid(self, height: int, width: int) -> UnitGrid:
        settings, device = self.settings, self.positions.device
        angles = axial_angles(height, width, settings.head_dim, settings.theta, device)
        positions = interpolated(self.positions, height, width)
        return UnitGrid(height, width, positions, rotation_of_halves(angles))

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, H, W] -> [B, rows, text_size * (1 + deepstack)]."""
        settings = self.settings
        x = grid.placed(self.embed(patches(pixels.to(self.positions.dtype), settings.patch)))
        x, features = x.flatten(1, 2), []
        for layer, block in enumerate(self.blocks):
            x = block(x, grid.rotation)
            if layer in self.deepstack:
                squares = x.view(-1, grid.height, grid.width, settings.width)
                features.append(self.deepstack[layer](squares))
            yield
        return torch.cat([self.merger(x.view(-1, grid.height, grid.width, settings.width)), *features], -1)


def interpolated(table: Tensor, height: int, width: int) -> Tensor:
    """Positions [height, width, D] of a square table [side * side, D], bilinear, corner to corner.

    Weights are fp32, as in `transformers`.
    """
    side = isqrt(len(table))
    grid = table.view(side, side, -1)
    for axis, count in ((0, height), (1, width)):
        at = torch.arange(count, dtype=torch.float32) * (side - 1) / max(count - 1, 1)
        low = at.floor()
        high = (low + 1).clamp(max=side - 1)
        share = (at - low).to(table.device).view(-1, *(1,) * (2 - axis))
        first, second = (grid.index_select(axis, tap.long().to(table.device)) for tap in (low, high))
        grid = first * (1 - share) + second * share
    return grid


def _block(weights: Weights, settings: VisionSettings, name: str) -> VisionBlock:
    size, hidden = settings.width, settings.feed_forward
    first, second = (norm(weights, f"{name}.{part}", size, settings.eps) for part in ("ln1", "ln2"))
    attention = VisionAttention(
        qkv_linear(weights, name, size, size), linear(weights, f"{name}.attn_out", size, size), settings.heads
    )
    up, down = (
        linear(weights, f"{name}.ffn_up", hidden, size),
        linear(weights, f"{name}.ffn_down", size, hidden),
    )
    return VisionBlock(first, attention, second, Mlp(up, down, settings.activation))


def _merger(weights: Weights, settings: VisionSettings, names: tuple[str, str, str], before: bool) -> Merger:
    wide = settings.width * settings.merge**2
    up, down = linear(weights, names[1], wide, wide), linear(weights, names[2], settings.text_size, wide)
    size = settings.width if before else wide
    return Merger(norm(weights, names[0], size, settings.eps), Mlp(up, down, "gelu"), settings.merge, before)


def _encoder(weights: Weights, settings: VisionSettings) -> Qwen3VL:
    size, side = settings.width, settings.image_size // settings.patch
    deepstack = {}
    for layer in settings.features["deepstack"]:
        name = f"v.deepstack.{layer}"
        deepstack[layer] = _merger(weights, settings, (f"{name}.norm", f"{name}.fc1", f"{name}.fc2"), False)
    return Qwen3VL(
        settings,
        patch_linear_of_two(weights, size, settings.patch),
        weights.tensor("v.position_embd.weight", side * side, size),
        tuple(_block(weights, settings, f"v.blk.{layer}") for layer in range(settings.layers)),
        _merger(weights, settings, ("v.post_ln", "mm.0", "mm.2"), True),
        deepstack,
    )


ENDS = ("weight", "bias")
_LAYER = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
_OUTER = {
    "v.position_embd": "pos_embed",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
}


def first_frame(weight: Tensor, _: VisionSettings) -> Tensor:
    """The part of a patch embedding [N, 3, 2, P, P] over the first of two frames."""
    return weight[:, :, 0] if weight.ndim == 5 else weight


def second_frame(weight: Tensor, _: VisionSettings) -> Tensor:
    return weight[:, :, 1] if weight.ndim == 5 and weight.shape[2] == 2 else weight


def _hf_names(settings: VisionSettings) -> dict[str, tuple[str, ...]]:
    names = {f"v.blk.{{}}.{ours}": f"blocks.{{}}.{theirs}" for ours, theirs in _LAYER.items()} | _OUTER
    for index, layer in enumerate(settings.features["deepstack"]):
        of = f"deepstack_merger_list.{index}"
        names |= {f"v.deepstack.{layer}.norm": f"{of}.norm"}
        names |= {f"v.deepstack.{layer}.fc{n}": f"{of}.linear_fc{n}" for n in (1, 2)}
    found = {f"{ours}.{end}": (f"visual.{theirs}.{end}",) for ours, theirs in names.items() for end in ENDS}
    return found | PATCH_NAMES


PATCH_NAMES: dict[str, tuple[str, ...]] = {
    "v.patch_embd.weight": ("visual.patch_embed.proj.weight",),
    "v.patch_embd.weight.1": ("visual.patch_embed.proj.weight",),
    "v.patch_embd.bias": ("visual.patch_embed.proj.bias",),
}
"""Names of a patch embedding over two frames: GGUF -> folder."""


FRAMES = {"v.patch_embd.weight": first_frame, "v.patch_embd.weight.1": second_frame}

QWEN3VL = Projector(
    name="qwen3vl_merger",
    marker="<|vision_start|><|image_pad|><|vision_end|>",
    hf_types=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    gguf=_gguf,
    folder=_folder,
    vision_defaults={
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
    },
    processor_defaults=QWEN_DEFAULTS,
    hf_names=_hf_names,
    hf_parts=("visual.",),
    hf_changes=FRAMES,
    arrange=arrange,
    encoder=_encoder,
    deepstack=lambda settings: len(settings.features["deepstack"]),
)
