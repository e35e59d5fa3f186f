"""Reads a ModelConfig from a Hugging Face config.json (model types llama, mistral, ministral3, qwen2, qwen3).

Names, defaults and precedence are those of the `transformers` configuration classes (release 5). Weights are
expected as the GGUF converter leaves them (Q and K of the llama family permuted), so the rotary layout is the
architecture's.
"""

from collections.abc import Mapping
from math import ceil, floor, inf, log, pi
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
# What `transformers` takes for a key that config.json lacks, where its classes differ or the value is not neutral.
_QWEN = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
# Rotary kinds whose frequencies follow from the context that the model was first trained on.
_STRETCHED = ("llama3", "yarn")
KEYS: Mapping[str, str] = {
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
    "rms_eps": "rms_norm_eps",
    "sliding_window": "sliding_window",
}


def read_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    """See ModelConfig.from_hf."""
    model_type, architecture, text = _text_config(config)
    _refuse_unimplemented(config, text)
    heads = _int(text, "head_count")
    embedding = _int(text, "embedding_length")
    head_dim = _head_dim(text, embedding, heads)
    context = _int(text, "context_length")
    rope = _rope_parameters(text, context)
    base = _number(rope, "rope_theta", 10000.0)
    scaling = _rope_scaling(rope, base, head_dim, context)
    # Ministral 3 alone has it; other models of `transformers` pass the key over.
    temperature = _number(rope, "llama_4_scaling_beta", 0.0) if model_type == "ministral3" else 0.0
    if temperature and rope.get("original_max_position_embeddings") is None:
        raise _error("llama_4_scaling_beta", "needs original_max_position_embeddings beside it")
    blocks = _int(text, "block_count")
    result = ModelConfig(
        architecture=architecture,
        name=str(config.get("_name_or_path") or config.get("model_type")),
        vocab_size=_int(text, "vocab_size"),
        context_length=context,
        embedding_length=embedding,
        block_count=blocks,
        feed_forward_length=_int(text, "feed_forward_length"),
        head_count=heads,
        head_count_kv=_int(text, "head_count_kv", default=heads),
        head_dim=head_dim,
        rope_dim=head_dim,
        rope_freq_base=base,
        rope_layout=ROPE_LAYOUTS[architecture],
        rope_scaling=scaling,
        rms_eps=_number(text, "rms_norm_eps", 1e-6),
        sliding_window=_sliding_window(text, model_type, blocks),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tied_output=_tied(config),
        attention_temperature_scale=temperature,
        attention_temperature_length=scaling.original_context_length if temperature else 0,
    )
    for field, problem in result.problems():
        raise _error(KEYS.get(field, field), problem)
    return result


def _text_config(config: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """(model type, GGUF architecture, configuration with the class's defaults) of the text model in config.json."""
    outer = config.get("model_type")
    architecture = ARCHITECTURES.get(outer) if isinstance(outer, str) else None
    if architecture is None:
        raise unsupported_architecture(str(outer))
    text, model_type = config, str(outer)
    if outer == "mistral3" and isinstance(config.get("text_config"), Mapping):
        text = config["text_config"]
        model_type = text.get("model_type", "mistral")
        if model_type not in ("mistral", "ministral3"):
            raise unsupported_architecture(f"mistral3 with text model {model_type}")
    return model_type, architecture, {**CLASS_DEFAULTS.get(model_type, {}), **text}


def _tied(config: Mapping[str, Any]) -> bool:
    """Whether the output matrix is the embedding; a vision model's own flag decides, not its text model's."""
    value = config.get("tie_word_embeddings", config.get("model_type") == "mistral3")
    if not isinstance(value, bool):
        raise _error("tie_word_embeddings", f"{value!r} is not true or false")
    return value


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


def _rope_parameters(text: Mapping[str, Any], context: int) -> dict[str, Any]:
    """`rope_theta` beside `rope_scaling`, as written before transformers 5, or `rope_parameters` since.

    As `transformers` does: `rope_scaling` replaces `rope_parameters`, and what stands at the top level fills in what
    those lack, but for the original context, which wins there.
    """
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    given = text.get(key)
    if given is not None and not isinstance(given, Mapping):
        raise _error(key, f"{given!r} is not an object")
    if given and any(isinstance(value, Mapping) for value in given.values()):
        raise _error(key, "differs between layers, which the decoder does not implement")
    parameters = {"rope_theta": text.get("rope_theta", 10000.0), **(given or {})}
    if parameters["rope_theta"] is None:
        raise _error("rope_theta", "null; leave it out for 10000, or give a number")
    kind = parameters.setdefault("rope_type", parameters.get("type", "default"))
    partial = _number({**text, **parameters}, "partial_rotary_factor", 1.0)
    if kind != "default" and partial != 1.0:  # with default RoPE these model types do not read it
        raise _error("partial_rotary_factor", f"{partial} with {kind!r} RoPE is not implemented")
    if kind in _STRETCHED:
        original = text.get(
            "original_max_position_embeddings", parameters.get("original_max_position_embeddings", context)
        )
        parameters["original_max_position_embeddings"] = original
        most = LIMITS["context_length"][1]
        if not isinstance(original, int) or isinstance(original, bool) or not 1 <= original <= most:
            raise _error(
                "original_max_position_embeddings", f"{original!r} is not an integer from 1 to {most}"
            )
    return parameters


def _rope_scaling(rope: Mapping[str, Any], base: float, dim: int, context: int) -> RopeScaling:
    kind = rope["rope_type"]
    original = int(_number(rope, "original_max_position_embeddings", context))
    if kind == "default":
        return RopeScaling(original_context_length=original)
    if kind == "linear":
        return RopeScaling("linear", _factor(rope, kind), original)
    if kind == "llama3":
        return RopeScaling("llama3", 1.0, original, freq_factors=_llama3_factors(rope, base, dim, original))
    if kind == "yarn":
        return _yarn(rope, base, dim, context, original)
    raise _error("rope_scaling", f"{kind!r} is not implemented; default, linear, yarn and llama3 are")


def _factor(rope: Mapping[str, Any], kind: str) -> float:
    if rope.get("factor") is None:
        raise _error("rope_scaling", f"{kind} RoPE needs a factor, and there is none")
    return _number(rope, "factor", 1.0)


def _yarn(rope: Mapping[str, Any], base: float, dim: int, context: int, original: int) -> RopeScaling:
    # Only `"factor": null` means the ratio of the two context lengths; a missing one is an error.
    ratio = "factor" in rope and rope["factor"] is None
    factor = context / original if ratio else _factor(rope, "yarn")
    if not rope.get("truncate", True):
        raise _error("rope_scaling", "yarn with truncate=false is not implemented")
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        # transformers: mscale and mscale_all_dim count only together.
        mscale, all_dim = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
        attention_factor = yarn_attention_factor(factor)
        if mscale and all_dim:
            attention_factor = yarn_attention_factor(factor, all_dim) / yarn_attention_factor(factor, mscale)
    scaling = RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=_number(rope, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", 1.0) or 1.0,
        attention_factor=_number({"attention_factor": attention_factor}, "attention_factor", 1.0),
    )
    _check_yarn_range(scaling, base, dim)
    return scaling


def _check_yarn_range(scaling: RopeScaling, base: float, dim: int) -> None:
    """Refuse betas between which no frequency lies: there `transformers` runs its ramp backwards."""
    if not (base > 1.0 and 0.0 < scaling.beta_fast < inf and 0.0 < scaling.beta_slow < inf):
        return  # ModelConfig.problems says it
    low, high = (
        dim * log(scaling.original_context_length / (turns * 2.0 * pi)) / (2.0 * log(base))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if max(floor(low), 0) > min(ceil(high), dim - 1):
        problem = (
            f"yarn with beta_fast {scaling.beta_fast} and beta_slow {scaling.beta_slow} blends no frequency"
        )
        raise _error(
            "rope_scaling", f"{problem} of {dim // 2}, over {scaling.original_context_length} positions"
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


def _sliding_window(text: Mapping[str, Any], model_type: str, blocks: int) -> int | None:
    """The window, where every layer has it; layers that differ are not implemented."""
    if model_type == "llama":
        return None
    window = text.get("sliding_window")
    qwen = model_type in ("qwen2", "qwen3")
    if qwen and not text.get("use_sliding_window"):
        window = None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
        raise _error("sliding_window", f"{window!r} is not an integer")
    kinds = None if model_type == "ministral3" else text.get("layer_types")  # ministral3 does not read them
    if kinds is None and qwen and window is not None:
        full = max(0, min(int(_number(text, "max_window_layers", blocks)), blocks))
        kinds = ["full_attention"] * full + ["sliding_attention"] * (blocks - full)
    if not (isinstance(kinds, list) and kinds):
        return window
    distinct = set(map(str, kinds))
    if distinct == {"full_attention"}:
        return None
    if distinct != {"sliding_attention"}:
        raise _error("sliding_window", f"layers differ ({', '.join(sorted(distinct))}); not implemented")
    if window is None:
        raise _error("sliding_window", "layer_types asks for a sliding window, and there is none")
    return window
