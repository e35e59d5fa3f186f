"""POST /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from quengine.serve.apis.llama.native import verbose_chunk, verbose_result
from quengine.serve.apis.openai.answers import answer_head, answer_tail, stream_end
from quengine.serve.apis.openai.schemas import (
    ChatAnswer,
    ChatCall,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatPiece,
    ChatReason,
    ChatScores,
    FunctionCall,
    PromptTokens,
)
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.answer_events import Answer, End, Part
from quengine.serve.routes.answers import LiveTimings, timings_body
from quengine.serve.routes.images import counted
from quengine.serve.routes.logprob_forms import scored_tokens
from quengine.serve.routes.preparing import prepare_chat
from quengine.serve.routes.streaming import AnswerForm, data
from quengine.serve.schemas.canonical import ChatRequest
from quengine.structured.tool_calls import (
    CallDelta,
    Delta,
    ReasoningDelta,
    collect,
    reasoning_of,
)


async def chat_completions(host: ModelHost, body: ChatRequest) -> "ChatForm":
    """Answer a conversation."""
    return ChatForm(host, await prepare_chat(host, body), body)


async def chat_tokens(host: ModelHost, body: ChatRequest) -> PromptTokens:
    """Tokens of a conversation's prompt.

    Of a request that would be answered.
    """
    (answer, *_) = await prepare_chat(host, body)
    tokens = await counted(host, answer.request.prompt, answer.request.images, "messages")
    return PromptTokens(input_tokens=tokens)


def _message(part: Part, end: End, functions: bool) -> ChatAnswer:
    """The whole answer; `functions`: its call is given as OpenAI's API had it before tools."""
    deltas = part.deltas + end.deltas
    spoken, calls = collect(deltas)
    message = ChatAnswer(
        content=(spoken or None) if calls else spoken, reasoning_content=reasoning_of(deltas) or UNSET
    )
    if calls and functions:
        message.function_call = FunctionCall(name=calls[0].name, arguments=calls[0].arguments)
    elif calls:
        message.tool_calls = [
            ChatCall(
                id=each.id, type="function", function=FunctionCall(name=each.name, arguments=each.arguments)
            )
            for each in calls
        ]
    return message


def _delta(part: Delta, functions: bool) -> ChatDelta:
    if not isinstance(part, CallDelta):
        thinks = isinstance(part, ReasoningDelta)
        return ChatDelta(reasoning_content=part.text) if thinks else ChatDelta(content=part.text)
    called = FunctionCall(name=part.name or UNSET, arguments=part.arguments)
    if functions:
        return ChatDelta(function_call=called)
    call = ChatCall(index=part.index, function=called)
    if part.name is not None:
        call.id, call.type = part.id or "", "function"
    return ChatDelta(tool_calls=[call])


def _reason(end: End, functions: bool) -> ChatReason:
    return "function_call" if functions and end.reason == "tool_calls" else end.reason


def _logprobs(request: GenerationRequest, piece: Piece, model: ServedModel) -> ChatScores | None:
    params = request.params
    if params.logprobs is None:
        return None
    return ChatScores(content=scored_tokens(piece.logprobs, model, params.post_sampling_probs))


class ChatForm(AnswerForm):
    """A chat.completion object, or a stream of chat.completion.chunk objects."""

    def __init__(self, host: ModelHost, answers: Sequence[Answer], body: ChatRequest) -> None:
        super().__init__(host, answers, body.stream)
        self.functions = bool(body.functions)
        self.include_usage = body.stream_options.include_usage
        self.verbose = host.verbose(body)
        self.live = LiveTimings(body, self.requests)
        self._head = answer_head(host, "chatcmpl-", "chat.completion.chunk")
        usage = None if self.include_usage else UNSET
        self._whole = ChatChunk(**self._head, choices=[], usage=usage)
        self._with_logprobs = self.requests[0].params.logprobs is not None
        self._model = answers[0].model

    def whole(self, outputs: Sequence[tuple[Part, End]]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=_message(part, end, self.functions),
                logprobs=_logprobs(self.requests[index], part.piece, self._model),
                finish_reason=_reason(end, self.functions),
                schema_violation=end.violation,
            )
            for index, (part, end) in enumerate(outputs)
        ]
        head = answer_head(self.host, "chatcmpl-", "chat.completion")
        reasoning = sum(answer.reasoning_tokens for answer in self.answers)
        tail = answer_tail(self.requests, [end.finished for _, end in outputs], reasoning)
        more = verbose_result(self.host, self.answers, outputs) if self.verbose else {}
        return ChatCompletion(**head, choices=choices, **tail, **more)

    def begin(self) -> bytes:
        first = ChatDelta(role="assistant", content=None)
        return b"".join(self._chunk(index, first, None) for index in range(len(self.answers)))

    def part(self, part: Part) -> bytes:
        choice, piece = part.choice, part.piece
        steps, more = self.live.of(choice, piece)
        progress = b"".join(self._chunk(choice, ChatDelta(), None, more=each) for each in steps)
        deltas = [_delta(each, self.functions) for each in part.deltas]
        if self._with_logprobs and piece.tokens and not deltas:
            deltas = [ChatDelta()]
        return progress + b"".join(
            self._chunk(choice, d, None, None if i else piece, more) for i, d in enumerate(deltas)
        )

    def finished(self, end: End) -> bytes:
        choice = end.choice
        held = b"".join(self._chunk(choice, _delta(each, self.functions), None) for each in end.deltas)
        more = {} if self.include_usage else {"timings": timings_body(end.finished.timings)}
        if self.verbose:
            more |= verbose_chunk(self.host, self.answers[choice], end.finished)
        return held + self._chunk(
            choice, ChatDelta(), _reason(end, self.functions), more=more, violation=end.violation
        )

    def end(self, ends: Sequence[Finished]) -> bytes:
        reasoning = sum(answer.reasoning_tokens for answer in self.answers) if self.include_usage else 0
        return stream_end(self._head, self.requests, ends, self.include_usage, reasoning)

    def _chunk(
        self,
        choice: int,
        delta: ChatDelta,
        reason: ChatReason | None,
        piece: Piece | None = None,
        more: Mapping[str, Any] | None = None,
        violation: str | UnsetType = UNSET,
    ) -> bytes:
        entry = ChatPiece(index=choice, delta=delta, finish_reason=reason, schema_violation=violation)
        if piece is not None and self._with_logprobs:
            entry.logprobs = _logprobs(self.requests[choice], piece, self._model)
        self._whole.choices = [entry]
        return data(replace(self._whole, **more) if more else self._whole)
