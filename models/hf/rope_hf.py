"""Reads rotary positions and their scaling from a Hugging Face config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, inf, log, pi
from typing import Any

from quengine.models.config import LIMITS
from quengine.models.hf.hf_keys import config_error, number
from quengine.models.rotation import RopeScaling, longrope_attention_factor, yarn_attention_factor

# Kinds whose frequencies follow from the context that the model was first trained on.
_STRETCHED = ("llama3", "yarn", "longrope")


@dataclass(frozen=True)
class HFRope:
    """The first `dim` elements of a head turn with frequencies of `base`; `parameters`: config.json's, merged."""

    dim: int
    base: float
    scaling: RopeScaling
    parameters: Mapping[str, Any]


def read_rope(
    text: Mapping[str, Any], head_dim: int, context: int, scalings: frozenset[str], partial: bool
) -> HFRope:
    """The rotary embedding of the text model `text`, whose architecture has the kinds of scaling `scalings`.

    partial: its `partial_rotary_factor` is read, as a share of the head.
    """
    parameters = _parameters(text, context)
    base = number(parameters, "rope_theta", 10000.0)
    share = number({**text, **parameters}, "partial_rotary_factor", 1.0)
    dim = int(head_dim * share) if partial else head_dim
    if not partial and share != 1.0 and parameters["rope_type"] != "default":
        # With default RoPE these model types do not read it.
        problem = f"{share} with {parameters['rope_type']!r} RoPE is not implemented"
        raise config_error("partial_rotary_factor", problem)
    if partial and not 2 <= dim <= head_dim:
        raise config_error("partial_rotary_factor", f"{share} of {head_dim} elements is not from 2 to all")
    return HFRope(dim, base, _scaling(parameters, base, dim, context, scalings), parameters)


def _parameters(text: Mapping[str, Any], context: int) -> dict[str, Any]:
    """The parameters in `rope_theta` and `rope_scaling`, as written before transformers 5, or in `rope_parameters`.

    As in `transformers`, `rope_scaling` replaces `rope_parameters`, and keys at the top level fill in what these lack,
    except for the original context, where the top level takes precedence.
    """
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    given = text.get(key)
    if given is not None and not isinstance(given, Mapping):
        raise config_error(key, f"{given!r} is not an object")
    if given and any(isinstance(value, Mapping) for value in given.values()):
        raise config_error(key, "differs between layers, which the decoder does not implement")
    parameters = {"rope_theta": text.get("rope_theta", 10000.0), **(given or {})}
    if parameters["rope_theta"] is None:
        raise config_error("rope_theta", "null; leave it out for 10000, or give a number")
    kind = parameters.setdefault("rope_type", parameters.get("type", "default"))
    if kind in _STRETCHED:
        original = text.get(
            "original_max_position_embeddings", parameters.get("original_max_position_embeddings", context)
        )
        parameters["original_max_position_embeddings"] = original
        most = LIMITS["context_length"][1]
        if not isinstance(original, int) or isinstance(original, bool) or not 1 <= original <= most:
            raise config_error(
                "original_max_position_embeddings", f"{original!r} is not an integer from 1 to {most}"
            )
    return parameters


def _scaling(
    rope: Mapping[str, Any], base: float, dim: int, context: int, scalings: frozenset[str]
) -> RopeScaling:
    kind = rope["rope_type"]
    original = int(number(rope, "original_max_position_embeddings", context))
    if kind == "default":
        return RopeScaling(original_context_length=original)
    if not isinstance(kind, str) or kind not in scalings:
        known = ", ".join(sorted(scalings))
        raise config_error("rope_scaling", f"{kind!r} is not implemented; default, {known} are")
    if kind == "linear":
        return RopeScaling("linear", _factor(rope, kind), original)
    if kind == "llama3":
        return RopeScaling("llama3", 1.0, original, freq_factors=_llama3_factors(rope, base, dim, original))
    if kind == "longrope":
        return _longrope(rope, context, original)
    return _yarn(rope, base, dim, context, original)


def _factor(rope: Mapping[str, Any], kind: str) -> float:
    if rope.get("factor") is None:
        raise config_error("rope_scaling", f"{kind} RoPE needs a factor, and there is none")
    return number(rope, "factor", 1.0)


def _yarn(rope: Mapping[str, Any], base: float, dim: int, context: int, original: int) -> RopeScaling:
    # Only `"factor": null` means the ratio of the two context lengths; a missing one is an error.
    ratio = "factor" in rope and rope["factor"] is None
    factor = context / original if ratio else _factor(rope, "yarn")
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise config_error("rope_scaling", f"truncate {truncate!r} is not true or false")
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        # transformers: mscale and mscale_all_dim count only together.
        mscale, all_dim = number(rope, "mscale", 0.0), number(rope, "mscale_all_dim", 0.0)
        attention_factor = yarn_attention_factor(factor)
        if mscale and all_dim:
            attention_factor = yarn_attention_factor(factor, all_dim) / yarn_attention_factor(factor, mscale)
    scaling = RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=number(rope, "beta_fast", 32.0) or 32.0,
        beta_slow=number(rope, "beta_slow", 1.0) or 1.0,
        truncate=truncate,
        attention_factor=number({"attention_factor": attention_factor}, "attention_factor", 1.0),
    )
    _check_yarn_range(scaling, base, dim)
    return scaling


def _check_yarn_range(scaling: RopeScaling, base: float, dim: int) -> None:
    """Raises EngineError for betas with no frequency between them: there `transformers` runs its ramp backwards."""
    if not (base > 1.0 and 0.0 < scaling.beta_fast < inf and 0.0 < scaling.beta_slow < inf):
        return  # ModelConfig.problems reports it
    low, high = (
        dim * log(scaling.original_context_length / (turns * 2.0 * pi)) / (2.0 * log(base))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = floor(low), ceil(high)
    if max(low, 0) > min(high, dim - 1):
        problem = (
            f"yarn with beta_fast {scaling.beta_fast} and beta_slow {scaling.beta_slow} blends no frequency"
        )
        raise config_error(
            "rope_scaling", f"{problem} of {dim // 2}, over {scaling.original_context_length} positions"
        )


def _llama3_factors(rope: Mapping[str, Any], base: float, dim: int, original: int) -> tuple[float, ...]:
    from quengine.kernels.rope import llama3_freq_factors

    if not base > 1.0:
        raise config_error("rope_theta", f"{base} is not a finite number above 1")
    numbers = {}
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        numbers[key] = number(rope, key, 0.0)
        if not numbers[key] > 0.0:
            raise config_error("rope_scaling", f"llama3 needs a positive {key}, has {rope.get(key)}")
    if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise config_error("rope_scaling", "llama3 needs high_freq_factor above low_freq_factor")
    return llama3_freq_factors(
        dim, base, numbers["factor"], numbers["low_freq_factor"], numbers["high_freq_factor"], original
    )


def _longrope(rope: Mapping[str, Any], context: int, original: int) -> RopeScaling:
    factor = number(rope, "factor", context / original)
    attention_factor = longrope_attention_factor(factor, original)
    return RopeScaling(
        "longrope",
        original_context_length=original,
        attention_factor=number(rope, "attention_factor", attention_factor),
        freq_factors=_numbers(rope, "short_factor"),
        long_freq_factors=_numbers(rope, "long_factor"),
    )


def _numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list):
        raise config_error("rope_scaling", f"longrope needs {key}, a list of numbers")
    return tuple(number({key: value}, key, 0.0) for value in values)
