"""Pixtral, Mistral Small 3.x, Ministral 3, Devstral Small 2: images of any size, axial rotation, gated feed-forwards.

Definition: `transformers` models/pixtral and models/mistral3 (PixtralImageProcessor, PixtralVisionModel,
Mistral3MultiModalProjector). GGUF has rotated rows of queries and keys as neighbours, as the text models of the family.
"""

from collections.abc import Generator
from dataclasses import dataclass
from math import floor

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
    rotation_of_pairs,
)
from quengine.models.vision.files import Weights
from quengine.models.vision.pixels import normalized, resized
from quengine.models.vision.projector import Arranged, Projector
from quengine.models.vision.settings import (
    BICUBIC,
    MAX_IMAGE_SIDE,
    Keys,
    VisionSettings,
    folder_settings,
    gguf_settings,
)
from quengine.models.vision.vision_block import VisionBlock, through

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"
_EPS = 1e-5
"""eps of the encoder's norms, which config.json does not have."""


def _gguf(file: GGUFFile) -> VisionSettings:
    size = file.require_int("clip.vision.image_size", 1, MAX_IMAGE_SIDE)
    act = "silu" if file.get_bool("clip.use_silu") else "gelu"
    return gguf_settings(
        file,
        "pixtral",
        merge=file.get_int("clip.vision.spatial_merge_size", 1, 64) or 1,
        theta=file.get_float("clip.rope.freq_base") or 10_000.0,
        activation=act,
        longest_edge=size,
    )


def _folder(config: Keys, vision: Keys, processor: Keys) -> VisionSettings:
    vision.only("hidden_act", *HF_ACTIVATIONS)
    if config.get("projector_hidden_act") is not None:
        config.only("projector_hidden_act", "gelu")
    if config.get("vision_feature_layer") is not None:
        config.only("vision_feature_layer", -1)
    if vision.get("head_dim") is not None:
        vision.only("head_dim", vision.integer("hidden_size") // vision.integer("num_attention_heads"))
    rope, text = vision.of("rope_parameters"), config.of("text_config")
    theta = rope.number("rope_theta") if rope.get("rope_theta") else vision.number("rope_theta")
    merge = config.integer("spatial_merge_size", 1, 64) if config.get("spatial_merge_size") is not None else 0
    merges = config.get("model_type") == "mistral3"
    return folder_settings(
        "pixtral",
        config,
        vision,
        processor,
        merge=merge or (2 if merges else 1),
        theta=theta,
        eps=_EPS,
        activation=HF_ACTIVATIONS[str(vision.get("hidden_act"))],
        longest_edge=processor.of("size").integer("longest_edge", 1, MAX_IMAGE_SIDE),
        features={"projector_eps": text.number("rms_norm_eps") if text.get("rms_norm_eps") else _EPS},
    )


def arrange(image: Image.Image, settings: VisionSettings) -> Arranged:
    """The image in whole merged patches, at most `longest_edge` a side; a row of patches ends with a token."""
    step = settings.patch * settings.merge
    height, width = image.height, image.width
    ratio = max(height / settings.longest_edge, width / settings.longest_edge)
    if ratio > 1:
        height, width = floor(height / ratio), floor(width / ratio)
    rows, cols = max(1, (height - 1) // step + 1), max(1, (width - 1) // step + 1)
    image = resized(image, rows * step, cols * step, settings.resample)
    pixels = normalized(image, settings.mean, settings.std, settings.rescale)
    layout = [part for row in range(rows) for part in (cols, _END if row == rows - 1 else _BREAK)]
    return Arranged(pixels[None], tuple(layout))


@dataclass(frozen=True, eq=False)
class Pixtral:
    """The encoder. merger: squares of patches as one row; absent in the first Pixtral, as is the norm before it."""

    settings: VisionSettings
    embed: Linear
    pre_norm: Norm
    blocks: tuple[VisionBlock, ...]
    project_norm: Norm | None
    merger: Linear | None
    project: Mlp

    def grid(self, height: int, width: int) -> UnitGrid:
        angles = self._angles(height, width).to(self.embed.matrix.device)
        return UnitGrid(height, width, rotation=rotation_of_pairs(angles))

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, H, W] -> [B, rows, text_size]."""
        x = self.pre_norm(self.embed(patches(pixels.to(self._dtype), self.settings.patch).flatten(1, 2)))
        x = yield from through(self.blocks, x, grid)
        if self.project_norm is not None:
            x = self.project_norm(x)
        if self.merger is not None:
            squares = merged(x.view(-1, grid.height, grid.width, x.shape[-1]), self.settings.merge)
            x = self.merger(squares.flatten(1, 2))
        return self.project(x)

    @property
    def _dtype(self) -> torch.dtype:
        assert self.pre_norm.weight is not None
        return self.pre_norm.weight.dtype

    def _angles(self, height: int, width: int) -> Tensor:
        """[height * width, head_dim / 2]: even frequencies by the patch's row, then odd ones by its column."""
        size = self.settings.head_dim
        frequencies = 1.0 / self.settings.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        down = torch.arange(height, dtype=torch.float32)[:, None] * frequencies[0::2]
        across = torch.arange(width, dtype=torch.float32)[:, None] * frequencies[1::2]
        rows = down[:, None].expand(height, width, -1)
        cols = across[None].expand(height, width, -1)
        return torch.cat([rows, cols], -1).flatten(0, 1)


def _block(weights: Weights, settings: VisionSettings, name: str) -> VisionBlock:
    size, hidden = settings.width, settings.feed_forward
    attention = VisionAttention(
        qkv_linear(weights, name, size, size), linear(weights, f"{name}.attn_out", size, size), settings.heads
    )
    gate, up = (linear(weights, f"{name}.ffn_{part}", hidden, size) for part in ("gate", "up"))
    mlp = Mlp(up, linear(weights, f"{name}.ffn_down", size, hidden), settings.activation, gate)
    first, second = (
        norm(weights, f"{name}.{part}", size, settings.eps, centred=False) for part in ("ln1", "ln2")
    )
    return VisionBlock(first, attention, second, mlp)


def _merger(weights: Weights, settings: VisionSettings) -> Linear:
    """The patch merger's matrix, with its columns reordered from channel by channel to patch by patch."""
    size, count = settings.width, settings.merge**2
    matrix = weights.tensor("mm.patch_merger.weight", size, size * count, dtype=weights.matrix)
    return Linear(matrix.view(size, size, count).transpose(1, 2).flatten(1), None, weights.matrix)


def _encoder(weights: Weights, settings: VisionSettings) -> Pixtral:
    size, text = settings.width, settings.text_size
    eps = settings.features.get("projector_eps", settings.eps)
    has_norm = weights.has("mm.input_norm.weight")
    merges = weights.has("mm.patch_merger.weight") or settings.merge > 1
    return Pixtral(
        settings,
        patch_linear(weights, size, settings.patch),
        norm(weights, "v.pre_ln", size, settings.eps, centred=False),
        tuple(_block(weights, settings, f"v.blk.{layer}") for layer in range(settings.layers)),
        norm(weights, "mm.input_norm", size, eps, centred=False) if has_norm else None,
        _merger(weights, settings) if merges else None,
        Mlp(linear(weights, "mm.1", text, size), linear(weights, "mm.2", text, text), "gelu"),
    )


def _as_pairs(rows: Tensor, settings: VisionSettings) -> Tensor:
    """Reorders rows of each head from halves to pairs: rows j and j + head_dim / 2 become 2j and 2j + 1."""
    heads = rows.view(settings.heads, 2, settings.head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


_LAYER = {
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}

PIXTRAL = Projector(
    name="pixtral",
    marker="[IMG]",
    hf_types=("mistral3", "llava"),
    hf_vision=("pixtral",),
    gguf=_gguf,
    folder=_folder,
    vision_defaults={
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 1024,
        "patch_size": 16,
        "hidden_act": "gelu",
        "rope_theta": 10_000.0,
    },
    processor_defaults={
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "size": {"longest_edge": 1024},
        "resample": BICUBIC,
    },
    hf_names=lambda _: {
        "v.patch_embd.weight": ("vision_tower.patch_conv.weight",),
        "v.pre_ln.weight": ("vision_tower.ln_pre.weight",),
        **{
            f"v.blk.{{}}.{ours}.weight": (f"vision_tower.transformer.layers.{{}}.{theirs}.weight",)
            for ours, theirs in _LAYER.items()
        },
        "mm.input_norm.weight": ("multi_modal_projector.norm.weight",),
        "mm.patch_merger.weight": ("multi_modal_projector.patch_merger.merging_layer.weight",),
        **{
            f"mm.{n}.{end}": (f"multi_modal_projector.linear_{n}.{end}",)
            for n in (1, 2)
            for end in ("weight", "bias")
        },
    },
    hf_parts=("vision_tower.", "multi_modal_projector."),
    hf_changes={"v.blk.{}.attn_q.weight": _as_pairs, "v.blk.{}.attn_k.weight": _as_pairs},
    gguf_ignored=("v.token_embd.img_break",),
    arrange=arrange,
    encoder=_encoder,
)
