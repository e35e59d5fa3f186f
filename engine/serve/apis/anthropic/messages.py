"""POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Sequence

from msgspec import UNSET

from quengine.serve.apis.anthropic.chat_form import chat_request
from quengine.serve.apis.anthropic.content_blocks import ContentBlocks
from quengine.serve.apis.anthropic.schemas import (
    AnthropicBlock,
    AnthropicEvent,
    AnthropicMessage,
    AnthropicMessageDelta,
    AnthropicMessageStart,
    AnthropicMessageStop,
    AnthropicPing,
    AnthropicStop,
    AnthropicThinkingTokens,
    AnthropicUsage,
    CountTokensRequest,
    MessagesRequest,
    StopReason,
    TokenCount,
)
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished
from quengine.serve.routes.answer_events import Answer, End, Part
from quengine.serve.routes.answers import new_id, token_counts
from quengine.serve.routes.constraints import answer_constraint, read_constraint, read_tools
from quengine.serve.routes.images import counted
from quengine.serve.routes.preparing import chat_prompt, prepare_chat
from quengine.serve.routes.sampling import sampling_params
from quengine.serve.routes.streaming import AnswerForm, named_event
from quengine.serve.schemas.errors import ApiError, anthropic_error


async def messages(host: ModelHost, body: MessagesRequest) -> "MessageForm":
    """Answer a conversation, with Anthropic's names."""
    answers = await prepare_chat(host, chat_request(body, host.model, host.limits))
    hidden = body.thinking is not None and (
        body.thinking.type == "disabled" or body.thinking.display == "omitted"
    )
    return MessageForm(host, answers, body.stream, ContentBlocks(not hidden))


async def count_tokens(host: ModelHost, body: CountTokensRequest) -> TokenCount:
    """Tokens of a conversation's prompt.

    Of the prompt that an answer would be computed from, which may be more than the context holds.
    """
    host.check_model_name(body.model)
    chat = chat_request(body, host.model, host.limits)
    use = await read_tools(chat, host.model)
    # What an answer would be refused for is refused here.
    await answer_constraint(use, host.model, await read_constraint(chat))
    await sampling_params(host, chat, logprobs=None, constraint=None)
    prompt = await chat_prompt(host, chat, use, limited=False)
    return TokenCount(input_tokens=await counted(host, prompt.ids, prompt.images, "messages"))


class MessageForm(AnswerForm):
    """The message object, and the events that build it."""

    def __init__(
        self, host: ModelHost, answers: Sequence[Answer], streams: bool, content: ContentBlocks
    ) -> None:
        super().__init__(host, answers, streams)
        (self._answer,) = answers
        self._content = content
        self._id, self._name = new_id("msg_"), host.name

    def whole(self, outputs: Sequence[tuple[Part, End]]) -> AnthropicMessage:
        ((part, end),) = outputs
        self._content.take(part.deltas + end.deltas)
        self._content.finish()
        content = self._content.whole() if end.reason == "length" else self._content.blocks
        return self._message(content, self._stop(end), self._usage(end.finished))

    def begin(self) -> bytes:
        message = self._message([], AnthropicStop(), self._usage(None))
        return _events([AnthropicMessageStart(message), AnthropicPing()])

    def part(self, part: Part) -> bytes:
        return _events(self._content.take(part.deltas))

    def finished(self, end: End) -> bytes:
        rest = self._content.take(end.deltas) + self._content.finish()
        delta = AnthropicMessageDelta(self._stop(end), self._usage(end.finished))
        return _events([*rest, delta, AnthropicMessageStop()])

    def failed(self, error: ApiError) -> bytes:
        return named_event("error", anthropic_error(error)[1])

    def _message(
        self, content: list[AnthropicBlock], stop: AnthropicStop, usage: AnthropicUsage
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self._id,
            model=self._name,
            content=content,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            schema_violation=stop.schema_violation,
            usage=usage,
        )

    def _stop(self, end: End) -> AnthropicStop:
        reason, stop_text = _STOP_REASONS[end.reason], end.finished.stop_text
        limit = self._answer.request.params.max_tokens or 0
        if stop_text is not None:
            reason = "stop_sequence"
        elif reason == "max_tokens" and end.finished.timings.generated_tokens < limit:
            reason = "model_context_window_exceeded"
        return AnthropicStop(reason, stop_text, end.violation)

    def _usage(self, end: Finished | None) -> AnthropicUsage:
        """The usage so far. Cached tokens, known at the end, are not counted as input tokens."""
        prompt, cached, generated = token_counts([self._answer.request], [] if end is None else [end])
        thinking = 0 if end is None else self._answer.reasoning_tokens
        details = AnthropicThinkingTokens(thinking) if thinking else UNSET
        return AnthropicUsage(prompt - cached, 0, cached, generated, details)


_STOP_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _events(events: Sequence[AnthropicEvent]) -> bytes:
    return b"".join(named_event(str(event.__struct_config__.tag), event) for event in events)
