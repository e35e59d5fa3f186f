"""POST /v1/completions."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from quengine.serve.apis.llama.native import verbose_chunk, verbose_result
from quengine.serve.apis.openai.answers import answer_head, answer_tail, stream_end
from quengine.serve.apis.openai.schemas import Completion, CompletionChunk, TextChoice, TextScores
from quengine.serve.apis.openai.text_scores import completion_logprobs, echoed_logprobs, joined_logprobs
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.answer_events import Answer, End, Part
from quengine.serve.routes.answers import LiveTimings
from quengine.serve.routes.logprob_forms import scored_tokens
from quengine.serve.routes.preparing import prepare_completions
from quengine.serve.routes.streaming import AnswerForm, data
from quengine.serve.schemas.canonical import CompletionRequest


async def completions(host: ModelHost, body: CompletionRequest) -> "CompletionForm":
    """Complete prompts."""
    return CompletionForm(host, await prepare_completions(host, body), body)


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
        self._model = answers[0].model
        self.echoed = [self._model.decode(each.prompt) if body.echo else "" for each in self.requests]
        """What each completion begins with: its prompt, or nothing."""
        self.include_usage = body.stream_options.include_usage
        self.verbose = host.verbose(body)
        self.live = LiveTimings(body, self.requests)
        self._offsets: dict[int, int] = {}
        self._head = answer_head(host, "cmpl-", "text_completion")
        self._whole = CompletionChunk(**self._head, choices=[])
        self._with_logprobs = self.requests[0].params.logprobs is not None

    def whole(self, outputs: Sequence[tuple[Part, End]]) -> Completion:
        choices = [
            TextChoice(
                index=index,
                text=self.echoed[index] + part.piece.text,
                logprobs=_logprobs(self.requests[index], part.piece, self._model),
                finish_reason=_reason(end),
                schema_violation=end.violation,
            )
            for index, (part, end) in enumerate(outputs)
        ]
        tail = answer_tail(self.requests, [end.finished for _, end in outputs])
        more = verbose_result(self.host, self.answers, outputs) if self.verbose else {}
        return Completion(**self._head, choices=choices, **tail, **more)

    def begin(self) -> bytes:
        if self.requests[0].score_prompt:
            return b""  # the prompts are given back with their log-probabilities, once these are there
        echoed = [(index, text) for index, text in enumerate(self.echoed) if text]
        return b"".join(self._chunk(index, text, None, None) for index, text in echoed)

    def part(self, part: Part) -> bytes:
        steps, more = self.live.of(part.choice, part.piece)
        progress = b"".join(self._chunk(part.choice, "", None, None, each) for each in steps)
        return progress + self._text(part.choice, part.piece, more)

    def _text(self, choice: int, piece: Piece, more: Mapping[str, Any]) -> bytes:
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
            more |= verbose_chunk(self.host, self.answers[end.choice], end.finished)
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
