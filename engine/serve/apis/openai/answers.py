"""The first and last fields of answers in OpenAI's form."""

import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from quengine.serve.apis.openai.schemas import CachedTokens, ReasoningTokens, Usage
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished, GenerationRequest
from quengine.serve.routes.answers import FINGERPRINT, new_id, timings_body, token_counts
from quengine.serve.routes.streaming import DONE, data


def answer_head(host: ModelHost, id_prefix: str, kind: str) -> dict[str, Any]:
    """The first fields of an answer, or of each chunk of one. kind: OpenAI's `object`."""
    return {
        "id": new_id(id_prefix),
        "object": kind,
        "created": int(time.time()),
        "model": host.name,
        "system_fingerprint": FINGERPRINT,
    }


def answer_tail(
    requests: Sequence[GenerationRequest], ends: Sequence[Finished], reasoning: int = 0
) -> dict[str, Any]:
    """Usage, seed and timings, once all completions have ended. reasoning: how many generated tokens are reasoning."""
    prompt, cached, generated = token_counts(requests, ends)
    details = ReasoningTokens(reasoning) if reasoning else UNSET
    usage = Usage(prompt, generated, prompt + generated, CachedTokens(cached), details)
    return {"usage": usage, "seed": ends[0].seed, "timings": timings_body(ends[0].timings)}


def stream_end(
    head: dict[str, Any],
    requests: Sequence[GenerationRequest],
    ends: Sequence[Finished],
    include_usage: bool,
    reasoning: int = 0,
) -> bytes:
    """The last events of a stream: usage, in an event without choices, where it is requested, and [DONE]."""
    tail = {**head, "choices": [], **answer_tail(requests, ends, reasoning)}
    return (data(tail) if include_usage else b"") + DONE
