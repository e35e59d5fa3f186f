"""Reads a ModelConfig from a Hugging Face config.json (model types llama, mistral, ministral3, qwen2, qwen3).

Names and defaults are those of the `transformers` configuration classes. Weights are expected as the GGUF
converter leaves them (Q and K of the llama family permuted), so the rotary layout is the architecture's.
"""

from collections.abc import Mapping
from typing import Any

from quengine.errors import EngineError
from quengine.models.config import (
    LIMITS,
    ROPE_LAYOUTS,
    ModelConfig,
    RopeScaling,
    unsupported_architecture,
    yarn_attention_factor,
)

# model_type -> GGUF architecture
ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "mistral3": "mistral3",
    "ministral3": "mistral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
KEYS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope_dim": "partial_rotary_factor",
    "rope_freq_base": "rope_theta",
    "rms_eps": "rms_norm_eps",
    "sliding_window": "sliding_window",
}


def read_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    """See ModelConfig.from_hf."""
    outer, text = config, config
    model_type = config.get("model_type")
    if model_type == "mistral3" and isinstance(config.get("text_config"), Mapping):
        text = config["text_config"]
        if text.get("model_type") not in ("mistral", "ministral3", None):
            raise unsupported_architecture(f"mistral3 with text model {text.get('model_type')}")
    architecture = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        raise unsupported_architecture(str(model_type))
    _refuse_unimplemented(outer, text)
    heads = _int(text, "head_count")
    embedding = _int(text, "embedding_length")
    head_dim = _head_dim(text, embedding, heads)
    rope = _rope_parameters(text)
    rope_dim = int(head_dim * _number({**text, **rope}, "partial_rotary_factor", 1.0))
    context = _int(text, "context_length")
    base = _number(rope, "rope_theta", 10000.0)
    scaling = _rope_scaling(rope, base, rope_dim, context)
    temperature = _number(rope, "llama_4_scaling_beta", 0.0)
    blocks = _int(text, "block_count")
    result = ModelConfig(
        architecture=architecture,
        name=str(outer.get("_name_or_path") or model_type),
        vocab_size=_int(text, "vocab_size"),
        context_length=context,
        embedding_length=embedding,
        block_count=blocks,
        feed_forward_length=_int(text, "feed_forward_length"),
        head_count=heads,
        head_count_kv=_int(text, "head_count_kv", default=heads),
        head_dim=head_dim,
        rope_dim=rope_dim,
        rope_freq_base=base,
        rope_layout=ROPE_LAYOUTS[architecture],
        rope_scaling=scaling,
        rms_eps=_number(text, "rms_norm_eps", 1e-6),
        sliding_window=_sliding_window(text, text.get("model_type", model_type), blocks),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tied_output=bool(text.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
        attention_temperature_scale=temperature,
        attention_temperature_length=scaling.original_context_length if temperature else 0,
    )
    for field, problem in result.problems():
        raise _error(KEYS.get(field, field), problem)
    return result


def _error(key: str, problem: str) -> EngineError:
    return EngineError(f"config.json: {key}: {problem}")


def _refuse_unimplemented(outer: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    quantization = outer.get("quantization_config") or text.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise _error("quantization_config", f"{method}: this loads unquantized checkpoints and GGUF files")
    activation = text.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _error("hidden_act", f"{activation!r} is not implemented, only silu is")
    # Qwen2's own biases (query, key, value) come with the model type; this flag adds one to the output too.
    for flag in ("attention_bias", "mlp_bias"):
        if text.get(flag) and text.get("model_type") != "qwen2":
            raise _error(flag, "biases on the output or feed-forward projections are not implemented")
    if text.get("num_local_experts") or text.get("num_experts"):
        raise unsupported_architecture(
            str(text.get("model_type")), "with a mixture of experts is not supported"
        )


def _int(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    key = KEYS[field]
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise _error(key, "missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise _error(key, f"{value!r} is not an integer")
    low, high = LIMITS[field]
    if not low <= value <= high:
        raise _error(key, f"{value} is not from {low} to {high}")
    return value


# Far above any number in a configuration; products of a few are finite.
MAX_NUMBER = 1e30


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _error(key, f"{value!r} is not a number")
    if not abs(value) <= MAX_NUMBER:
        raise _error(key, f"{value:.6g} is not from -{MAX_NUMBER:g} to {MAX_NUMBER:g}")
    return float(value)


def _head_dim(text: Mapping[str, Any], embedding: int, heads: int) -> int:
    if text.get("head_dim") is not None:
        return _int(text, "head_dim")
    if embedding % heads:
        raise _error("hidden_size", f"{embedding} is not a multiple of the {heads} heads")
    return embedding // heads


def _rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` beside `rope_scaling`, as written before transformers 5, or `rope_parameters` since."""
    parameters: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = text.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise _error(key, f"{given!r} is not an object")
        if any(isinstance(value, Mapping) for value in given.values()):
            raise _error(key, "differs between layers, which the decoder does not implement")
        parameters.update(given)
    if "rope_theta" not in parameters and text.get("rope_theta") is not None:
        parameters["rope_theta"] = text["rope_theta"]
    return parameters


def _rope_scaling(rope: Mapping[str, Any], base: float, dim: int, context: int) -> RopeScaling:
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = int(_number(rope, "original_max_position_embeddings", context))
    factor = _number(rope, "factor", 1.0)
    if kind == "default":
        return RopeScaling(original_context_length=original)
    if kind == "linear":
        return RopeScaling("linear", factor, original)
    if kind == "llama3":
        return RopeScaling("llama3", 1.0, original, freq_factors=_llama3_factors(rope, base, dim, original))
    if kind != "yarn":
        raise _error("rope_scaling", f"{kind!r} is not implemented; default, linear, yarn and llama3 are")
    if rope.get("truncate") is False:
        raise _error("rope_scaling", "yarn with truncate=false is not implemented")
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        # transformers: mscale and mscale_all_dim count only together.
        mscale, all_dim = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
        attention_factor = yarn_attention_factor(factor)
        if mscale and all_dim:
            attention_factor = yarn_attention_factor(factor, all_dim) / yarn_attention_factor(factor, mscale)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=_number(rope, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", 1.0) or 1.0,
        attention_factor=_number({"attention_factor": attention_factor}, "attention_factor", 1.0),
    )


def _llama3_factors(rope: Mapping[str, Any], base: float, dim: int, original: int) -> tuple[float, ...]:
    from quengine.kernels.rope import llama3_freq_factors

    if not base > 1.0:
        raise _error("rope_theta", f"{base} is not a finite number above 1")
    numbers = {}
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        numbers[key] = _number(rope, key, 0.0)
        if not numbers[key] > 0.0:
            raise _error("rope_scaling", f"llama3 needs a positive {key}, has {rope.get(key)}")
    if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise _error("rope_scaling", "llama3 needs high_freq_factor above low_freq_factor")
    return llama3_freq_factors(
        dim, base, numbers["factor"], numbers["low_freq_factor"], numbers["high_freq_factor"], original
    )


def _sliding_window(text: Mapping[str, Any], model_type: Any, blocks: int) -> int | None:
    """The window, where every layer has it; layers that differ are not implemented."""
    window = text.get("sliding_window")
    if model_type == "mistral" and "sliding_window" not in text:
        window = 4096  # the configuration class's default
    if model_type == "llama" or (model_type in ("qwen2", "qwen3") and not text.get("use_sliding_window")):
        window = None
    if window is None:
        return None
    if not isinstance(window, int) or isinstance(window, bool):
        raise _error("sliding_window", f"{window!r} is not an integer")
    kinds = text.get("layer_types")
    if kinds is None and model_type in ("qwen2", "qwen3"):
        full = max(0, min(int(_number(text, "max_window_layers", blocks)), blocks))
        kinds = ["full_attention"] * full + ["sliding_attention"] * (blocks - full)
    distinct = set(map(str, kinds)) if isinstance(kinds, list) and kinds else {"sliding_attention"}
    if distinct == {"full_attention"}:
        return None
    if distinct != {"sliding_attention"}:
        raise _error("sliding_window", f"layers differ ({', '.join(sorted(distinct))}); not implemented")
    return window
