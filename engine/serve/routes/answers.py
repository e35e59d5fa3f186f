"""What the answers of several APIs have in common: ids, counts of tokens, progress and timings."""

import secrets
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from quengine import __version__
from quengine.request.output import Timings
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece, PromptProgress
from quengine.serve.schemas import shared_answers
from quengine.serve.schemas.fields import Generation

FINGERPRINT = f"b{__version__}-quengine"
"""`system_fingerprint` and `build_info`. It begins like llama-server's (b1234-commit), but has another form."""


def new_id(kind: str) -> str:
    return f"{kind}{secrets.token_hex(12)}"


def token_counts(requests: Sequence[GenerationRequest], ends: Sequence[Finished]) -> tuple[int, int, int]:
    """The numbers of prompt tokens, of cached prompt tokens, and of generated tokens. A prompt counts once, however
    many completions it has."""
    return (
        sum(prompt_tokens(*each) for each in zip_longest(requests, ends) if each[0].index == 0),
        max((end.timings.cached_tokens for end in ends), default=0),
        sum(end.timings.generated_tokens for end in ends),
    )


def prompt_tokens(request: GenerationRequest, end: Finished | None = None) -> int:
    """The number of a prompt's tokens; once the completion has ended it includes the rows of images."""
    return end.timings.prompt_tokens if request.images and end is not None else len(request.prompt)


class LiveTimings:
    """The progress of prompts and the timings in a stream's events, while completions still run.

    Args:
        body: requests timings with `timings_per_token`, and progress with `return_progress`.
    """

    def __init__(self, body: Generation, requests: Sequence[GenerationRequest]) -> None:
        self._timings, self._progress = body.timings_per_token, body.return_progress
        self._requests = requests
        self._began = time.perf_counter()
        self._cached, self._generated = dict[int, int](), dict[int, int]()
        self._first_at: dict[int, float] = {}

    def of(self, choice: int, piece: Piece) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The fields of an event for each step of the prompt in the piece, and those of the events of its tokens."""
        if not (self._timings or self._progress):
            return [], {}
        if piece.progress:
            self._cached[choice] = piece.progress[-1].cache
        steps = [self._of_progress(each) for each in piece.progress] if self._progress else []
        return steps, self._after(choice, piece) if self._timings and (piece.tokens or piece.text) else {}

    def _of_progress(self, each: PromptProgress) -> dict[str, Any]:
        times = Timings(prompt_tokens=each.processed, cached_tokens=each.cache, prompt_s=each.time_ms / 1e3)
        progress = shared_answers.PromptProgress(each.total, each.cache, each.processed, each.time_ms)
        return {"prompt_progress": progress} | ({"timings": timings_body(times)} if self._timings else {})

    def _after(self, choice: int, piece: Piece) -> dict[str, Any]:
        now = time.perf_counter()
        first_at = self._first_at.setdefault(choice, now)
        self._generated[choice] = self._generated.get(choice, 0) + len(piece.tokens)
        times = Timings(
            prompt_tokens=len(self._requests[choice].prompt),
            cached_tokens=self._cached.get(choice, 0),
            prompt_s=first_at - self._began,
            generated_tokens=self._generated[choice],
            decode_s=now - first_at,
        )
        return {"timings": timings_body(times)}


def timings_body(timings: Timings) -> shared_answers.Timings:
    """An engine's timings in the form of an answer."""
    computed = timings.prompt_tokens - timings.cached_tokens
    decoded = max(0, timings.generated_tokens - 1)
    body = shared_answers.Timings(
        cache_n=timings.cached_tokens,
        prompt_n=computed,
        prompt_ms=1e3 * timings.prompt_s,
        prompt_per_token_ms=1e3 * timings.prompt_s / computed if computed else 0.0,
        prompt_per_second=timings.prompt_tok_s,
        predicted_n=timings.generated_tokens,
        predicted_ms=1e3 * timings.decode_s,
        predicted_per_token_ms=1e3 * timings.decode_s / decoded if decoded else 0.0,
        predicted_per_second=timings.decode_tok_s,
    )
    if timings.drafts:
        body.draft_n, body.draft_n_accepted = timings.drafted_tokens, timings.accepted_tokens
        body.draft_steps = timings.drafts
        body.draft_accept_rate, body.draft_accept_length = timings.accept_rate, timings.accept_length
    if timings.shifts:
        body.shift_n, body.shift_discarded_n = timings.shifts, timings.discarded_tokens
    return body
