"""POST /v1/completions."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

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
from quengine.serve.routes.streaming import AnswerForm, data
from quengine.serve.schemas.openai import (
    Completion,
    CompletionChunk,
    CompletionRequest,
    TextChoice,
    TextScores,
)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route."""


async def completions(host: ModelHost, body: CompletionRequest) -> "CompletionForm":
    """Complete prompts."""
    return CompletionForm(host, await prepare_completions(host, body), body)


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


class CompletionForm(AnswerForm):
    """A text_completion object, or a stream of such."""

    def __init__(self, host: ModelHost, answers: Sequence[Answer], body: CompletionRequest) -> None:
        super().__init__(host, answers, body.stream)
        self._model, self._requests = host.model, self.requests
        self.echoed = [self._model.decode(each.prompt) if body.echo else "" for each in self._requests]
        """What each completion begins with: its prompt, or nothing."""
        self.include_usage = body.stream_options.include_usage
        self.verbose = host.verbose(body)
        self.live = LiveTimings(body, self._requests)
        self._offsets: dict[int, int] = {}
        self._head = answer_head(host, "cmpl-", "text_completion")
        self._whole = CompletionChunk(**self._head, choices=[])
        self._with_logprobs = self._requests[0].params.logprobs is not None

    def whole(self, outputs: Sequence[tuple[Part, End]]) -> Completion:
        choices = [
            TextChoice(
                index=index,
                text=self.echoed[index] + part.piece.text,
                logprobs=_logprobs(self._requests[index], part.piece, self._model),
                finish_reason=_reason(end),
                schema_violation=end.violation,
            )
            for index, (part, end) in enumerate(outputs)
        ]
        tail = answer_tail(self._requests, [end.finished for _, end in outputs])
        more = verbose_result(self.host, self.answers, outputs) if self.verbose else {}
        return Completion(**self._head, choices=choices, **tail, **more)

    def begin(self) -> bytes:
        if self._requests[0].score_prompt:
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
        request, echoed = self._requests[choice], b""
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
        request = self._requests[end.choice]
        more = {} if self.include_usage else answer_tail([request], [end.finished])
        if self.verbose:
            more |= verbose_chunk(self.host, end.choice, request, end.finished)
        return self._chunk(end.choice, "", None, _reason(end), more, end.violation)

    def end(self, ends: Sequence[Finished]) -> bytes:
        return stream_end(self._head, self._requests, ends, self.include_usage)

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
