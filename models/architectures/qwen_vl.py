"""The text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: those of Qwen2, Qwen3 and Qwen3-MoE, with other names of keys.

`mrope_section` divides the rotary frequencies among three positions of an image's patch: in time, row and column. A
text token has one position, by which all frequencies rotate, whatever their section. GGUF files have a fourth section,
whose position is 0 in texts; it must be empty. Released folders of the mixture hold the matrices of experts transposed.
"""

from collections.abc import Mapping
from dataclasses import replace

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Fields, HFPart, Keys, ModelType
from quengine.models.architectures.qwen import without_unused_window
from quengine.models.architectures.qwen_moe import dense_layers, expert_lengths
from quengine.models.architectures.rope_axes import (
    SECTIONS,
    consecutive_axes,
    gguf_axes,
    interleaved_axes,
    sections_of,
)
from quengine.models.architectures.windows import from_max_window_layers
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFFile


def _one_position(keys: Keys) -> Keys:
    """config.json with default rotation in place of rotation by sections: the same where a token has one position."""
    changed = dict(keys)
    for key in ("rope_scaling", "rope_parameters"):
        given = keys.get(key)
        if isinstance(given, Mapping) and given.get("rope_type", given.get("type")) == "mrope":
            changed[key] = {**given, "rope_type": "default"}
    return without_unused_window(changed)


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    of_sections = consecutive_axes if config.architecture == "qwen2vl" else interleaved_axes
    return {"rope_axes": gguf_axes(file, config, of_sections)}


def _fields_in_sections(keys: Keys, config: ModelConfig) -> Fields:
    return {"rope_axes": consecutive_axes(sections_of(keys, (16, 24, 24)), config.rope_dim // 2)}


def _fields_in_turns(keys: Keys, config: ModelConfig) -> Fields:
    return {"rope_axes": interleaved_axes(sections_of(keys, (24, 20, 20)), config.rope_dim // 2)}


def _gguf_fields_of_mixture(file: GGUFFile, config: ModelConfig) -> Fields:
    return {**_gguf_fields(file, config), **expert_lengths(file, config)}


def _with_vision(name: str, text: ModelType, tied_by_text: bool = False) -> dict[str, ModelType]:
    """The model with vision `name`, and its text model."""
    return {
        name: replace(text, text_models=(f"{name}_text",), tied_by_text=tied_by_text),
        f"{name}_text": text,
    }


_QWEN2 = ModelType(
    {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "max_window_layers": 80,
    },
    layer_kinds=from_max_window_layers,
    reads_layer_types=True,
    common_keys=_one_position,
    fields=_fields_in_sections,
)

_QWEN3 = {"vocab_size": 151936, "max_position_embeddings": 128000, "rope_theta": 5e5}

QWEN2VL = Architecture(
    name="qwen2vl",
    block=BlockForm(AttentionForm(qkv_bias=True)),
    model_types={
        **_with_vision("qwen2_vl", _QWEN2, tied_by_text=True),
        **_with_vision("qwen2_5_vl", _QWEN2, tied_by_text=True),
    },
    gguf_keys=(SECTIONS,),
    gguf_fields=_gguf_fields,
    synthetic={
        "qwen2.5-vl-7b": {
            "vocab_size": 152064,
            "context_length": 128000,
            "embedding_length": 3584,
            "block_count": 28,
            "feed_forward_length": 18944,
            "head_count": 28,
            "head_count_kv": 4,
        },
        "qwen2vl-tiny": {},
    },
)

QWEN3VL = Architecture(
    name="qwen3vl",
    block=BlockForm(AttentionForm(qk_norm="head")),
    model_types=_with_vision(
        "qwen3_vl",
        ModelType(
            {
                **_QWEN3,
                "hidden_size": 4096,
                "intermediate_size": 22016,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "head_dim": 128,
            },
            fields=_fields_in_turns,
        ),
    ),
    gguf_keys=(SECTIONS,),
    gguf_fields=_gguf_fields,
    synthetic={
        "qwen3-vl-8b": {
            "vocab_size": 151936,
            "context_length": 262144,
            "block_count": 36,
            "feed_forward_length": 12288,
            "rope_freq_base": 5e6,
        },
        "qwen3vl-tiny": {},
    },
)

QWEN3VLMOE = Architecture(
    name="qwen3vlmoe",
    block=BlockForm(AttentionForm(qk_norm="head")),
    router=RouterKind(used=8, scores="softmax", normalized=True),
    model_types=_with_vision(
        "qwen3_vl_moe",
        ModelType(
            {
                **_QWEN3,
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "decoder_sparse_step": 1,
                "moe_intermediate_size": 1408,
                "num_experts_per_tok": 4,
                "num_experts": 60,
            },
            expert_keys={
                "count": "num_experts",
                "used": "num_experts_per_tok",
                "feed_forward_length": "moe_intermediate_size",
            },
            dense_layers=dense_layers,
            fields=_fields_in_turns,
        ),
    ),
    hf_parts={
        "ffn_gate_exps.weight": HFPart("mlp.experts.gate_up_proj", "first half", transposed="by shape"),
        "ffn_up_exps.weight": HFPart("mlp.experts.gate_up_proj", "second half", transposed="by shape"),
        "ffn_down_exps.weight": HFPart("mlp.experts.down_proj", transposed="by shape"),
    },
    gguf_keys=(SECTIONS,),
    gguf_fields=_gguf_fields_of_mixture,
    synthetic={
        "qwen3-vl-30b-a3b": {
            "vocab_size": 151936,
            "context_length": 262144,
            "embedding_length": 2048,
            "block_count": 48,
            "feed_forward_length": 6144,
            "head_count_kv": 4,
            "rope_freq_base": 5e6,
            "experts": 128,
            "experts_used": 8,
            "expert_feed_forward_length": 768,
        },
        "qwen3vlmoe-tiny": {"experts": 16, "experts_used": 4, "expert_feed_forward_length": 256},
    },
)
