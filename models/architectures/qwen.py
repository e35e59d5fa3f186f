"""Qwen2 (biases of query, key and value) and Qwen3 (a norm of each query and key head instead)."""

from quengine.models.architectures.architecture import Architecture, Keys, ModelType
from quengine.models.architectures.windows import from_max_window_layers
from quengine.models.blocks import AttentionForm, BlockForm

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def without_unused_window(keys: Keys) -> Keys:
    """config.json, whose `sliding_window` counts only where it says so."""
    return keys if keys.get("use_sliding_window") else {**keys, "sliding_window": None}


def _model_type(**defaults: int) -> ModelType:
    return ModelType(
        {**_DEFAULTS, **defaults},
        layer_kinds=from_max_window_layers,
        reads_layer_types=True,
        common_keys=without_unused_window,
    )


QWEN2 = Architecture(
    name="qwen2", block=BlockForm(AttentionForm(qkv_bias=True)), model_types={"qwen2": _model_type()}
)

QWEN3 = Architecture(
    name="qwen3",
    block=BlockForm(AttentionForm(qk_norm="head")),
    model_types={"qwen3": _model_type(head_dim=128)},
)
