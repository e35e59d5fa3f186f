"""The sampling parameters of a request, under OpenAI's names and llama-server's.

The tables say what is read; `openapi_requests` makes the document of them.
"""

import re
from typing import Any

from quengine.errors import EngineError
from quengine.request.sampling_params import MAX_BIAS, MAX_SEED, RANGES, Range, SamplingParams
from quengine.serve.processes.shared_engine import ServedModel
from quengine.serve.schemas.errors import ApiError, bad_request
from quengine.serve.schemas.fields import Fields, Scalar, shown, token_ids
from quengine.serve.settings import Limits
from quengine.structured.constraint_spec import ConstraintSpec

_ID = re.compile("[0-9]{1,9}")
_BIAS = Range(-MAX_BIAS, MAX_BIAS)
_SEED = Range(-(2**63), MAX_SEED)
"""OpenAI's are signed 64-bit numbers, ours unsigned ones."""


def _number(name: str, about: str) -> Scalar:
    return Scalar("number", RANGES[name], about)


def _integer(name: str, about: str) -> Scalar:
    return Scalar("integer", RANGES[name], about)


SCALARS: dict[str, Scalar] = {
    "temperature": _number("temperature", "0 takes the likeliest token."),
    "top_k": _integer("top_k", "Keep so many of the likeliest tokens; 0 or -1: all."),
    "top_p": _number("top_p", "Keep the likeliest tokens that together reach this probability."),
    "min_p": _number("min_p", "Drop tokens less likely than this share of the likeliest one."),
    "typical_p": _number("typical_p", "Keep the tokens of most typical surprise; 1: all."),
    "repeat_penalty": _number("repeat_penalty", "Divides the logits of recent tokens; 1: none."),
    "repeat_last_n": _integer("repeat_last_n", "How many tokens the penalties look at; -1: all."),
    "presence_penalty": _number("presence_penalty", "Subtracted from the logit of every recent token."),
    "frequency_penalty": _number(
        "frequency_penalty", "Subtracted for every time a token is among the recent ones."
    ),
    "seed": Scalar("integer", _SEED, "Gives the same text again; -1 draws one."),
    "ignore_eos": Scalar("boolean", about="Go on after the model's end tokens."),
}
"""The parameters that are one value each, by the engine's names."""

# Samplers that the engine lacks, and the values that switch them off.
OFF: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1, 0),
    "tfs_z": (1,),
    "min_keep": (0, 1),
    "min_tokens": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "t_max_predict_ms": (-1, 0),
    "n_indent": (0,),
    "bad_words": ([],),
    "lora": ([],),
    "samplers": (),
    "logits_processors": (),
    "prompt_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "priority": (0,),
}
# Parameters of those samplers, and hints that change no token.
WITHOUT_EFFECT = (
    "mirostat_tau",
    "mirostat_eta",
    "dynatemp_exponent",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_threshold",
    "cache_prompt",
    "id_slot",
    "n_keep",
    "n_discard",
    "n_cache_reuse",
    "timings_per_token",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "spaces_between_special_tokens",
)


def read_sampling(
    fields: Fields,
    defaults: SamplingParams,
    limits: Limits,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    constraint: ConstraintSpec | None,
) -> SamplingParams:
    """The parameters that every route shares; the routes name `max_tokens` and `logprobs` each their own way.

    Raises ApiError for what is out of range, over a limit, or not supported.
    """
    for key, off in OFF.items():
        fields.neutral(key, *off)
    fields.ignore(*WITHOUT_EFFECT)
    given: dict[str, Any] = {key: fields.scalar(key, scalar) for key, scalar in SCALARS.items()}
    other_name = fields.scalar("repetition_penalty", SCALARS["repeat_penalty"])
    given |= {
        "repeat_penalty": given["repeat_penalty"] if other_name is None else other_name,
        "seed": _seed(given["seed"]),
        "stop": _stops(fields, limits),
        "stop_token_ids": _stop_ids(fields, limits, model),
        "logit_bias": _biases(fields, limits, model),
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "constraint": constraint,
    }
    settings = {key: value for key, value in given.items() if value is not None}
    base = {key: getattr(defaults, key) for key in given}
    try:
        return SamplingParams(**(base | settings))
    except EngineError as error:
        raise bad_request(str(error), code="invalid_value") from None


def too_many(name: str, count: int, limit: int, flag: str) -> ApiError:
    """A limit was passed; `flag` is the server's flag that sets it."""
    return bad_request(
        f"{name}: {shown(count)} given, this server takes at most {limit} ({flag})", name, "over_limit"
    )


def _seed(seed: int | None) -> int | None:
    """-1 draws one. OpenAI's seeds are signed: another negative one stands for the 64-bit number of its bits."""
    return None if seed is None or seed == -1 else seed % 2**64


def _stops(fields: Fields, limits: Limits) -> tuple[str, ...] | None:
    value = fields.any("stop")
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or any(not isinstance(stop, str) for stop in stops):
        raise fields.wrong("stop", "must be a string or an array of strings")
    if len(stops) > limits.stops:
        raise too_many("stop", len(stops), limits.stops, "--max-stops")
    if "" in stops:
        raise fields.wrong("stop", "a stop string must have at least one character")
    return tuple(stops)


def _stop_ids(fields: Fields, limits: Limits, model: ServedModel) -> tuple[int, ...] | None:
    ids = fields.array("stop_token_ids")
    if ids is None:
        return None
    if len(ids) > limits.stops:
        raise too_many("stop_token_ids", len(ids), limits.stops, "--max-stops")
    return tuple(token_ids(ids, "stop_token_ids", model.vocab_size))


def _biases(fields: Fields, limits: Limits, model: ServedModel) -> dict[int, float] | None:
    """OpenAI's {"id": bias}, or llama-server's [[id or text, bias or false]]."""
    value = fields.any("logit_bias")
    if value is None:
        return None
    if isinstance(value, dict):
        pairs = [[int(key) if _ID.fullmatch(key) else key, v] for key, v in value.items()]
    elif isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        pairs = value
    else:
        raise fields.wrong("logit_bias", "must be an object {token id: bias} or an array of [token, bias]")
    if len(pairs) > limits.biases:
        raise too_many("logit_bias", len(pairs), limits.biases, "--max-logit-bias")
    biases: dict[int, float] = {}
    for token, bias in pairs:
        number = float("-inf") if bias is False else bias
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not (bias is False or _BIAS.holds(number)):
            rule = f"a bias must be a number {_BIAS}, or false to ban the token"
            raise bad_request(
                f"logit_bias of {shown(token, 40)} = {shown(bias, 40)}: {rule}", "logit_bias", "invalid_value"
            )
        text = isinstance(token, str) and isinstance(value, list)
        ids = model.encode(token, bos=False, special=False) if text else [token]
        for token_id in token_ids(ids, "logit_bias", model.vocab_size):
            biases[token_id] = float(number)
    return biases
