"""SigLIP's layers, which several projectors share: LayerNorm, biases everywhere, GELU.

Source: Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training"; `transformers` models/siglip.
"""

from collections.abc import Iterable

from quengine.models.vision.blocks import Mlp, VisionAttention, linear, norm, qkv_linear
from quengine.models.vision.files import Weights
from quengine.models.vision.settings import VisionSettings
from quengine.models.vision.vision_block import VisionBlock

SIGLIP_DEFAULTS: dict[str, object] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}

_IN_LAYER = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def siglip_names(towers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """GGUF's names of the tensors -> Hugging Face's, each after one of `towers`."""
    outer = {
        "v.patch_embd": "embeddings.patch_embedding",
        "v.position_embd": "embeddings.position_embedding",
        "v.post_ln": "post_layernorm",
    }
    layer = {f"v.blk.{{}}.{ours}": f"encoder.layers.{{}}.{theirs}" for ours, theirs in _IN_LAYER.items()}
    every = [(ours, theirs, end) for ours, theirs in (outer | layer).items() for end in ("weight", "bias")]
    return {f"{ours}.{end}": tuple(f"{each}{theirs}.{end}" for each in towers) for ours, theirs, end in every}


def siglip_blocks(weights: Weights, settings: VisionSettings) -> tuple[VisionBlock, ...]:
    return tuple(_block(weights, settings, f"v.blk.{layer}") for layer in range(settings.layers))


def _block(weights: Weights, settings: VisionSettings, name: str) -> VisionBlock:
    size, hidden, act = settings.width, settings.feed_forward, settings.activation
    attention = VisionAttention(
        qkv_linear(weights, name, size, size), linear(weights, f"{name}.attn_out", size, size), settings.heads
    )
    # Early converters swapped the names of the feed-forward's two matrices.
    swapped = weights.count(f"{name}.ffn_up.bias") == size != hidden
    up, down = ("ffn_down", "ffn_up") if swapped else ("ffn_up", "ffn_down")
    mlp = Mlp(
        linear(weights, f"{name}.{up}", hidden, size), linear(weights, f"{name}.{down}", size, hidden), act
    )
    first, second = (norm(weights, f"{name}.{part}", size, settings.eps) for part in ("ln1", "ln2"))
    return VisionBlock(first, attention, second, mlp)
