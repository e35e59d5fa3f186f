"""What the answers of several routes have in common: how each begins and ends, usage and timings."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from quengine.request.output import Timings
from quengine.serve.processes.shared_engine import Finished, GenerationRequest
from quengine.serve.routes.streaming import DONE, data
from quengine.serve.service import Service


def new_id(kind: str) -> str:
    return f"{kind}{secrets.token_hex(12)}"


def answer_head(service: Service, id_prefix: str, kind: str) -> dict[str, Any]:
    """What an answer begins with, or each chunk of one; `kind` is OpenAI's `object`."""
    return {
        "id": new_id(id_prefix),
        "object": kind,
        "created": int(time.time()),
        "model": service.model_name,
    }


def answer_tail(
    requests: Sequence[GenerationRequest], ends: Sequence[Finished], reasoning: int = 0
) -> dict[str, Any]:
    """Usage, seed and timings, once all completions have ended; `reasoning` tokens are among the generated ones."""
    prompt, cached, generated = token_counts(requests, ends)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        **({"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {}),
    }
    return {"usage": usage, "seed": ends[0].seed, "timings": timings_body(ends[0].timings)}


def token_counts(requests: Sequence[GenerationRequest], ends: Sequence[Finished]) -> tuple[int, int, int]:
    """Tokens of the prompts, each counted once for all its completions; of these, cached ones; generated tokens."""
    return (
        sum(len(request.prompt) for request in requests if request.index == 0),
        max((end.timings.cached_tokens for end in ends), default=0),
        sum(end.timings.generated_tokens for end in ends),
    )


def stream_end(
    head: dict[str, Any],
    requests: Sequence[GenerationRequest],
    ends: Sequence[Finished],
    include_usage: bool,
    reasoning: int = 0,
) -> bytes:
    """The last events of a stream: one without choices where usage is wanted, and [DONE]."""
    tail = {**head, "choices": [], **answer_tail(requests, ends, reasoning)}
    return (data(tail) if include_usage else b"") + DONE


def timings_body(timings: Timings) -> dict[str, Any]:
    """An engine's timings as llama-server's clients read them; drafts and context shifts only where there were any."""
    computed = timings.prompt_tokens - timings.cached_tokens
    decoded = max(0, timings.generated_tokens - 1)
    body = {
        "cache_n": timings.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": 1e3 * timings.prompt_s,
        "prompt_per_token_ms": 1e3 * timings.prompt_s / computed if computed else 0.0,
        "prompt_per_second": timings.prompt_tok_s,
        "predicted_n": timings.generated_tokens,
        "predicted_ms": 1e3 * timings.decode_s,
        "predicted_per_token_ms": 1e3 * timings.decode_s / decoded if decoded else 0.0,
        "predicted_per_second": timings.decode_tok_s,
    }
    if timings.drafts:
        body |= {
            "draft_n": timings.drafted_tokens,
            "draft_n_accepted": timings.accepted_tokens,
            "draft_steps": timings.drafts,
            "draft_accept_rate": timings.accept_rate,
            "draft_accept_length": timings.accept_length,
        }
    if timings.shifts:
        body |= {"shift_n": timings.shifts, "shift_discarded_n": timings.discarded_tokens}
    return body
