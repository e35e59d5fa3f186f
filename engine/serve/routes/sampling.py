"""Makes the sampling parameters of a generating request, and the engine's requests, from its body, the server's
defaults and limits, and the model's vocabulary."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quengine.errors import EngineError
from quengine.request.sampling_params import MAX_BIAS, MAX_COUNT, MAX_SEED, Range, SamplingParams
from quengine.serve import access_log
from quengine.serve.http import off_loop
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import GenerationRequest
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.processes.shared_text import utf8_size
from quengine.serve.schemas.canonical import ChatRequest, CompletionRequest, Native
from quengine.serve.schemas.errors import ApiError, bad_request
from quengine.serve.schemas.fields import Accepted, Generation, LoraAdapter, Sampling
from quengine.serve.schemas.reading import shown, token_ids, wrong_value
from quengine.serve.settings import Limits
from quengine.structured.constraint_spec import ConstraintSpec

_DIGITS = re.compile("[0-9]+")
_ID_DIGITS = 9
_BIAS = Range(-MAX_BIAS, MAX_BIAS)
_BIAS_BYTES = 8 << 10
"""The most bytes of all texts of logit_bias together, which are tokenized in the event loop."""
_NAMES = Sampling.__struct_fields__[len(Accepted.__struct_fields__) :]
"""The fields of a request that are sampling parameters unchanged."""


async def sampling_params(
    host: ModelHost,
    body: Generation,
    *,
    logprobs: int | None,
    constraint: ConstraintSpec | None,
    max_tokens: int | None = None,
) -> SamplingParams:
    """The parameters of a request. max_tokens: the number where the request gives none.

    Raises ApiError for a value over a limit, a token not in the vocabulary, or a constraint that cannot be compiled.
    """
    limits, model = host.limits, host.model
    given = {name: getattr(body, name) for name in _NAMES}
    shifts = host.settings.defaults.context_shift if body.context_shift is None else body.context_shift
    if body.repetition_penalty is not None:
        given["repeat_penalty"] = body.repetition_penalty
    given |= {
        "seed": _seed(body),
        "stop": _stops("stop", body.stop, limits),
        "dry_sequence_breakers": _stops("dry_sequence_breakers", body.dry_sequence_breakers, limits),
        "stop_token_ids": _stop_ids(body.stop_token_ids, limits, model),
        "logit_bias": _biases(body.logit_bias, limits, model),
        "max_tokens": _max_tokens(body, MAX_COUNT if shifts else model.ctx_size, max_tokens),
        "logprobs": logprobs,
        "constraint": constraint,
        "lora": host.lora if body.lora is None else adapter_scales(body.lora, model),
    }
    settings: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if body.seed == -1:
        settings["seed"] = None  # drawn, also where the server has a seed
    try:
        params = replace(host.settings.defaults, **settings)
    except EngineError as error:
        raise bad_request(str(error), code="invalid_value") from None
    if constraint is not None:
        await off_loop(lambda: model.prepare(params))
    return params


def adapter_scales(given: Sequence[LoraAdapter], model: ServedModel) -> dict[int, float]:
    """The scales of adapters by number; adapters that are not given have 0. Raises ApiError for an unknown adapter."""
    scales = {number: scale for number, scale in {each.id: each.scale for each in given}.items() if scale}
    try:
        model.adapters.of(scales)
    except EngineError as error:
        raise bad_request(str(error), "lora", "invalid_value") from None
    return scales


def check_choices(body: ChatRequest | CompletionRequest | Native, limits: Limits) -> None:
    """Raises ApiError for more completions of a prompt than the server takes."""
    for name, count in (("n", body.n), ("n_cmpl", body.n_cmpl or 1)):
        if count > limits.n:
            raise _too_many(name, count, limits.n, "--max-n")
    if not isinstance(body, Native) and body.stream_options.include_usage and not body.stream:
        access_log.current().ignored.append("stream_options")


def completions_of(body: ChatRequest | CompletionRequest | Native) -> int:
    """How many completions of each prompt are wanted."""
    return body.n_cmpl or body.n


def requests_of(
    prompts: Sequence[Sequence[int]],
    n: int,
    params: SamplingParams,
    show_special: bool | frozenset[int] = False,
    score_prompt: bool = False,
    progress: bool = False,
    slot: int = -1,
    images: Sequence[tuple[bytes, ...]] = (),
) -> list[GenerationRequest]:
    """`n` completions of each prompt, in order, all with one seed. slot: for the first completion of each prompt.
    images: those of each prompt; empty: there are none."""
    seeded = params.with_seed()
    return [
        GenerationRequest(
            *(prompt, seeded, index, show_special, score_prompt, progress),
            images=shown,
            slot=-1 if index else slot,
        )
        for prompt, shown in zip(prompts, images or [()] * len(prompts), strict=True)
        for index in range(n)
    ]


def _too_many(name: str, count: int, limit: int, flag: str) -> ApiError:
    """The error for a limit that was exceeded. flag: the server's flag that sets it."""
    return bad_request(
        f"{name}: {shown(count)} given, this server takes at most {limit} ({flag})", name, "over_limit"
    )


def _max_tokens(body: Generation, unlimited: int, default: int | None) -> int | None:
    given = (value for key in body.MAX_TOKENS if (value := getattr(body, key)) is not None)
    first: int | None = next(given, default)
    return unlimited if first == -1 else first


def _seed(body: Generation) -> int | None:
    """The seed; None: to be drawn, also for -1. Other negative seeds, as OpenAI's may be, count as unsigned 64 bits."""
    if body.seed is not None and body.seed > MAX_SEED:
        raise wrong_value(type(body), "seed", body.seed)
    return None if body.seed is None or body.seed == -1 else body.seed % 2**64


def _stops(name: str, given: str | list[str] | None, limits: Limits) -> tuple[str, ...] | None:
    stops = [given] if isinstance(given, str) else given
    stops = stops and [stop for stop in stops if stop]  # llama-server ignores empty ones
    if stops is not None and len(stops) > limits.stops:
        raise _too_many(name, len(stops), limits.stops, "--max-stops")
    return None if stops is None else tuple(stops)


def _stop_ids(ids: list[Any] | None, limits: Limits, model: ServedModel) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if len(ids) > limits.stops:
        raise _too_many("stop_token_ids", len(ids), limits.stops, "--max-stops")
    return tuple(token_ids(ids, "stop_token_ids", model.vocab_size))


def _biases(value: Any, limits: Limits, model: ServedModel) -> dict[int, float] | None:
    """Token -> bias of OpenAI's {"id": bias} or llama-server's {text: bias} and [[id or text, bias or false]]. The bias
    of a text applies to each of its tokens."""
    if value is None:
        return None
    if isinstance(value, dict):
        pairs = [[_key(key), bias] for key, bias in value.items()]
    elif all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        pairs = value
    else:
        raise wrong_value(Generation, "logit_bias", value)
    if len(pairs) > limits.biases:
        raise _too_many("logit_bias", len(pairs), limits.biases, "--max-logit-bias")
    size = sum(utf8_size(token) for token, _ in pairs if isinstance(token, str))
    if size > _BIAS_BYTES:
        message = f"logit_bias: its texts have {size} bytes, at most {_BIAS_BYTES} are taken"
        raise bad_request(message, "logit_bias", "over_limit")
    biases: dict[int, float] = {}
    for token, bias in pairs:
        number = float("-inf") if bias is False else bias
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not (bias is False or _BIAS.holds(number)):
            rule = f"a bias must be a number {_BIAS}, or false to ban the token"
            raise bad_request(
                f"logit_bias of {shown(token, 40)} = {shown(bias, 40)}: {rule}", "logit_bias", "invalid_value"
            )
        ids = model.encode(token, bos=False, special=False) if isinstance(token, str) else [token]
        for token_id in token_ids(ids, "logit_bias", model.vocab_size):
            biases[token_id] = float(number)
    return biases


def _key(key: str) -> int | str:
    """A key of logit_bias: a token id or a text. Raises ApiError for more digits than an id has."""
    if not _DIGITS.fullmatch(key):
        return key
    if len(key) > _ID_DIGITS:
        raise bad_request(
            f"logit_bias of {shown(key, 40)}: there is no such token", "logit_bias", "invalid_value"
        )
    return int(key)
