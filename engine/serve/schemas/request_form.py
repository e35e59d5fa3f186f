"""What OpenAI's two text routes have in common: n, stream and its options, max_tokens, the asks, and what every
object of an answer begins and ends with."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quengine.request.output import Timings
from quengine.request.sampling_params import RANGES, Range, SamplingParams
from quengine.serve.http import off_loop
from quengine.serve.processes.server_thread import Ask
from quengine.serve.processes.shared_engine import Finished
from quengine.serve.routes.streaming import DONE, data
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.fields import Fields, whole_number
from quengine.serve.schemas.sampling_fields import too_many
from quengine.serve.service import Service, Usage, new_id

LOGPROBS = Range(0, 20)
MAX_TOKENS = RANGES["max_tokens"]
_COUNT = RANGES["n"]


@dataclass(frozen=True)
class Delivery:
    """How the answer comes: in a stream or whole, with usage in the stream or not."""

    stream: bool
    include_usage: bool


def read_delivery(fields: Fields) -> Delivery:
    stream = fields.flag("stream") or False
    options = fields.object("stream_options")
    include_usage = False
    if options is not None:
        inner = Fields(options, "stream_options")
        include_usage = inner.flag("include_usage") or False
        inner.ignore("include_obfuscation")
        inner.finish()
        if include_usage and not stream:
            raise bad_request("stream_options is for streams: set stream to true", "stream_options")
    return Delivery(stream, include_usage)


def read_n(fields: Fields, service: Service) -> int:
    n = fields.integer("n", _COUNT) or 1
    if n > service.limits.n:
        raise too_many("n", n, service.limits.n, "--max-n")
    return n


def read_max_tokens(fields: Fields, service: Service, *keys: str) -> int | None:
    """The first of `keys` that is given; -1 means until the context is full."""
    values = {key: number for key in keys if (number := _count_or_full(fields, key)) is not None}
    value = next(iter(values.values()), None)
    return service.model.ctx_size if value == -1 else value


def _count_or_full(fields: Fields, key: str) -> int | None:
    value = fields.any(key)
    number = whole_number(value)
    if value is not None and (number is None or not (number == -1 or MAX_TOKENS.holds(number))):
        raise fields.wrong(key, f"must be a whole number {MAX_TOKENS}, or -1 for until the context is full")
    return number


async def prepare(service: Service, params: SamplingParams) -> None:
    """Compile what holds the text, off the loop. Raises ApiError for a schema or grammar that is wrong."""
    if params.constraint is not None:
        model = service.model
        await off_loop(lambda: model.prepare(params))


def asks_of(
    prompts: Sequence[Sequence[int]],
    n: int,
    params: SamplingParams,
    show_special: bool | frozenset[int] = False,
    score_prompt: bool = False,
) -> list[Ask]:
    """`n` texts of each prompt, in order; all under one seed."""
    seeded = params.with_seed()
    return [
        Ask(prompt, seeded, index, show_special, score_prompt) for prompt in prompts for index in range(n)
    ]


def answer_head(service: Service, id_prefix: str, kind: str) -> dict[str, Any]:
    """What an answer begins with, or each chunk of one; `kind` is OpenAI's `object`."""
    return {
        "id": new_id(id_prefix),
        "object": kind,
        "created": int(time.time()),
        "model": service.model_name,
    }


def answer_tail(prompts: Sequence[Sequence[int]], ends: Sequence[Finished]) -> dict[str, Any]:
    """What is told once all texts have ended. `prompts` are counted once each."""
    usage = Usage.of(prompts, ends).body
    return {"usage": usage, "seed": ends[0].seed, "timings": timings_body(ends[0].timings)}


def stream_end(
    head: dict[str, Any], prompts: Sequence[Sequence[int]], ends: Sequence[Finished], include_usage: bool
) -> bytes:
    """The last events of a stream: one without choices where usage was asked for, and [DONE]."""
    tail = {**head, "choices": [], **answer_tail(prompts, ends)}
    return (data(tail) if include_usage else b"") + DONE


def timings_body(timings: Timings) -> dict[str, Any]:
    """An engine's timings as llama-server's clients read them."""
    computed = timings.prompt_tokens - timings.cached_tokens
    decoded = max(0, timings.generated_tokens - 1)
    return {
        "cache_n": timings.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": 1e3 * timings.prompt_s,
        "prompt_per_token_ms": 1e3 * timings.prompt_s / computed if computed else 0.0,
        "prompt_per_second": timings.prompt_tok_s,
        "predicted_n": timings.generated_tokens,
        "predicted_ms": 1e3 * timings.decode_s,
        "predicted_per_token_ms": 1e3 * timings.decode_s / decoded if decoded else 0.0,
        "predicted_per_second": timings.decode_tok_s,
    } | _drafts_body(timings)


def _drafts_body(timings: Timings) -> dict[str, Any]:
    """What became of drafted tokens; nothing where none were."""
    if not timings.drafts:
        return {}
    return {
        "draft_n": timings.drafted_tokens,
        "draft_n_accepted": timings.accepted_tokens,
        "draft_steps": timings.drafts,
        "draft_accept_rate": timings.accept_rate,
        "draft_accept_length": timings.accept_length,
    }
