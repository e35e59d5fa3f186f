"""Qwen2 (biases of query, key and value) and Qwen3 (a norm of each query and key head instead)."""

from collections.abc import Sequence

from quengine.models.architectures.architecture import Architecture, Keys, LayerKind, ModelType
from quengine.models.config import BlockKind
from quengine.models.hf.hf_keys import number

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _layer_kinds(keys: Keys, blocks: int) -> Sequence[LayerKind]:
    """The layers from `max_window_layers` on have the window."""
    full = max(0, min(int(number(keys, "max_window_layers", blocks)), blocks))
    return ["full_attention" if layer < full else "sliding_attention" for layer in range(blocks)]


def _common_keys(keys: Keys) -> Keys:
    return keys if keys.get("use_sliding_window") else {**keys, "sliding_window": None}


def _model_type(**defaults: int) -> ModelType:
    return ModelType(
        {**_DEFAULTS, **defaults},
        layer_kinds=_layer_kinds,
        reads_layer_types=True,
        common_keys=_common_keys,
    )


QWEN2 = Architecture(name="qwen2", block=BlockKind(qkv_bias=True), model_types={"qwen2": _model_type()})

QWEN3 = Architecture(
    name="qwen3", block=BlockKind(qk_norm="head"), model_types={"qwen3": _model_type(head_dim=128)}
)
