"""POST /v1/completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.http import json_response, read_request, unless_gone
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.answer_events import Answer, End, Part, text_answers
from quengine.serve.routes.answers import LiveTimings, answer_head, answer_tail, stream_end
from quengine.serve.routes.constraints import read_constraint
from quengine.serve.routes.infill import suffix_prompt
from quengine.serve.routes.logprob_forms import (
    completion_logprobs,
    echoed_logprobs,
    joined_logprobs,
    scored_tokens,
)
from quengine.serve.routes.native import verbose_chunk, verbose_result
from quengine.serve.routes.prompts import read_prompts
from quengine.serve.routes.sampling import check_choices, completions_of, requests_of, sampling_params
from quengine.serve.routes.streaming import ChunkForm, data, stream_answer, whole_answer
from quengine.serve.schemas.openai import (
    Completion,
    CompletionChunk,
    CompletionRequest,
    TextChoice,
    TextScores,
)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route."""


async def completions(host: ModelHost, request: Request) -> Response:
    """Complete prompts."""
    body = await read_request(request, CompletionRequest, host.limits)
    answers = await unless_gone(request.receive, prepare_completions(host, body))
    model, requests = host.model, [answer.request for answer in answers]
    echoed = [model.decode(each.prompt) if body.echo else "" for each in requests]
    if body.stream:
        live = LiveTimings(body, requests)
        chunks = _Chunks(host, requests, echoed, body.stream_options.include_usage, host.verbose(body), live)
        return await stream_answer(host, request, answers, chunks)
    outputs = await whole_answer(host, request, answers)
    more = verbose_result(host, answers, outputs) if host.verbose(body) else {}
    return json_response(_body(host, requests, echoed, outputs, more))


async def prepare_completions(host: ModelHost, body: CompletionRequest) -> list[Answer]:
    """The completions of all prompts. Raises ApiError."""
    host.check_model_name(body.model)
    check_choices(body, host.limits)
    default = host.settings.defaults.max_tokens
    params = await sampling_params(
        host,
        body,
        logprobs=body.logprobs,
        constraint=await read_constraint(body),
        max_tokens=DEFAULT_MAX_TOKENS if default is None else default,
    )
    given: Any = suffix_prompt(host.model, body) if body.suffix else body.prompt
    special = body.parse_special and not body.suffix
    images = list[tuple[bytes, ...]]()
    prompts = await read_prompts(host, given, "prompt", special, images=images)
    scored = body.echo and body.logprobs is not None and not params.post_sampling_probs
    shown = not body.skip_special_tokens
    n = completions_of(body)
    requests = requests_of(prompts, n, params, shown, scored, body.reports, body.id_slot, images=images)
    return text_answers(host, requests)


def _body(
    host: ModelHost,
    requests: Sequence[GenerationRequest],
    echoed: Sequence[str],
    outputs: Sequence[tuple[Part, End]],
    more: Mapping[str, Any],
) -> Completion:
    choices = [
        TextChoice(
            index=index,
            text=echoed[index] + part.piece.text,
            logprobs=_logprobs(requests[index], part.piece, host.model),
            finish_reason=_reason(end),
            schema_violation=end.violation,
        )
        for index, (part, end) in enumerate(outputs)
    ]
    head, tail = (
        answer_head(host, "cmpl-", "text_completion"),
        answer_tail(requests, [e.finished for _, e in outputs]),
    )
    return Completion(**head, choices=choices, **tail, **more)


def _reason(end: End) -> Literal["stop", "length"]:
    return "length" if end.reason == "length" else "stop"


def _logprobs(request: GenerationRequest, piece: Piece, model: ServedModel) -> TextScores | None:
    if request.params.logprobs is None:
        return None
    if request.params.post_sampling_probs:  # llama-server's form
        return TextScores(content=scored_tokens(piece.logprobs, model, sampled=True))
    if not request.score_prompt:
        return completion_logprobs(piece.logprobs, model, 0)[0]
    prompt, offset = echoed_logprobs(request.prompt, piece.prompt_logprobs, model)
    return joined_logprobs(prompt, completion_logprobs(piece.logprobs, model, offset)[0])


@dataclass
class _Chunks(ChunkForm):
    """A stream of text_completion objects."""

    host: ModelHost
    requests: Sequence[GenerationRequest]
    echoed: Sequence[str]
    """What each completion begins with: its prompt, or nothing."""
    include_usage: bool
    verbose: bool
    live: LiveTimings
    _offsets: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._head = answer_head(self.host, "cmpl-", "text_completion")
        self._whole = CompletionChunk(**self._head, choices=[])
        self._with_logprobs = self.requests[0].params.logprobs is not None
        self._model = self.host.model

    def begin(self) -> bytes:
        if self.requests[0].score_prompt:
            return b""  # the prompts are given back with their log-probabilities, once these are there
        echoed = [(index, text) for index, text in enumerate(self.echoed) if text]
        return b"".join(self._chunk(index, text, None, None) for index, text in echoed)

    def part(self, part: Part) -> bytes:
        return self._progress(part.choice, part.piece) + self._text(part.choice, part.piece)

    def _progress(self, choice: int, piece: Piece) -> bytes:
        return b"".join(
            self._chunk(choice, "", None, None, each) for each in self.live.progress(choice, piece)
        )

    def _text(self, choice: int, piece: Piece) -> bytes:
        more = self.live.after(choice, piece)
        if not self._with_logprobs:
            return self._chunk(choice, piece.text, None, None, more) if piece.text else b""
        request, echoed = self.requests[choice], b""
        if request.score_prompt and choice not in self._offsets and (piece.tokens or piece.prompt_logprobs):
            scores, self._offsets[choice] = echoed_logprobs(
                request.prompt, piece.prompt_logprobs, self._model
            )
            echoed = self._chunk(choice, self.echoed[choice], scores, None)
        if not piece.tokens and not piece.text:
            return echoed
        if request.params.post_sampling_probs:
            return self._chunk(choice, piece.text, _logprobs(request, piece, self._model), None)
        start = self._offsets.get(choice, 0)
        logprobs, self._offsets[choice] = completion_logprobs(piece.logprobs, self._model, start)
        return echoed + self._chunk(choice, piece.text, logprobs, None, more)

    def finished(self, end: End) -> bytes:
        request = self.requests[end.choice]
        more = {} if self.include_usage else answer_tail([request], [end.finished])
        if self.verbose:
            more |= verbose_chunk(self.host, end.choice, request, end.finished)
        return self._chunk(end.choice, "", None, _reason(end), more, end.violation)

    def end(self, ends: Sequence[Finished]) -> bytes:
        return stream_end(self._head, self.requests, ends, self.include_usage)

    def _chunk(
        self,
        choice: int,
        text: str,
        logprobs: TextScores | None,
        reason: Literal["stop", "length"] | None,
        more: Mapping[str, Any] | None = None,
        violation: str | UnsetType = UNSET,
    ) -> bytes:
        self._whole.choices = [
            TextChoice(
                index=choice, text=text, logprobs=logprobs, finish_reason=reason, schema_violation=violation
            )
        ]
        return data(replace(self._whole, **more) if more else self._whole)
