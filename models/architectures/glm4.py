"""GLM-4 of 2025 (9B, 32B, Z1) and GLM-4.1V's text model: norms on both sides of each block, heads rotated in pairs.

Half of each head is rotated. Query, key and value have biases, which a folder may leave out. In folders too, rotated
elements are neighbours, and one tensor has the rows of gate and up. GGUF files with sections of frequencies have the
rows of query and key in halves. Source: `Glm4Model` and `Glm4vTextModel` in the `transformers` library.
"""

from dataclasses import replace

from quengine.models.architectures.architecture import Architecture, Fields, Keys, ModelType
from quengine.models.architectures.file_traits import DRAFTS, tensor_kinds, with_biases, without_drafts
from quengine.models.architectures.rope_axes import SECTIONS, consecutive_axes, gguf_axes, sections_of
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm, Norms
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import flag


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    return {"block": config.block.with_attention(qkv_bias=flag(keys, "attention_bias"))}


def _fields_of_vision(keys: Keys, config: ModelConfig) -> Fields:
    return {"rope_axes": consecutive_axes(sections_of(keys, (8, 12, 12)), config.rope_dim // 2)}


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    axes, block = gguf_axes(file, config), with_biases(config.block, tensor_kinds(file))
    if axes:
        block = block.with_attention(rope_layout="halves")
    return {"block": block, "rope_axes": axes, **without_drafts(file, config)}


_SIZES = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
}

_VISION = ModelType(
    {**_SIZES, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    reads_partial_rotary_factor=True,
    fields=_fields_of_vision,
)


GLM4 = Architecture(
    name="glm4",
    block=BlockForm(
        AttentionForm(rope_layout="pairs", qkv_bias=True),
        feed_forward=FeedForwardForm(merged_gate=True),
        norms=Norms(placement="both"),
    ),
    model_types={
        "glm4": ModelType(
            {
                **_SIZES,
                "head_dim": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1.5625e-07,
                "partial_rotary_factor": 0.5,
                "attention_bias": True,
            },
            reads_partial_rotary_factor=True,
            fields=_fields,
        ),
        "glm4v": replace(_VISION, text_models=("glm4v_text",), tied_by_text=True),
        "glm4v_text": _VISION,
    },
    hf_modules={
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    hf_rope_pairs=True,
    gguf_keys=(DRAFTS, SECTIONS),
    gguf_fields=_gguf_fields,
    synthetic={
        "glm4-9b": {
            "vocab_size": 151552,
            "block_count": 40,
            "feed_forward_length": 13696,
            "head_count_kv": 2,
            "rope_dim": 64,
            "rope_freq_base": 1e4,
        },
        "glm4-tiny": {"rope_dim": 32},
    },
)
