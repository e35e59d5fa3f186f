"""Llama, with Mistral's models: sliding windows, and Mistral 3, whose queries grow with their position.

GGUF converters permute the query and key rows of this family, so that rotated elements are neighbours. GGUF files of
Mistral 7B are of architecture "llama".
"""

from quengine.models.architectures.architecture import (
    Architecture,
    Fields,
    Keys,
    ModelType,
    sliding_attention,
)
from quengine.models.config import BlockKind, ModelConfig
from quengine.models.hf.hf_keys import config_error, number


def _query_temperature(keys: Keys, config: ModelConfig) -> Fields:
    """Ministral 3's `llama_4_scaling_beta`, which other models of `transformers` pass over."""
    rope = keys["rope_parameters"]
    scale = number(rope, "llama_4_scaling_beta", 0.0)
    if not scale:
        return {}
    if rope.get("original_max_position_embeddings") is None:
        raise config_error("llama_4_scaling_beta", "needs original_max_position_embeddings beside it")
    length = config.rope_scaling.original_context_length
    return {"attention_temperature_scale": scale, "attention_temperature_length": length}


_MINISTRAL_3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

LLAMA = Architecture(
    name="llama",
    block=BlockKind(rope_layout="pairs"),
    vocabulary="spm",
    model_types={
        "llama": ModelType({"max_position_embeddings": 2048}),
        "mistral": ModelType(
            {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
            layer_kinds=sliding_attention,
            reads_layer_types=True,
        ),
    },
)

MISTRAL3 = Architecture(
    name="mistral3",
    block=BlockKind(rope_layout="pairs"),
    vocabulary="spm",
    model_types={
        "mistral3": ModelType(
            {"tie_word_embeddings": True},
            text_models=("mistral", "ministral3"),
            layer_kinds=sliding_attention,
            reads_layer_types=True,
        ),
        "ministral3": ModelType(
            {
                "max_position_embeddings": 262144,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "rope_parameters": _MINISTRAL_3_ROPE,
            },
            layer_kinds=sliding_attention,
            fields=_query_temperature,
        ),
    },
)
