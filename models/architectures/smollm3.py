"""SmolLM3: Llama's layers, of which every fourth does not rotate queries and keys (NoPE).

GGUF files do not say which layers; llama.cpp takes every fourth, as released models have it. Source: `SmolLM3Model` in
the `transformers` library; Yang et al. 2025, "Rope to Nope and Back Again".
"""

from collections.abc import Sequence
from itertools import compress

from quengine.models.architectures.architecture import Architecture, Fields, Keys, LayerKind, ModelType
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.hf.hf_keys import config_error, integer

_INTERVAL = 4


def _unrotated(keys: Keys, blocks: int) -> tuple[int, ...]:
    """The layers that do not rotate: those with a 0 in config.json's list, or without a list those at an interval."""
    flags = keys.get("no_rope_layers")
    if flags is None:
        interval = integer(keys, "no_rope_layer_interval", 1, LIMITS["block_count"][1], default=_INTERVAL)
        return tuple(range(interval - 1, blocks, interval))
    if not isinstance(flags, list) or len(flags) < blocks or set(map(str, flags)) - {"0", "1"}:
        raise config_error("no_rope_layers", f"is not a 0 or 1 for each of {blocks} layers")
    return tuple(compress(range(blocks), (flag == 0 for flag in flags)))


def _layer_kinds(keys: Keys, blocks: int) -> Sequence[LayerKind]:
    """Where there is a window, layers that do not rotate have it."""
    unrotated = _unrotated(keys, blocks)
    return ["sliding_attention" if i in unrotated else "full_attention" for i in range(blocks)]


def _common_keys(keys: Keys) -> Keys:
    """config.json without a window if `use_sliding_window` is not set. `transformers` then has none either, except in
    its mask, which follows `layer_types`: where these have a window, raises EngineError."""
    if keys.get("use_sliding_window"):
        return keys
    if keys.get("sliding_window") is not None and "sliding_attention" in (keys.get("layer_types") or ()):
        raise config_error("use_sliding_window", "is not true, and layer_types has layers with a window")
    return {**keys, "sliding_window": None, "layer_types": None}


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    return {"unrotated_layers": _unrotated(keys, config.block_count)}


def _size_fields(config: ModelConfig) -> Fields:
    return {"unrotated_layers": tuple(range(_INTERVAL - 1, config.block_count, _INTERVAL))}


SMOLLM3 = Architecture(
    name="smollm3",
    block=BlockForm(AttentionForm(rope_layout="pairs")),
    model_types={
        "smollm3": ModelType(
            {
                "vocab_size": 128256,
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "rope_theta": 2e6,
                "tie_word_embeddings": True,
            },
            layer_kinds=_layer_kinds,
            reads_layer_types=True,
            common_keys=_common_keys,
            fields=_fields,
        )
    },
    size_fields=_size_fields,
    synthetic={
        "smollm3-3b": {
            "vocab_size": 128256,
            "context_length": 65536,
            "embedding_length": 2048,
            "block_count": 36,
            "feed_forward_length": 11008,
            "head_count": 16,
            "head_count_kv": 4,
            "head_dim": 128,
            "rope_freq_base": 5e6,
            "tied_output": True,
        },
        "smollm3-tiny": {"block_count": 4, "tied_output": True},
    },
)
