"""Vectors of texts, for every API."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from quengine.errors import EngineError
from quengine.request.pooling import Pooling, default_pooling, task_prefix
from quengine.request.sampling_params import SamplingParams
from quengine.serve.http import to_json
from quengine.serve.models.model_host import ModelHost, Vector
from quengine.serve.processes.shared_engine import GenerationRequest
from quengine.serve.routes.prompts import read_prompts
from quengine.serve.routes.streaming import answered
from quengine.serve.schemas.canonical import EmbeddingRequest
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.reading import wrong_value

MAX_NUMBERS = 1 << 24
"""Of all rows that one request asks for: 128 MiB, and some 330 MB of JSON."""


async def embed(
    host: ModelHost, body: EmbeddingRequest, notes: list[str] | None = None
) -> tuple[list[Vector], int]:
    """The vector of each prompt of a body, and how many tokens the prompts have. Raises ApiError.

    notes: prompts that do not fit lose their end, and a line about it is added here.
    """
    host.check_model_name(body.model)
    pooling, width = chosen_pooling(host, body.pooling), host.model.facts["n_embd"]
    if pooling == "none":
        raise bad_request(
            "pooling none gives a row for each token: POST /embeddings", "pooling", "unsupported"
        )
    if body.dimensions is not None and body.dimensions > width:
        raise wrong_value(EmbeddingRequest, "dimensions", body.dimensions, f"must be at most {width}")
    given = _begun(body.input, _task_prefix(host, body.task))
    prompts = await read_prompts(host, given, "input", body.parse_special, ended=True, notes=notes)
    vectors = await embedded(host, prompts, pooling, "input", body.task)
    return [_shortened(vector, body.dimensions) for vector in vectors], sum(map(len, prompts))


def chosen_pooling(host: ModelHost, asked: Pooling | None) -> Pooling:
    """The pooling that the request, or else the server, or else the model sets. Raises ApiError if the model's is not
    supported."""
    try:
        return asked or host.settings.pooling or default_pooling(host.model.pooling)
    except EngineError as failure:
        raise bad_request(str(failure), "pooling", "unsupported") from None


def _task_prefix(host: ModelHost, task: str | None) -> str:
    """The prefix of texts that are embedded for a task. Raises ApiError where the model has no adapter for it."""
    try:
        return task_prefix(host.model.tasks, task)
    except EngineError as failure:
        raise bad_request(str(failure), "task", "unsupported") from None


def _begun(given: Any, prefix: str) -> Any:
    """Inputs with a prefix before each text. Token ids, and arrays of both ids and texts, stay as they are."""
    if isinstance(given, str):
        return prefix + given
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return [prefix + each for each in given]
    return given


async def embedded(
    host: ModelHost,
    prompts: Sequence[Sequence[int]],
    pooling: Pooling | Literal["rank"],
    key: str,
    task: str | None = None,
) -> list[Vector]:
    """The vector of each prompt in the field `key`, embedded for `task`. With pooling `none` it has the prompt's rows
    one after the other, with `rank` the outputs of the model's head.

    Raises ApiError.
    """
    rows = sum(map(len, prompts)) if pooling == "none" else len(prompts)
    width = host.model.facts["n_embd"]
    if rows * width > MAX_NUMBERS:
        what = "tokens and no pooling, that is" if pooling == "none" else "inputs, that is"
        raise bad_request(
            f"{key}: {rows} {what} {rows * width} values: at most {MAX_NUMBERS} are given at once",
            key,
            "over_limit",
        )
    params = SamplingParams(temperature=0, lora=host.lora).with_seed()
    requests = [GenerationRequest(prompt, params, pooling=pooling, task=task) for prompt in prompts]
    return await answered(host, requests, host.vectors)


def as_json(value: Any) -> msgspec.Raw:
    """A part of an answer, encoded at once, so that its numbers are never all Python objects."""
    return msgspec.Raw(to_json(value))


def _shortened(vector: Vector, dimensions: int | None) -> Vector:
    """The first `dimensions` values, again of unit length."""
    if dimensions is None:
        return vector
    first = vector[:dimensions]
    length = math.hypot(*first)
    return first / length if length else first
