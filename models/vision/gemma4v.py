"""Gemma 4 (E2B, E4B, 26B-A4B, 31B): images of any ratio in a bounded number of rows, position tables, axial rotation.

Definition: `transformers` models/gemma4 (Gemma4ImageProcessor, Gemma4VisionModel, Gemma4MultimodalEmbedder). Scores are
not scaled; matrices of E2B and E4B clamp inputs and outputs. The 12B model has no encoder (gemma4uv.py).
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from math import floor, sqrt

from PIL import Image
from torch import Tensor, ones_like

from quengine.kernels.vision_rows import Norm, PatchRotation
from quengine.models.gguf.file import GGUFFile
from quengine.models.images.decode import ImageError
from quengine.models.vision.blocks import (
    HF_ACTIVATIONS,
    Linear,
    Mlp,
    UnitGrid,
    VisionAttention,
    axial_angles,
    clipped_linear,
    joined,
    linear,
    norm,
    patch_linear,
    patches,
    rotation_of_halves,
)
from quengine.models.vision.files import Weights
from quengine.models.vision.lfm2 import as_convolution
from quengine.models.vision.pixels import normalized, resized
from quengine.models.vision.projector import Arranged, Projector
from quengine.models.vision.settings import BICUBIC, Keys, VisionSettings, folder_settings, gguf_settings
from quengine.models.vision.vision_block import VisionBlock, through

ROWS = 280
"""Most rows of an image."""
_THETA = 100.0
POOL = 3
"""A square of POOL x POOL patches becomes one row."""
_BOUND = "v.blk.0.attn_q.input_min"


def _gguf(file: GGUFFile) -> VisionSettings:
    table = file.tensors.get("v.position_embd.weight")
    features = {
        "rows": ROWS,
        "positions": table.shape[-2] if table is not None and len(table.shape) == 3 else 0,
        "bidirectional": _BOUND not in file.tensors,
    }
    return gguf_settings(file, "gemma4v", merge=POOL, theta=_THETA, resample=BICUBIC, features=features)


def _folder(config: Keys, vision: Keys, processor: Keys) -> VisionSettings:
    vision.only("hidden_activation", *HF_ACTIVATIONS)
    vision.only("head_dim", vision.integer("hidden_size") // vision.integer("num_attention_heads"))
    vision.only("num_key_value_heads", vision.integer("num_attention_heads"))
    rope = vision.of("rope_parameters")
    ways = config.of("text_config")
    ways.only("use_bidirectional_attention", None, "vision")
    settings = folder_settings(
        "gemma4v",
        config,
        vision,
        processor,
        image_size=1,
        merge=vision.integer("pooling_kernel_size", 1, 64),
        eps=vision.number("rms_norm_eps"),
        theta=rope.number("rope_theta") if rope.get("rope_theta") else _THETA,
        activation=HF_ACTIVATIONS[str(vision.get("hidden_activation"))],
        features={
            "rows": processor.integer("max_soft_tokens", 1, 1 << 16),
            "positions": vision.integer("position_embedding_size"),
            "bidirectional": ways.get("use_bidirectional_attention") == "vision",
        },
    )
    processor.only("patch_size", settings.patch)
    processor.only("pooling_kernel_size", settings.merge)
    return settings


def arrange(image: Image.Image, settings: VisionSettings) -> Arranged:
    """The image in whole pooled patches, at most as many as the settings have rows, [1, 3, H, W].

    Raises ImageError: a side would have no pixels, or more patches than the table has places.
    """
    step = settings.patch * settings.merge
    height, width = _sized(image.height, image.width, step, settings.features["rows"])
    if (needed := max(height, width) // settings.patch) > (places := settings.features["positions"]):
        problem = f"need {needed} patches in a row, and the projector has places for {places}"
        raise ImageError(f"image: {image.width} x {image.height} pixels {problem}")
    image = resized(image, height, width, settings.resample)
    pixels = normalized(image, settings.mean, settings.std, settings.rescale)
    return Arranged(pixels[None], ("<|image>", height // step * (width // step), "<image|>"))


def _sized(height: int, width: int, step: int, rows: int) -> tuple[int, int]:
    """(height, width) in multiples of `step`, near the image's ratio, with at most `rows` squares of side `step`.

    Raises:
        ImageError: a side would have no pixels at this ratio and number of rows.
    """
    factor = sqrt(rows * step * step / (height * width))
    tall, wide = floor(factor * height / step) * step, floor(factor * width / step) * step
    if not tall and not wide:
        raise ImageError(f"image: {width} x {height} pixels do not fit {rows} rows of {step} x {step}")
    if not tall:
        return step, min(width // height, rows) * step
    if not wide:
        return min(height // width, rows) * step, step
    return tall, wide


@dataclass(frozen=True, eq=False)
class Gemma4V:
    """The encoder. positions: tables of columns and of rows, [2, P, width]. standard: bias and scale of pooled rows."""

    settings: VisionSettings
    embed: Linear
    positions: Tensor
    blocks: tuple[VisionBlock, ...]
    standard: tuple[Tensor, Tensor] | None
    project_norm: Norm
    project: Linear

    def grid(self, height: int, width: int) -> UnitGrid:
        places = self.positions[0, None, :width] + self.positions[1, :height, None]
        return UnitGrid(height, width, places, self._rotation(height, width))

    def layers(self, pixels: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
        """pixels [B, 3, H, W] in [0, 1] -> [B, rows, text_size]."""
        settings = self.settings
        pixels = 2 * (pixels.to(self.positions.dtype) - 0.5)
        x = grid.placed(self.embed(patches(pixels, settings.patch)))
        x = yield from through(self.blocks, x.flatten(1, 2), grid)
        step = settings.merge
        squares = x.view(-1, grid.height // step, step, grid.width // step, step, settings.width)
        x = squares.mean((2, 4)).flatten(1, 2)
        x = x * settings.width**0.5
        if self.standard is not None:
            x = (x - self.standard[0]) * self.standard[1]
        return self.project(self.project_norm(x))

    def _rotation(self, height: int, width: int) -> PatchRotation:
        """Rotates the first half of each head by the patch's column, the second by its row; elements j and j + n of a
        half turn together."""
        angles = axial_angles(
            height, width, self.settings.head_dim, self.settings.theta, self.positions.device
        )
        down, across = angles.chunk(2, -1)
        return rotation_of_halves(across, down)


def _block(weights: Weights, settings: VisionSettings, name: str) -> VisionBlock:
    size, hidden, eps = settings.width, settings.feed_forward, settings.eps

    def rms(part: str, width: int) -> Norm:
        return norm(weights, f"{name}.{part}", width, eps, centred=False)

    parts = tuple(clipped_linear(weights, f"{name}.attn_{part}", size, size) for part in "qkv")
    of_keys = rms("attn_k_norm", settings.head_dim)
    assert of_keys.weight is not None
    attention = VisionAttention(
        joined(parts),
        clipped_linear(weights, f"{name}.attn_out", size, size),
        settings.heads,
        scale=1.0,
        norms=(
            rms("attn_q_norm", settings.head_dim),
            of_keys,
            Norm(ones_like(of_keys.weight), None, eps, centred=False),
        ),
    )
    gate, up = (clipped_linear(weights, f"{name}.ffn_{part}", hidden, size) for part in ("gate", "up"))
    down = clipped_linear(weights, f"{name}.ffn_down", size, hidden)
    mlp = Mlp(up, down, settings.activation, gate)
    post = rms("attn_post_norm", size), rms("ffn_post_norm", size)
    return VisionBlock(rms("ln1", size), attention, rms("ln2", size), mlp, post=post)


def _encoder(weights: Weights, settings: VisionSettings) -> Gemma4V:
    size = settings.width
    standard = None
    if weights.has("v.std_bias"):
        standard = weights.tensor("v.std_bias", size), weights.tensor("v.std_scale", size)
    return Gemma4V(
        settings,
        patch_linear(weights, size, settings.patch),
        weights.tensor("v.position_embd.weight", 2, settings.features["positions"], size),
        tuple(_block(weights, settings, f"v.blk.{layer}") for layer in range(settings.layers)),
        standard,
        Norm(None, None, settings.eps, centred=False),
        linear(weights, "mm.input_projection", settings.text_size, size),
    )


_LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "ln1": "input_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}


def _hf_names(_: VisionSettings) -> Mapping[str, tuple[str, ...]]:
    layer = "vision_tower.encoder.layers.{}."
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _NORMS.items()}
    names |= {f"{ours}.weight": f"{theirs}.linear.weight" for ours, theirs in _LINEAR.items()}
    for bound in ("input_min", "input_max", "output_min", "output_max"):
        names |= {f"{ours}.{bound}": f"{theirs}.{bound}" for ours, theirs in _LINEAR.items()}
    return {f"v.blk.{{}}.{ours}": (f"{layer}{theirs}",) for ours, theirs in names.items()} | {
        "v.patch_embd.weight": ("vision_tower.patch_embedder.input_proj.weight",),
        "v.position_embd.weight": ("vision_tower.patch_embedder.position_embedding_table",),
        "v.std_bias": ("vision_tower.std_bias",),
        "v.std_scale": ("vision_tower.std_scale",),
        "mm.input_projection.weight": ("embed_vision.embedding_projection.weight",),
    }


GEMMA4V = Projector(
    name="gemma4v",
    marker="<|image|>",
    hf_types=("gemma4",),
    gguf=_gguf,
    folder=_folder,
    vision_defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "pooling_kernel_size": POOL,
        "patch_size": 16,
        "position_embedding_size": 10 * 1024,
    },
    processor_defaults={
        "image_mean": (0.0, 0.0, 0.0),
        "image_std": (1.0, 1.0, 1.0),
        "do_normalize": False,
        "resample": BICUBIC,
        "patch_size": 16,
        "max_soft_tokens": ROWS,
        "pooling_kernel_size": POOL,
    },
    hf_names=_hf_names,
    hf_parts=("vision_tower.", "embed_vision."),
    hf_changes={"v.patch_embd.weight": as_convolution},
    arrange=arrange,
    encoder=_encoder,
    bidirectional=lambda settings: bool(settings.features["bidirectional"]),
)
