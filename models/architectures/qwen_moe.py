"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B) and Qwen3-MoE: the attention of Qwen2 and Qwen3, and experts.

Qwen2-MoE has a shared expert beside the chosen ones, weighted by a gate of its own, and does not normalize the chosen
experts' weights; Qwen3-MoE does. llama.cpp takes both for granted, so that GGUF files do not say it; a folder's
`norm_topk_prob` does. Folders may also have dense layers between those with experts, which GGUF has no key for.
"""

from collections.abc import Sequence
from dataclasses import replace

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import (
    Architecture,
    Fields,
    Keys,
    LayerKind,
    ModelType,
    sliding_attention,
)
from quengine.models.architectures.mixtures import QWEN
from quengine.models.blocks import AttentionForm, BlockForm, ExpertsForm
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer, number

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}


def _layer_kinds_of_qwen2(keys: Keys, blocks: int) -> Sequence[LayerKind]:
    """Every other layer of the first `max_window_layers` has the window, beginning with the first."""
    last = number(keys, "max_window_layers", blocks)
    return [
        "sliding_attention" if layer % 2 == 0 and layer < last else "full_attention"
        for layer in range(blocks)
    ]


def _common_keys(keys: Keys) -> Keys:
    if keys.get("qkv_bias") is False:
        raise config_error("qkv_bias", "false is not implemented: query, key and value have biases")
    return keys if keys.get("use_sliding_window") else {**keys, "sliding_window": None}


def dense_layers(keys: Keys, blocks: int) -> Sequence[int]:
    """The dense layers: `mlp_only_layers`, and all but every `decoder_sparse_step`th."""
    step = integer(keys, "decoder_sparse_step", *LIMITS["block_count"])
    named = keys.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise config_error("mlp_only_layers", f"{str(named)[:80]!r} is not a list of layers")
    return [layer for layer in range(blocks) if layer in named or (layer + 1) % step]


def expert_lengths(file: GGUFFile, config: ModelConfig) -> Fields:
    """The experts' lengths. Where old files lack them, they follow from the feed-forward's, as in llama.cpp."""
    experts, prefix = config.experts, config.architecture
    assert experts is not None
    if f"{prefix}.expert_feed_forward_length" not in file.metadata:
        experts = replace(experts, feed_forward_length=config.feed_forward_length // experts.router.used)
    if prefix == "qwen2moe" and not experts.shared_feed_forward_length:
        experts = replace(experts, shared_feed_forward_length=config.feed_forward_length)
    return {"experts": experts}


QWEN2MOE = Architecture(
    name="qwen2moe",
    block=BlockForm(AttentionForm(qkv_bias=True), experts=ExpertsForm(shared_gate=True)),
    router=RouterKind(used=4, scores="softmax", normalized=False),
    model_types={
        "qwen2_moe": ModelType(
            {
                **_DEFAULTS,
                "num_key_value_heads": 16,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
            },
            layer_kinds=_layer_kinds_of_qwen2,
            reads_layer_types=True,
            expert_keys={**QWEN, "shared_feed_forward_length": "shared_expert_intermediate_size"},
            dense_layers=dense_layers,
            common_keys=_common_keys,
        )
    },
    gguf_fields=expert_lengths,
)

QWEN3MOE = Architecture(
    name="qwen3moe",
    block=BlockForm(AttentionForm(qk_norm="head")),
    router=RouterKind(used=8, scores="softmax", normalized=True),
    model_types={
        "qwen3_moe": ModelType(
            {
                **_DEFAULTS,
                "num_key_value_heads": 4,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
            },
            layer_kinds=sliding_attention,
            expert_keys=QWEN,
            dense_layers=dense_layers,
            common_keys=_common_keys,
        )
    },
    gguf_fields=expert_lengths,
)
