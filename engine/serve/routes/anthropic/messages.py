"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.http import json_response, read_request, unless_gone
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece
from quengine.serve.routes.answers import new_id, token_counts
from quengine.serve.routes.anthropic.chat_form import chat_request
from quengine.serve.routes.anthropic.content_blocks import ContentBlocks, Event
from quengine.serve.routes.chat import ChatAnswer, chat_prompt, prepare_chat
from quengine.serve.routes.constraints import answer_constraint, read_constraint, read_tools
from quengine.serve.routes.images import counted
from quengine.serve.routes.sampling import sampling_params
from quengine.serve.routes.streaming import ChunkForm, named_event, stream_answer, whole_answer
from quengine.serve.schemas.anthropic import CountTokensRequest, MessagesRequest
from quengine.serve.schemas.error_forms import AnthropicError
from quengine.serve.schemas.errors import ApiError


async def messages(host: ModelHost, request: Request) -> Response:
    """Answer a conversation, with Anthropic's names."""
    body = await read_request(request, MessagesRequest, host.limits)
    chat = chat_request(body, host.model, host.limits)
    (generation,), (answer,) = await unless_gone(request.receive, prepare_chat(host, chat))
    hidden = body.thinking is not None and (
        body.thinking.type == "disabled" or body.thinking.display == "omitted"
    )
    form = _Form(host, generation, answer, ContentBlocks(not hidden))
    if body.stream:
        return await stream_answer(host, request, [generation], form)
    ((piece, end),) = await whole_answer(host, request, [generation])
    return json_response(form.whole(piece, end))


async def count_tokens(host: ModelHost, request: Request) -> Response:
    """Tokens of a conversation's prompt.

    Of the prompt that an answer would be computed from, which may be more than the context holds.
    """
    body = await read_request(request, CountTokensRequest, host.limits)
    host.check_model_name(body.model)
    chat = chat_request(body, host.model, host.limits)
    use = await read_tools(chat, host.model)
    # What an answer would be refused for is refused here.
    await answer_constraint(use, host.model, await read_constraint(chat))
    await sampling_params(host, chat, logprobs=None, constraint=None)
    prompt = await unless_gone(request.receive, chat_prompt(host, chat, use, limited=False))
    return json_response({"input_tokens": await counted(host, prompt.ids, prompt.images, "messages")})


class _Form(ChunkForm):
    """The message object, and the events that build it."""

    def __init__(
        self, host: ModelHost, request: GenerationRequest, answer: ChatAnswer, content: ContentBlocks
    ) -> None:
        self._host = host
        self._request = request
        self._answer = answer
        self._content = content
        self._head = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": host.name,
        }

    def whole(self, piece: Piece, end: Finished) -> dict[str, Any]:
        self._content.take(self._answer.read(piece) + self._answer.rest())
        self._content.finish()
        usage = self._usage(end)
        content = self._content.whole() if end.reason == "length" else self._content.blocks
        return {**self._head, "content": content, **self._stop(end), "usage": usage}

    def begin(self) -> bytes:
        no_stop = {"stop_reason": None, "stop_sequence": None}
        message: dict[str, Any] = {**self._head, "content": [], **no_stop, "usage": self._usage(None)}
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def piece(self, choice: int, piece: Piece) -> bytes:
        del choice
        return _events(self._content.take(self._answer.read(piece)))

    def finished(self, choice: int, end: Finished) -> bytes:
        del choice
        rest = self._content.take(self._answer.rest()) + self._content.finish()
        last: list[Event] = [
            {"type": "message_delta", "delta": self._stop(end), "usage": self._usage(end)},
            {"type": "message_stop"},
        ]
        return _events(rest + last)

    def failed(self, error: ApiError) -> bytes:
        return _event(AnthropicError(error).body)

    def _stop(self, end: Finished) -> dict[str, Any]:
        reason = _STOP_REASONS[self._answer.reason(end)]
        if end.stop_text is not None:
            reason = "stop_sequence"
        elif reason == "max_tokens" and end.timings.generated_tokens < (self._request.params.max_tokens or 0):
            reason = "model_context_window_exceeded"
        return {
            "stop_reason": reason,
            "stop_sequence": end.stop_text,
            **self._answer.checked(self._host, end),
        }

    def _usage(self, end: Finished | None) -> dict[str, Any]:
        """Tokens from the cache, which are known at the end, are not among those of the input."""
        prompt, cached, generated = token_counts([self._request], [] if end is None else [end])
        thinking = 0 if end is None else self._answer.reasoning_tokens
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generated,
            **({"output_tokens_details": {"thinking_tokens": thinking}} if thinking else {}),
        }


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _event(event: Event) -> bytes:
    return named_event(event["type"], event)


def _events(events: list[Event]) -> bytes:
    return b"".join(map(_event, events))
