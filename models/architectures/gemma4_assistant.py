"""Gemma 4's assistants: models of a few layers that draft tokens for a Gemma 4, whose keys and values they attend to.

A layer is a Gemma 4 layer without its own keys and values: it attends to those of the target's last layer of the same
kind, with a window or without. The first layer reads a projection of two target rows side by side: the embedding of a
token, and the hidden row of the position before it, after the final norm. The assistant's own embedding gives the
logits. A second projection turns its last row into the hidden row for the next step of the draft. All steps of a draft
are at one position. Clusters of the vocabulary (`use_ordered_embeddings` of some folders) are not read: logits are of
all tokens.
Sources: `Gemma4AssistantForCausalLM` and `SinglePositionMultiTokenCandidateGenerator` in the `transformers` library;
llama.cpp's converter for the names of GGUF files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quengine.errors import EngineError
from quengine.models.architectures import gemma4
from quengine.models.architectures.architecture import Fields, Keys, ModelType
from quengine.models.architectures.gemma4 import GEMMA4
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.block import NORM, Block, Draw, TensorSpec
from quengine.models.blocks.uniform import attention_of, channel_mixer
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer

PRE, POST = "nextn.pre_projection", "nextn.post_projection"
"""The projections from and to the target's width, without .weight."""

_WIDTH = "embedding_length_out"
_WIDTHS = LIMITS["embedding_length"]
_TEXTS = ("gemma4_text", "gemma4_unified_text")
_NEUTRAL: Mapping[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}


def _layers(config: ModelConfig) -> Sequence[Block]:
    return [Block(_attention(config, i), channel_mixer(config, i)) for i in range(config.block_count)]


def _attention(config: ModelConfig, layer: int) -> Attention:
    """Attention to the positions before a draft. The window is one less than the target's, whose tokens also see
    themselves."""
    own = attention_of(config, layer)
    return replace(own, shared=True, window=None if own.window is None else own.window - 1)


def _top_tensors(config: ModelConfig) -> Mapping[str, TensorSpec]:
    width, target = config.embedding_length, config.target_width
    found = {
        "token_embd.weight": TensorSpec(
            (config.vocab_size, width), hf="{body}embed_tokens.weight", draw=Draw(4.0)
        ),
        f"{config.output_norm}.weight": TensorSpec((width,), hf="{body}norm.weight", draw=NORM),
        f"{PRE}.weight": TensorSpec((width, 2 * target), hf="pre_projection.weight"),
        f"{POST}.weight": TensorSpec((target, width), hf="post_projection.weight"),
    }
    if config.rope_scaling.freq_factors is not None:
        found["rope_freqs.weight"] = TensorSpec((config.rope_dim // 2,))
    return found


def _common_keys(keys: Keys) -> Keys:
    """The keys of the text model, with the target's width."""
    text = keys.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", _TEXTS[0]) not in _TEXTS:
        raise config_error("text_config", f"is not one of {' or '.join(_TEXTS)}")
    text = {key: value for key, value in text.items() if value is not None or key != "rope_parameters"}
    for key, neutral in _NEUTRAL.items():
        if text.get(key, neutral) != neutral:
            raise config_error(
                key, f"{text[key]!r} is not implemented in a model that drafts, only {neutral} is"
            )
    blocks, shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers", 0)
    if shared not in (0, blocks):
        raise config_error("num_kv_shared_layers", f"{shared!r} is not all {blocks} layers")
    flat = {**gemma4.TEXT.defaults, **text, **_NEUTRAL, "num_kv_shared_layers": 0}
    return {**gemma4.TEXT.common_keys(flat), "backbone_hidden_size": keys.get("backbone_hidden_size", 1536)}


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    width = integer(keys, "backbone_hidden_size", *_WIDTHS)
    return {**gemma4.TEXT.fields(keys, config), **_of_draft(width)}


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    prefix = config.architecture
    if length := file.get_int(f"{prefix}.{gemma4.PER_LAYER}"):
        raise file.error(f"{prefix}.{gemma4.PER_LAYER}", f"{length}: not implemented in a model that drafts")
    if (shared := file.get_int(f"{prefix}.{gemma4.SHARED}")) not in (None, config.block_count):
        raise file.error(f"{prefix}.{gemma4.SHARED}", f"{shared} is not all {config.block_count} layers")
    width = file.require_int(f"{prefix}.{_WIDTH}", *_WIDTHS)
    windows = {} if config.sliding_window is None else gemma4.windows_of_gguf(file, config, 0)
    return {**windows, **_of_draft(width)}


def _of_draft(width: int) -> Fields:
    return {"target_width": width, "keys_as_values": (), "logit_softcap": 0.0, "tied_output": True}


_TYPE = ModelType(
    {"tie_word_embeddings": True},
    layer_kinds=gemma4.TEXT.layer_kinds,
    reads_layer_types=True,
    size_keys={"target_width": "backbone_hidden_size"},
    common_keys=_common_keys,
    fields=_fields,
)

GEMMA4_ASSISTANT = replace(
    GEMMA4,
    name="gemma4-assistant",
    model_types={"gemma4_assistant": _TYPE, "gemma4_unified_assistant": _TYPE},
    build=_layers,
    router=None,
    top_tensors=_top_tensors,
    gguf_keys=(*GEMMA4.gguf_keys, _WIDTH),
    gguf_fields=_gguf_fields,
    synthetic={},
)


def sources(config: ModelConfig, target: ModelConfig) -> list[int]:
    """For each layer, the target's layer whose keys and values it attends to: the last of its kind that has some.

    Raises EngineError where there is none, where the two differ in window or in number or size of heads, or where the
    target's hidden rows have another width.
    """
    pair = f"drafts of this {config.architecture} model for this {target.architecture} model"
    if config.target_width != target.embedding_length:
        raise EngineError(
            f"{pair}: it reads hidden rows of {config.target_width} values, and the model has "
            f"{target.embedding_length}"
        )
    full = {group.window is None: max(group.layers) for group in target.cache_groups if not group.is_state}
    found = []
    for layer, window in enumerate(config.layer_windows):
        kind = "without a window" if window is None else "with a window"
        source = full.get(window is None)
        if source is None:
            raise EngineError(f"{pair}: its layer {layer} attends to one {kind}, and the model has none")
        own, held = config.sizes(layer), target.sizes(source)
        if (own.head_count_kv, config.head_size(layer)) != (held.head_count_kv, target.head_size(source)):
            raise EngineError(
                f"{pair}: its layer {layer} attends to {own.head_count_kv} key/value heads of "
                f"{config.head_size(layer)}, and layer {source} of the model has {held.head_count_kv} of "
                f"{target.head_size(source)}"
            )
        if window is not None and window != target.sliding_window:
            raise EngineError(
                f"{pair}: its layers have a window of {window}, and the model's one of {target.sliding_window}"
            )
        found.append(source)
    return found
