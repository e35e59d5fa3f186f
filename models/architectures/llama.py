"""Llama, with Mistral's models: sliding windows, Mixtral's experts, and Mistral 3's queries, which grow with position.

GGUF converters permute the query and key rows of this family, so that rotated elements are neighbours. GGUF files of
Mistral 7B and Mixtral are of architecture "llama".
"""

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import (
    Architecture,
    Fields,
    Keys,
    ModelType,
    sliding_attention,
)
from quengine.models.architectures.mixtures import MIXTRAL
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.config import ModelConfig
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
    block=BlockForm(AttentionForm(rope_layout="pairs")),
    router=RouterKind(used=2, scores="softmax", normalized=True),
    vocabulary="spm",
    model_types={
        "llama": ModelType({"max_position_embeddings": 2048}),
        "idefics3": ModelType(text_models=("llama",)),
        "smolvlm": ModelType(text_models=("llama",)),
        "mistral": ModelType(
            {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
            layer_kinds=sliding_attention,
            reads_layer_types=True,
        ),
        "mixtral": ModelType(
            {
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            layer_kinds=sliding_attention,
            expert_keys=MIXTRAL,
        ),
    },
    hf_modules={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate.{expert}": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up.{expert}": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down.{expert}": "block_sparse_moe.experts.{expert}.w2",
    },
)

MISTRAL3 = Architecture(
    name="mistral3",
    block=BlockForm(AttentionForm(rope_layout="pairs")),
    vocabulary="spm",
    model_types={
        "mistral3": ModelType(
            {"tie_word_embeddings": True},
            text_models=("mistral", "ministral3", "mistral4"),
            own_text_models=("mistral4",),
            layer_kinds=sliding_attention,
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
