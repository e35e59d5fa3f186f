"""Reads a ModelConfig from a Hugging Face config.json.

Names, defaults and precedence are those of the `transformers` configuration classes (release 5); what differs between
model types is declared in `models.architectures`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quengine.models.architectures import BIDIRECTIONAL_TYPES, MODEL_TYPES, unsupported_architecture
from quengine.models.architectures.architecture import Architecture, ModelType
from quengine.models.blocks import BlockForm
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.hf.experts_hf import COUNTS, expert_keys, read_experts
from quengine.models.hf.hf_keys import config_error, integer, number
from quengine.models.hf.rope_hf import read_rope

KEYS: dict[str, str] = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope_dim": "head_dim",
    "rope_freq_base": "rope_theta",
    "rope_dim_swa": "head_dim",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "rms_eps": "rms_norm_eps",
    "sliding_window": "sliding_window",
    "gated_delta.key_heads": "linear_num_key_heads",
    "gated_delta.value_heads": "linear_num_value_heads",
    "gated_delta.head_dim": "linear_key_head_dim",
    "gated_delta.taps": "linear_conv_kernel_dim",
    "latent.query_rank": "q_lora_rank",
    "latent.rank": "kv_lora_rank",
    "latent.plain": "qk_nope_head_dim",
    "latent.values": "v_head_dim",
}
ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "clamped_swish": ("silu",),
    "relu2": ("relu2",),
    "gelu": ("gelu",),
    "gelu_erf": ("gelu",),
}


def read_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a parsed Hugging Face config.json.

    Raises:
        EngineError: a value is missing, of the wrong type, out of range or at odds with another; or an architecture, or
            a trait of one, that the decoder does not implement.
    """
    if not isinstance(names := config.get("architectures") or [], list):
        raise config_error("architectures", f"{names!r:.60} is no array")
    if other := _as_other(config):
        return read_hf_config(other)
    architecture, model_type, text = _text_model(config)
    _refuse_unimplemented(config, text, architecture.block, model_type)
    heads = _int(text, "head_count")
    embedding = _int(text, "embedding_length")
    head_dim = _head_dim(text, embedding, heads)
    context = _int(text, "context_length")
    rope = read_rope(
        text, head_dim, context, architecture.rope_scalings, model_type.reads_partial_rotary_factor
    )
    blocks = _int(text, "block_count")
    window, full = _windows(text, model_type, blocks)
    result = ModelConfig(
        architecture=architecture.name,
        name=str(config.get("_name_or_path") or config.get("model_type")),
        block=architecture.block,
        vocab_size=_int(text, "vocab_size"),
        context_length=context,
        embedding_length=embedding,
        block_count=blocks,
        feed_forward_length=_int(text, "feed_forward_length"),
        head_count=heads,
        head_count_kv=_int(text, "head_count_kv", default=heads),
        head_dim=head_dim,
        rope_dim=rope.dim,
        rope_freq_base=rope.base,
        rope_scaling=rope.scaling,
        rms_eps=number(text, "rms_norm_eps", 1e-6),
        tied_output=_tied(config),
        experts=read_experts(text, architecture, model_type, blocks),
    )
    result = replace(result, **architecture.size_fields(result))
    result = replace(result, sliding_window=window, full_attention_layers=full)
    result = replace(result, **model_type.fields({**text, "rope_parameters": rope.parameters}, result))
    names = {**KEYS, **model_type.size_keys}
    names |= {f"experts.{field}": key for field, key in expert_keys(text, model_type).items()}
    for field, problem in result.problems():
        raise config_error(names.get(field, field), problem)
    return result


def _as_other(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """config.json rewritten for the type that it is really of; None: it is of the type that it names."""
    kind = MODEL_TYPES.get(str(config.get("model_type")))
    return None if kind is None else kind[1].stands_for(config)


def text_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json of the text model with the defaults of its type, and the keys that do not belong to the text."""
    other = _as_other(config)
    return {**config, **_text_model(config if other is None else other)[2]}


def _text_model(config: Mapping[str, Any]) -> tuple[Architecture, ModelType, Mapping[str, Any]]:
    """The architecture, model type and configuration with the type's defaults of the text model in config.json."""
    outer = config.get("model_type")
    if outer is None:
        raise unsupported_architecture("None", "(config.json has no model_type) is not supported")
    if not isinstance(outer, str) or outer not in MODEL_TYPES:
        raise unsupported_architecture(str(outer))
    architecture, model_type = MODEL_TYPES[outer]
    if config.get("use_bidirectional_attention") and outer in BIDIRECTIONAL_TYPES:
        architecture, model_type = BIDIRECTIONAL_TYPES[outer]
    text = config
    if model_type.text_models and isinstance(config.get("text_config"), Mapping):
        text = config["text_config"]
        inner = text.get("model_type", model_type.text_models[0])
        if inner not in model_type.text_models:
            raise unsupported_architecture(f"{outer} with text model {inner}")
        found = MODEL_TYPES[inner][1]
        if inner in model_type.own_text_models:
            architecture = MODEL_TYPES[inner][0]
        model_type = replace(
            found, reads_layer_types=found.reads_layer_types and model_type.reads_layer_types
        )
    if text.get("rope_parameters") is None:  # the classes take null for a missing key here, and nowhere else
        text = {key: value for key, value in text.items() if key != "rope_parameters"}
    return architecture, model_type, model_type.common_keys({**model_type.defaults, **text})


def _tied(config: Mapping[str, Any]) -> bool:
    """Whether the output matrix is the embedding. A model with vision has its own flag, which in most models overrides
    its text model's."""
    _, model_type = MODEL_TYPES[config["model_type"]]
    value = config.get("tie_word_embeddings", model_type.defaults.get("tie_word_embeddings", False))
    text = config.get("text_config")
    if value is False and model_type.tied_by_text and isinstance(text, Mapping):
        value = text.get("tie_word_embeddings", False)
    if not isinstance(value, bool):
        raise config_error("tie_word_embeddings", f"{value!r} is not true or false")
    return value


def _refuse_unimplemented(
    outer: Mapping[str, Any], text: Mapping[str, Any], block: BlockForm, model_type: ModelType
) -> None:
    # MLX writes both keys, and names no method.
    found = [keys.get(key) for keys in (outer, text) for key in ("quantization_config", "quantization")]
    quantization = next((value for value in found if value), None)
    method = quantization.get("quant_method", "mlx") if isinstance(quantization, Mapping) else quantization
    if quantization and method != model_type.quantization:
        problem = f"{method}: such folders are not read; take the unquantized model, or a GGUF file of it"
        raise config_error("quantization_config", problem)
    for keys in (outer, text):
        if (causal := keys.get("is_causal", True)) is not True:
            raise config_error("is_causal", f"{causal!r} is not implemented: each token sees those before it")
    names = ACTIVATIONS[block.feed_forward.function]
    activation = text.get("hidden_act", names[0])
    if activation not in names:
        raise config_error("hidden_act", f"{activation!r} is not implemented, only {names[0]} is")
    # Qwen2's own biases (query, key, value) come with the model type; this flag adds one to the output too.
    for flag in ("attention_bias", "mlp_bias"):
        if text.get(flag) and not block.attention.qkv_bias:
            raise config_error(flag, "biases on the output or feed-forward projections are not implemented")
    if not model_type.expert_keys and any(text.get(key) for key in COUNTS):
        raise unsupported_architecture(
            str(text.get("model_type")), "with a mixture of experts is not supported"
        )


def _int(keys: Mapping[str, Any], field: str, default: int | None = None) -> int:
    return integer(keys, KEYS[field], *LIMITS[field], default=default)


def _head_dim(text: Mapping[str, Any], embedding: int, heads: int) -> int:
    if text.get("head_dim") is not None:
        return _int(text, "head_dim")
    if embedding % heads:
        raise config_error("hidden_size", f"{embedding} is not a multiple of the {heads} heads")
    return embedding // heads


def _windows(
    text: Mapping[str, Any], model_type: ModelType, blocks: int
) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window, if any layer has it, and the layers that do not have it."""
    kinds: Any = text.get("layer_types") if model_type.reads_layer_types else None
    given = kinds is not None
    if not given:
        kinds = model_type.layer_kinds(text, blocks)
    if not isinstance(kinds, list) or len(kinds) != blocks:
        raise config_error("layer_types", f"is not a list of the kinds of {blocks} layers")
    if other := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
        raise config_error("layer_types", f"{', '.join(other)}: not implemented")
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if len(full) == blocks:
        return None, ()
    window = text.get("sliding_window")
    if window is None and given:
        raise config_error("sliding_window", "layer_types asks for a sliding window, and there is none")
    if window is None:
        return None, ()
    if not isinstance(window, int) or isinstance(window, bool):
        raise config_error("sliding_window", f"{window!r} is not an integer")
    return window, full
