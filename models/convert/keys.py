"""Metadata keys of a converted file beside those of all architectures: each architecture's, in parts that several have.

A part writes what llama.cpp's converter does, from the configuration that was read of the folder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, TypeAlias

import torch

from quengine.models.config import ModelConfig

Writer: TypeAlias = Any
"""A `gguf.GGUFWriter` without a file, which collects keys."""

Keys: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """What a part reads, and the writer it writes to. keys: the text model's config.json, with its type's
    defaults."""

    writer: Writer
    config: ModelConfig
    keys: Keys


Part: TypeAlias = Callable[[Source], None]

_QWEN35_SECTIONS = (11, 11, 10)
"""Frequencies of each axis, if config.json has none."""

_LONGEST = 1 << 20
"""Positions in the metadata of hybrids' files, whatever the folder says."""

_RAISED = 1 << 18
"""Positions of Hunyuan models with a raised base."""


def _rope(source: Source) -> Keys:
    """The rotary parameters of config.json, under their newer or older name."""
    return source.keys.get("rope_parameters") or source.keys.get("rope_scaling") or {}


def vocab_size(source: Source) -> None:
    source.writer.add_vocab_size(source.config.vocab_size)


def _rope_dim(source: Source) -> None:
    source.writer.add_rope_dimension_count(
        source.config.latent.rotated if source.config.latent is not None else source.config.rope_dim
    )


def head_size(source: Source) -> None:
    source.writer.add_key_length(source.config.head_dim)
    source.writer.add_value_length(source.config.head_dim)


def given_head_size(source: Source) -> None:
    if source.keys.get("head_dim") is not None:
        head_size(source)


def _llama_head_size(source: Source) -> None:
    # The classes of these two give a head size where config.json has none.
    if source.keys["model_type"] in ("llama", "mistral") or source.keys.get("head_dim") is not None:
        head_size(source)


def _window(source: Source) -> None:
    if source.config.sliding_window is not None:
        source.writer.add_sliding_window(source.config.sliding_window)


def _window_or_zero(source: Source) -> None:
    source.writer.add_sliding_window(source.config.sliding_window or 0)


def _window_pattern(source: Source) -> None:
    if source.config.sliding_window is not None:
        source.writer.add_sliding_window_pattern(
            [window is not None for window in source.config.layer_windows]
        )


def window_base(source: Source) -> None:
    if source.config.sliding_window is not None:
        source.writer.add_rope_freq_base_swa(source.config.rope_freq_base_swa or source.config.rope_freq_base)


def _softcaps(source: Source) -> None:
    if source.config.attention_softcap:
        source.writer.add_attn_logit_softcapping(source.config.attention_softcap)
    if source.config.logit_softcap:
        source.writer.add_final_logit_softcapping(source.config.logit_softcap)


def _rope_axes(source: Source) -> None:
    sections = list(_rope(source).get("mrope_section", _QWEN35_SECTIONS))
    source.writer.add_rope_dimension_sections((sections + [0] * 4)[:4])


def _deepstack(source: Source) -> None:
    source.writer.add_num_deepstack_layers(len(source.keys["vision_config"]["deepstack_visual_indexes"]))


def _expert_length(source: Source) -> None:
    if source.config.experts is not None:
        source.writer.add_expert_feed_forward_length(source.config.experts.feed_forward_length)


def _shared_length(source: Source) -> None:
    if source.config.experts is not None and source.config.experts.shared_feed_forward_length:
        source.writer.add_expert_shared_feed_forward_length(source.config.experts.shared_feed_forward_length)


def _no_experts(source: Source) -> None:
    """What files of a model that has a shared expert alone say of the others."""
    if source.config.experts is None:
        source.writer.add_expert_count(0)
        source.writer.add_expert_used_count(source.keys.get("num_experts_per_tok", 0))
        source.writer.add_expert_shared_feed_forward_length(source.config.feed_forward_length)


def _shared_count(source: Source) -> None:
    assert source.config.experts is not None
    source.writer.add_expert_shared_count(
        source.config.experts.shared_feed_forward_length // source.config.experts.feed_forward_length
    )


def _dense_first(source: Source) -> None:
    """The layers before the first one with experts, which are dense."""
    assert source.config.experts is not None
    dense = frozenset(source.config.experts.dense_layers)
    first = next(layer for layer in range(source.config.block_count) if layer not in dense)
    source.writer.add_leading_dense_block_count(first)


def _expert_groups(source: Source) -> None:
    for key, add in (
        ("n_group", source.writer.add_expert_group_count),
        ("topk_group", source.writer.add_expert_group_used_count),
    ):
        if source.keys.get(key) is not None:
            add(source.keys[key])


def _expert_weights(source: Source) -> None:
    assert source.config.experts is not None
    router = source.config.experts.router
    source.writer.add_expert_weights_norm(router.normalized)
    source.writer.add_expert_weights_scale(router.scale)


def _sigmoid(source: Source) -> None:
    import gguf

    source.writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _expert_step(source: Source) -> None:
    step = source.keys.get("interleave_moe_layer_step", source.keys.get("moe_layer_interval", 1))
    source.writer.add_interleave_moe_layer_step(step)


def _drafts(source: Source) -> None:
    if source.config.draft_layers:
        source.writer.add_nextn_predict_layers(source.config.draft_layers)


def _drafts_or_zero(source: Source) -> None:
    if source.keys.get("num_nextn_predict_layers") is not None:
        source.writer.add_nextn_predict_layers(source.config.draft_layers)


_ROUTED: Sequence[Part] = (_expert_length, _shared_count, _expert_groups, _expert_weights, _dense_first)


def _latent(source: Source) -> None:
    sizes = source.config.latent
    assert sizes is not None
    if sizes.query_rank:
        source.writer.add_q_lora_rank(sizes.query_rank)
    source.writer.add_kv_lora_rank(sizes.rank)
    source.writer.add_key_length(sizes.rank + sizes.rotated)
    source.writer.add_value_length(sizes.rank)
    source.writer.add_key_length_mla(sizes.plain + sizes.rotated)
    source.writer.add_value_length_mla(sizes.values)


def _short_conv(source: Source) -> None:
    source.writer.add_shortconv_l_cache(source.config.conv_taps)


def _gated_delta(source: Source) -> None:
    sizes = source.config.gated_delta
    assert sizes is not None
    _add_ssm(source, sizes.taps, sizes.head_dim, sizes.key_heads, sizes.value_heads, sizes.values)
    recurrent = [layer in source.config.recurrent_layers for layer in range(source.config.block_count)]
    source.writer.add_full_attention_interval(source.keys.get("full_attention_interval", 4))
    drafts = [False] * source.config.draft_layers
    source.writer.add_array(f"{source.config.architecture}.attention.recurrent_layers", recurrent + drafts)


def _mamba2(source: Source) -> None:
    sizes = source.config.mamba2
    assert sizes is not None
    _add_ssm(source, sizes.taps, sizes.state_dim, sizes.groups, sizes.heads, sizes.inner)


def _add_ssm(source: Source, taps: int, state: int, groups: int, heads: int, inner: int) -> None:
    """The sizes of a layer with a state, in the keys that all kinds of them share."""
    source.writer.add_ssm_conv_kernel(taps)
    source.writer.add_ssm_state_size(state)
    source.writer.add_ssm_group_count(groups)
    source.writer.add_ssm_time_step_rank(heads)
    source.writer.add_ssm_inner_size(inner)


def _kv_heads_by_layer(source: Source) -> None:
    """Key and value heads of each layer, 0 in layers without attention."""
    none = {*source.config.recurrent_layers, *source.config.mixerless_layers}
    heads = [
        0 if layer in none else source.config.head_count_kv for layer in range(source.config.block_count)
    ]
    replace_key(source, "attention.head_count_kv", heads)


def _lengths_by_layer(source: Source) -> None:
    """The feed-forward length of each layer, 0 in layers without one."""
    lengths = [_inner(source.config, layer) for layer in range(source.config.block_count)]
    replace_key(source, "feed_forward_length", lengths)


def _inner(config: ModelConfig, layer: int) -> int:
    if config.experts is not None and config.has_experts(layer) and layer in config.mixerless_layers:
        return config.experts.feed_forward_length
    return config.sizes(layer).feed_forward_length


def _lone_lengths(source: Source) -> None:
    """The feed-forward length of each layer that is a feed-forward alone, 0 in the others."""
    lengths = [
        _inner(source.config, layer) if layer in source.config.mixerless_layers else 0
        for layer in range(source.config.block_count)
    ]
    replace_key(source, "feed_forward_length", lengths)


def _long_context(source: Source) -> None:
    _drop(source, "context_length")
    source.writer.add_context_length(_LONGEST)


def _unrotated(source: Source) -> None:
    """Layers are not rotated where the file says that they are not trained so."""
    source.writer.add_rope_scaling_finetuned(len(source.config.unrotated_layers) < source.config.block_count)


def _sharing(source: Source) -> None:
    source.writer.add_shared_kv_layers(source.config.shared_kv_layers)


def _layer_inputs(source: Source) -> None:
    source.writer.add_embedding_length_per_layer_input(
        source.config.layer_input.length if source.config.layer_input else 0
    )


def _altup(source: Source) -> None:
    assert source.config.altup is not None
    source.writer.add_altup_active_idx(source.keys.get("altup_active_idx", 0))
    source.writer.add_altup_num_inputs(source.config.altup.streams)
    shares = torch.tensor(source.keys["activation_sparsity_pattern"], dtype=torch.float32)
    source.writer.add_activation_sparsity_scale((torch.erfinv(2 * shares - 1) * sqrt(2)).tolist())


def _head_sizes_by_window(source: Source) -> None:
    """Head sizes and rotated elements of layers without a window, and of those with one."""
    windows = source.config.layer_windows
    full = next((layer for layer, window in enumerate(windows) if window is None), None)
    seen = next((layer for layer, window in enumerate(windows) if window is not None), None)
    if full is not None:
        source.writer.add_key_length(source.config.head_size(full))
        source.writer.add_value_length(source.config.head_size(full))
        source.writer.add_rope_dimension_count(source.config.head_size(full))
    if seen is not None:
        source.writer.add_key_length_swa(source.config.head_size(seen))
        source.writer.add_value_length_swa(source.config.head_size(seen))
        source.writer.add_rope_dimension_count_swa(
            source.config.rope_dim_swa or source.config.head_size(seen)
        )


def _assistant(source: Source) -> None:
    """The keys of a model whose layers all draft, and attend to another model's keys and values."""
    source.writer.add_embedding_length_out(source.config.target_width)
    source.writer.add_nextn_predict_layers(source.config.block_count)
    source.writer.add_shared_kv_layers(source.keys["text_config"].get("num_kv_shared_layers", 0))


def eagle(source: Source) -> None:
    """The keys of an EAGLE-3 draft model."""
    sizes, prefix = source.config.eagle, source.config.architecture
    assert sizes is not None
    source.writer.add_array(f"{prefix}.target_layers", list(sizes.layers))
    source.writer.add_uint32(f"{prefix}.target_hidden_size", sizes.width)
    source.writer.add_bool(f"{prefix}.norm_before_residual", sizes.normed_residual)
    source.writer.add_bool(f"{prefix}.norm_before_fc", False)


def _kv_heads(source: Source) -> None:
    """The number of key and value heads of each layer, where they differ."""
    heads = [source.config.sizes(layer).head_count_kv for layer in range(source.config.block_count)]
    if len({*heads}) > 1 or source.keys.get("num_global_key_value_heads") is not None:
        replace_key(source, "attention.head_count_kv", heads)


def _layered_lengths(source: Source) -> None:
    if source.keys.get("use_double_wide_mlp"):
        _lengths_by_layer(source)


def _one_kv_head(source: Source) -> None:
    """Latent attention has one key head, shared by all query heads."""
    _drop(source, "attention.head_count_kv")
    source.writer.add_head_count_kv(1)


def _latent_experts(source: Source) -> None:
    if source.config.experts is None:
        return
    router = source.config.experts.router
    _expert_length(source)
    _shared_count(source)
    _expert_groups(source)
    source.writer.add_expert_weights_scale(router.scale)
    if router.normalized:
        source.writer.add_expert_weights_norm(True)
    if source.keys.get("scoring_func") == "sigmoid":
        _sigmoid(source)
    _dense_first(source)


def _yarn_log(source: Source) -> None:
    multiplier = _rope(source).get("mscale_all_dim")
    if multiplier is not None:
        source.writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)


def _temperature(source: Source) -> None:
    """The keys of Ministral 3, whose files have YaRN's log multiplier without the factor 0.1."""
    if source.config.rope_scaling.kind == "yarn":
        source.writer.add_rope_scaling_yarn_log_mul(_rope(source)["mscale_all_dim"])
    if source.config.attention_temperature_scale:
        source.writer.add_attn_temperature_scale(source.config.attention_temperature_scale)


def _raised_base(source: Source) -> None:
    """A rotary base that `alpha` raises: files have the raised base, for the context that it is made for."""
    if _rope(source).get("alpha") is None:
        return
    no_rope_scaling(source)
    source.writer.add_rope_scaling_factor(1)
    source.writer.add_rope_scaling_orig_ctx_len(_RAISED)
    _drop(source, "context_length")
    source.writer.add_context_length(_RAISED)


def _without_base(source: Source) -> None:
    replace_key(source, "rope.freq_base", None)


def replace_key(source: Source, key: str, values: Sequence[int] | None) -> None:
    """Replaces the value of a key that files of all architectures have; None: removes the key."""
    _drop(source, key)
    if values is not None:
        source.writer.add_array(f"{source.config.architecture}.{key}", values)


def _drop(source: Source, key: str) -> None:
    """Removes a key that files of all architectures have; the writer would warn of one that is added twice."""
    del source.writer.kv_data[0][f"{source.config.architecture}.{key}"]


def _granite(source: Source) -> None:
    for key, add in (
        ("attention_multiplier", source.writer.add_attention_scale),
        ("embedding_multiplier", source.writer.add_embedding_scale),
        ("residual_multiplier", source.writer.add_residual_scale),
        ("logits_scaling", source.writer.add_logit_scale),
    ):
        add(source.keys.get(key, 1.0))


def _logit_scale(source: Source) -> None:
    source.writer.add_logit_scale(source.config.logit_scale)


def no_rope_scaling(source: Source) -> None:
    import gguf

    source.writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _layer_norm_eps(source: Source) -> None:
    source.writer.add_layer_norm_eps(source.config.rms_eps)


def layer_norm(source: Source) -> None:
    replace_key(source, "attention.layer_norm_rms_epsilon", None)
    _layer_norm_eps(source)


def _long_rope(source: Source) -> None:
    rope = _rope(source)
    original = source.keys.get(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings")
    )
    source.writer.add_rope_scaling_orig_ctx_len(original)
    if source.config.rope_scaling.kind == "longrope":
        source.writer.add_rope_scaling_attn_factors(source.config.rope_scaling.attention_factor)


LLAMA_PARTS: Sequence[Part] = (_llama_head_size, vocab_size, _rope_dim)
_PLAIN: Sequence[Part] = (given_head_size,)
_LATENT: Sequence[Part] = (vocab_size, _rope_dim, _one_kv_head, _latent, _latent_experts, _yarn_log, _drafts)
_NEMOTRON: Sequence[Part] = (
    *_PLAIN,
    vocab_size,
    _rope_dim,
    _kv_heads_by_layer,
    _lone_lengths,
    _mamba2,
    _long_context,
    _unrotated,
    _without_base,
    _layer_norm_eps,
    _expert_groups,
)
_GRANITE: Sequence[Part] = (vocab_size, _rope_dim, _granite)
_GEMMA3N: Sequence[Part] = (head_size, _window, window_base, _window_pattern, _softcaps, _lengths_by_layer)
_GEMMA4: Sequence[Part] = (
    _head_sizes_by_window,
    _kv_heads,
    _layered_lengths,
    _window,
    window_base,
    _window_pattern,
    _softcaps,
)
_QWEN35: Sequence[Part] = (given_head_size, _rope_dim, _gated_delta, _drafts)

PARTS: Mapping[str, Sequence[Part]] = {
    "llama": LLAMA_PARTS,
    "mistral3": (*LLAMA_PARTS, _temperature),
    "arcee": LLAMA_PARTS,
    "smollm3": LLAMA_PARTS,
    "granite": _GRANITE,
    "granitemoe": (*_GRANITE, _shared_length),
    "granitehybrid": (
        vocab_size,
        _rope_dim,
        _granite,
        _shared_length,
        _no_experts,
        _kv_heads_by_layer,
        _mamba2,
        _long_context,
        _unrotated,
    ),
    "cohere2": (*_PLAIN, vocab_size, _rope_dim, _window, _logit_scale, no_rope_scaling, layer_norm),
    "deepseek2": _LATENT,
    "mistral4": _LATENT,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": (*_NEMOTRON, _expert_length, _shared_length, _shared_count, _expert_weights),
    "gemma3n": (*_GEMMA3N, _sharing, _layer_inputs, _altup),
    "dots1": (*_PLAIN, *_ROUTED),
    "ernie4_5": _PLAIN,
    "ernie4_5-moe": (*_PLAIN, _expert_length, _shared_count, _shared_length, _dense_first, _expert_step),
    "exaone4": (*_PLAIN, vocab_size, _window, _window_pattern),
    "gemma2": (head_size, _window, _softcaps, _without_base),
    "gemma3": (head_size, _window, window_base, _softcaps),
    "gemma4": (*_GEMMA4, _sharing, _layer_inputs, _expert_length),
    "gemma4-assistant": (*_GEMMA4, _layer_inputs, _assistant),
    "glm4": (*_PLAIN, _rope_dim),
    "glm4moe": (*_PLAIN, _rope_dim, *_ROUTED, _sigmoid, _drafts_or_zero),
    "gpt-oss": (*_PLAIN, _window, _expert_length),
    "hunyuan-dense": (*_PLAIN, _raised_base),
    "hunyuan-moe": (*_PLAIN, _expert_length, _shared_count, _shared_length),
    "lfm2": (*_PLAIN, vocab_size, _kv_heads_by_layer, _short_conv),
    "lfm2moe": (
        *_PLAIN,
        vocab_size,
        _kv_heads_by_layer,
        _short_conv,
        _expert_length,
        _sigmoid,
        _dense_first,
    ),
    "llama4": (*LLAMA_PARTS, _expert_step, _expert_length),
    "minimax-m2": (*_PLAIN, _rope_dim, _expert_length),
    "olmo2": (*_PLAIN, _window, _window_pattern, window_base),
    "olmoe": _PLAIN,
    "phi3": (*_PLAIN, _rope_dim, _window_or_zero, _long_rope),
    "qwen2": _PLAIN,
    "qwen2moe": (*_PLAIN, _expert_length, _shared_length),
    "qwen2vl": (*_PLAIN, _rope_axes),
    "qwen3": (head_size,),
    "qwen3moe": (*_PLAIN, _expert_length),
    "qwen3next": (*_QWEN35, _expert_length, _shared_length),
    "qwen3vl": (*_PLAIN, _rope_axes, _deepstack),
    "qwen3vlmoe": (*_PLAIN, _rope_axes, _deepstack, _expert_length),
    "qwen35": (*_QWEN35, _rope_axes),
    "qwen35moe": (*_QWEN35, _rope_axes, _expert_length, _shared_length),
    "seed_oss": (head_size,),
}
"""Architecture -> its parts. An architecture that is not here is not converted."""
