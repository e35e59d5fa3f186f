"""GLM-4.5, 4.6 and Air, and the text model of GLM-4.5V: half of each head rotated, experts chosen by sigmoid scores.

A bias of each expert is added to the scores that choose. The first layers are dense; the others have a shared expert
beside the chosen ones. GLM-4.5 normalizes queries and keys, Air does not. The last layer of released files drafts the
token after the next (models/draft_layer.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, DraftNames, Fields, Keys, ModelType
from quengine.models.architectures.file_traits import (
    DRAFTS,
    has_head_norms,
    tensor_kinds,
    with_biases,
    without_drafts,
)
from quengine.models.architectures.mixtures import DEEPSEEK, SHARED_EXPERTS
from quengine.models.architectures.rope_axes import SECTIONS, consecutive_axes, gguf_axes, sections_of
from quengine.models.blocks import AttentionForm, BlockForm, ExpertsForm, Norms
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import flag, integer

_MOST = LIMITS["block_count"][1]


def _dense_layers(keys: Keys, blocks: int) -> Sequence[int]:
    return range(min(integer(keys, "first_k_dense_replace", 0, _MOST), blocks))


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    biases, norms = flag(keys, "attention_bias"), flag(keys, "use_qk_norm")
    block = config.block.with_attention(qkv_bias=biases, qk_norm="head" if norms else None)
    return {"block": block, "draft_layers": integer(keys, f"num_{DRAFTS}", 0, _MOST)}


def _fields_of_vision(keys: Keys, config: ModelConfig) -> Fields:
    axes = consecutive_axes(sections_of(keys, (8, 12, 12)), config.rope_dim // 2)
    return {**_fields(keys, config), "rope_axes": axes}


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    """The router, axes and draft layers of a file, whose tensors say if attention has biases and norms."""
    kinds = tensor_kinds(file)
    block = with_biases(config.block, kinds).with_attention(qk_norm="head" if has_head_norms(kinds) else None)
    assert config.experts is not None
    # Without the key a file's weights are not normalized, as in llama.cpp. A folder's are, unless it says otherwise.
    normalized = bool(file.get_bool("glm4moe.expert_weights_norm"))
    router = replace(config.experts.router, normalized=normalized)
    return {
        "experts": replace(config.experts, router=router),
        "block": block,
        "rope_axes": gguf_axes(file, config),
        **without_drafts(file, config),
    }


_TEXT = ModelType(
    {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        f"num_{DRAFTS}": 1,
    },
    reads_partial_rotary_factor=True,
    expert_keys=DEEPSEEK,
    dense_layers=_dense_layers,
    fields=_fields,
)

_VISION = replace(
    _TEXT,
    defaults={
        **_TEXT.defaults,
        "vocab_size": 151424,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 65536,
        "attention_bias": True,
        f"num_{DRAFTS}": 0,
    },
    fields=_fields_of_vision,
)

GLM4MOE = Architecture(
    name="glm4moe",
    block=BlockForm(
        AttentionForm(qkv_bias=True),
        experts=ExpertsForm(selection_bias=True),
        norms=Norms(ffn="post_attention_norm"),
    ),
    router=RouterKind(used=8, scores="sigmoid", normalized=True),
    model_types={
        "glm4_moe": _TEXT,
        "glm4v_moe": replace(_VISION, text_models=("glm4v_moe_text",)),
        "glm4v_moe_text": _VISION,
    },
    hf_modules=SHARED_EXPERTS,
    gguf_keys=(DRAFTS, SECTIONS),
    gguf_fields=_gguf_fields,
    draft_names=DraftNames(
        layer="{body}layers.{number}.",
        eh_proj="{body}layers.{number}.eh_proj",
        enorm="{body}layers.{number}.enorm",
        hnorm="{body}layers.{number}.hnorm",
        head_norm="{body}layers.{number}.shared_head.norm",
    ),
)
