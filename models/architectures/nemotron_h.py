"""Nemotron-H and Nemotron 3: each layer is a Mamba2 layer, attention, a feed-forward, or a mixture of experts.

Attention has no rotation. Feed-forwards and experts have no gate: they take the squared ReLU of one product. Experts
are chosen by sigmoid scores with a bias of each, beside a shared expert of its own width. Every layer has one norm in
front, `attn_norm`. In GGUF files a layer without key and value heads is a feed-forward if it has a feed-forward
length, else Mamba2; in a model with experts all feed-forwards are experts. Folders limit the time step from below
(`time_step_min`), as `transformers` does in prompts; GGUF files have no such key, and llama.cpp no limit. A folder's
layers that draft tokens are ignored. Sources: NVIDIA 2025, "Nemotron-H: A Family of Accurate and Efficient
Hybrid Mamba-Transformer Models" and "Nemotron 3 Nano"; `NemotronHModel` in the `transformers` library; llama.cpp's
converter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Fields, Keys, ModelType
from quengine.models.architectures.file_traits import (
    DRAFTS,
    MAMBA2,
    counts_by_layer,
    mamba2_sizes,
    without_drafts,
)
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm, Norms
from quengine.models.blocks.block import Block
from quengine.models.blocks.mamba2 import Mamba2, Mamba2Sizes
from quengine.models.blocks.uniform import attention_of, channel_mixer
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, flag, integer, number

_PATTERNS = {
    "nemotron_h": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "nemotron_h_moe": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}
"""Layers of Nemotron Nano 9B v2 and Nemotron 3 Nano: Mamba2 (M), feed-forward (-), experts (E), attention (*)."""

_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_OLD_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
_SIZES = {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "groups": "n_groups",
    "state_dim": "ssm_state_size",
    "taps": "conv_kernel",
}
_LATENT, _FINETUNED = "moe_latent_size", "rope.scaling.finetuned"
_EPSILON = "attention.layer_norm_epsilon"


def _build(config: ModelConfig) -> Sequence[Block]:
    assert config.mamba2 is not None
    mamba = Mamba2(config.embedding_length, config.mamba2, partial=config.ranks > 1)
    layers = list[Block]()
    for i in range(config.block_count):
        if i in config.mixerless_layers:
            layers.append(Block(None, channel_mixer(config, i)))
        else:
            layers.append(Block(mamba if i in config.recurrent_layers else attention_of(config, i), None))
    return layers


def _of_kinds(kinds: Sequence[str]) -> Fields:
    """The fields of layers of these kinds; none is rotated."""
    return {
        "recurrent_layers": tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
        "mixerless_layers": tuple(i for i, kind in enumerate(kinds) if kind in ("moe", "mlp")),
        "unrotated_layers": tuple(range(len(kinds))),
    }


def _size_fields(config: ModelConfig) -> Fields:
    """The layers of a synthetic model: the first of a released one, with attention in the last if in no other."""
    blocks, pattern = config.block_count, _PATTERNS[config.architecture]
    letters = pattern[:blocks] if "*" in pattern[:blocks] else f"{pattern[: blocks - 1]}*"
    kinds = [_LETTERS[letter] for letter in letters] + ["moe"] * (blocks - len(letters))
    sizes = config.mamba2 or Mamba2Sizes(4, 32, 2, 32, 4, config.rms_eps)
    return {**_of_kinds(kinds), "mamba2": sizes}


def _common_keys(keys: Keys) -> Keys:
    keys = {**keys, **{now: keys[old] for old, now in _OLD_KEYS.items() if old in keys}}
    kinds = _kinds(keys)
    for key, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if keys[key] != only:
            raise config_error(key, f"{keys[key]!r} is not implemented, only {only!r} is")
    if keys.get("use_bias"):
        raise config_error("use_bias", "biases of Mamba2's projections are not implemented")
    if keys.get(_LATENT) is not None:
        raise config_error(_LATENT, f"{keys[_LATENT]!r}: experts of a latent width are not implemented")
    changed = {"hidden_act": "relu2", "rms_norm_eps": keys["layer_norm_epsilon"]}
    return {**keys, **changed, "num_hidden_layers": len(kinds)}


def _kinds(keys: Keys) -> list[str]:
    """The kinds of the layers, by the names that `transformers` has for them now."""
    given = [key for key in ("layers_block_type", "layer_types") if keys.get(key) is not None]
    if len(given) > 1 and keys[given[0]] != keys[given[1]]:
        raise config_error("layer_types", "differs from layers_block_type, which has the kinds of layers too")
    named = given[0] if given else None
    if named is None:
        named, pattern = "hybrid_override_pattern", keys.get("hybrid_override_pattern")
        found: Any = ["linear_attention", "moe", "full_attention", "mlp"]
        if pattern is not None:
            found = [_LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else None
    else:
        found = keys[named]
    if not isinstance(found, list) or not found or len(found) > LIMITS["block_count"][1]:
        raise config_error(named, "is not a list of the kinds of layers")
    kinds = [_OLD_KINDS.get(str(kind), str(kind)) for kind in found]
    if other := sorted(set(kinds) - set(_LETTERS.values())):
        raise config_error(named, f"{', '.join(other)}: not implemented")
    for kind, missing in (("full_attention", "attention"), ("linear_attention", "Mamba2")):
        if kind not in kinds:
            raise config_error(named, f"no layer has {missing}: not implemented")
    return kinds


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    kinds = _kinds(keys)
    least = number(keys, "time_step_min", 0.001)
    if not 0.0 <= least <= 1e6:
        raise config_error("time_step_min", f"{least} is not a number from 0 to 1e6")
    sizes = Mamba2Sizes(
        **{field: integer(keys, key, 1, 1 << 16) for field, key in _SIZES.items()},
        eps=config.rms_eps,
        conv_bias=flag(keys, "use_conv_bias"),
        step_limits=(least, inf),
    )
    fields = {**_of_kinds(kinds), "mamba2": sizes, "tied_output": False}
    if "moe" not in kinds:
        return {**fields, "architecture": "nemotron_h", "experts": None}
    assert config.experts is not None
    dense = tuple(i for i, kind in enumerate(kinds) if kind == "mlp")
    return {**fields, "experts": replace(config.experts, dense_layers=dense)}


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    prefix = config.architecture
    if file.get_int(f"{prefix}.{_LATENT}"):
        raise file.error(f"{prefix}.{_LATENT}", "experts of a latent width are not implemented")
    if config.sliding_window is not None:
        key = f"{prefix}.attention.sliding_window"
        raise file.error(key, "windows are not implemented in this architecture")
    drafts = without_drafts(file, config)
    blocks = drafts["block_count"]
    heads = counts_by_layer(file, "attention.head_count_kv", config)[:blocks]
    lengths = counts_by_layer(file, "feed_forward_length", config)[:blocks]
    kinds = [
        "moe" if length else "full_attention" if count else "linear_attention"
        for count, length in zip(heads, lengths, strict=True)
    ]
    for kind, missing in (("full_attention", "attention"), ("linear_attention", "Mamba2")):
        if kind not in kinds:
            raise file.error(f"{prefix}.attention.head_count_kv", f"no layer has {missing}: not implemented")
    return {**drafts, **_of_kinds(kinds), "mamba2": mamba2_sizes(file, config)}


_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "norm_topk_prob": True,
}
_MODULES = {
    "token_embd": "embeddings",
    "output_norm": "norm_f",
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_up.{expert}": "mixer.experts.{expert}.up_proj",
    "ffn_down.{expert}": "mixer.experts.{expert}.down_proj",
    "ffn_up_exps.weight": "mixer.experts.up_proj",
    "ffn_down_exps.weight": "mixer.experts.down_proj",
}


def _decay(a_log: Any) -> Any:
    return -a_log.exp()


NEMOTRON_H = Architecture(
    name="nemotron_h",
    # Nothing rotates, yet files have the rows of heads in the order of pairs.
    block=BlockForm(
        AttentionForm(rope_layout="pairs"),
        feed_forward=FeedForwardForm(pointwise="relu2"),
        norms=Norms(ffn="attn_norm"),
    ),
    build=_build,
    model_types={},
    hf_modules=_MODULES,
    hf_changes={"ssm_a": _decay},
    size_fields=_size_fields,
    gguf_keys=(*MAMBA2.values(), DRAFTS, _FINETUNED, _EPSILON),
    gguf_fields=_gguf_fields,
    has_recurrent_layers=True,
    has_lone_parts=True,
    synthetic={
        "nemotron-nano-9b-v2": {
            "vocab_size": 131072,
            "context_length": 131072,
            "embedding_length": 4480,
            "block_count": 56,
            "feed_forward_length": 15680,
            "head_count": 40,
            "head_count_kv": 8,
            "head_dim": 128,
            "mamba_heads": 128,
            "mamba_groups": 8,
            "mamba_head_dim": 80,
        },
        "nemotron-h-tiny": {"block_count": 6},
    },
)

NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    block=NEMOTRON_H.block.with_experts(selection_bias=True),
    router=RouterKind(used=2, scores="sigmoid", normalized=False),
    model_types={
        "nemotron_h": ModelType(
            _DEFAULTS,
            expert_keys={
                "count": "n_routed_experts",
                "used": "num_experts_per_tok",
                "feed_forward_length": "moe_intermediate_size",
                "shared_feed_forward_length": "moe_shared_expert_intermediate_size",
                "normalized": "norm_topk_prob",
                "scale": "routed_scaling_factor",
                "groups": "n_group",
                "groups_used": "topk_group",
            },
            size_keys={f"mamba2.{field}": key for field, key in _SIZES.items()},
            common_keys=_common_keys,
            fields=_fields,
        )
    },
    synthetic={
        "nemotron-3-nano": {
            "vocab_size": 131072,
            "context_length": 262144,
            "embedding_length": 2688,
            "block_count": 52,
            "feed_forward_length": 1856,
            "head_count": 32,
            "head_count_kv": 2,
            "experts": 128,
            "experts_used": 6,
            "shared_feed_forward_length": 3712,
            "experts_normalized": True,
            "expert_scale": 2.5,
            "mamba_heads": 64,
            "mamba_groups": 8,
        },
        "nemotron-h-moe-tiny": {
            "block_count": 6,
            "experts": 16,
            "experts_used": 4,
            "expert_feed_forward_length": 256,
            "shared_feed_forward_length": 512,
        },
    },
)
