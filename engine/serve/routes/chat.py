"""POST /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.http import json_response, read_fields, unless_gone
from quengine.serve.processes.server_thread import Ask
from quengine.serve.processes.shared_engine import Finished, Piece
from quengine.serve.routes.chat_messages import read_messages
from quengine.serve.routes.extensions import callable_format, read_constraint, read_tools, tool_constraint
from quengine.serve.routes.logprob_forms import chat_logprobs
from quengine.serve.routes.prompts import chat_ids
from quengine.serve.routes.streaming import data, stream_texts, whole_texts
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.fields import Fields
from quengine.serve.schemas.request_form import (
    LOGPROBS,
    Delivery,
    answer_head,
    answer_tail,
    asks_of,
    prepare,
    read_delivery,
    read_max_tokens,
    read_n,
    stream_end,
)
from quengine.serve.schemas.sampling_fields import read_sampling
from quengine.serve.service import Service, Text
from quengine.structured.tool_calls import Delta, TextDelta, ToolUse, collect
from quengine.structured.tool_calls_parser import ToolCallParser


async def chat_completions(service: Service, request: Request) -> Response:
    fields = await read_fields(request, service.limits)
    delivery, asks, answers = await unless_gone(request.receive, _read(fields, service))
    if delivery.stream:
        chunks = _Chunks(service, asks, answers, delivery.include_usage)
        return await stream_texts(service, request, asks, chunks)
    return json_response(_body(service, asks, answers, await whole_texts(service, request, asks)))


async def chat_prompt(
    fields: Fields, service: Service, values: Any, param: str = "messages", use: ToolUse | None = None
) -> list[int]:
    """The prompt's ids of messages and tools in a request, checked against the limits."""
    messages = read_messages(values, param)
    variables = fields.object("chat_template_kwargs") or {}
    return await chat_ids(service, messages, None if use is None else use.described, variables, param)


async def _read(fields: Fields, service: Service) -> tuple[Delivery, list[Ask], "list[ChatAnswer]"]:
    service.check_model_name(fields)
    use, constraint = read_tools(fields, service.model), read_constraint(fields)
    delivery, n = read_delivery(fields), read_n(fields, service)
    params = read_sampling(
        fields,
        service.settings.defaults,
        service.limits,
        service.model,
        max_tokens=read_max_tokens(fields, service, "max_completion_tokens", "max_tokens", "n_predict"),
        logprobs=_read_logprobs(fields),
        constraint=tool_constraint(use, service.model, constraint),
    )
    await prepare(service, params)
    skip_special = fields.flag("skip_special_tokens")
    fields.neutral("modalities", ["text"])
    fields.neutral("verbosity", "medium")
    fields.neutral("reasoning_effort", "none")
    fields.neutral("add_generation_prompt", True)
    fields.neutral("continue_final_message", False)
    fields.neutral("return_progress", False)
    for key in ("audio", "web_search_options", "chat_template"):
        fields.neutral(key)
    fields.ignore("reasoning_format")
    values = fields.any("messages")
    fields.object("chat_template_kwargs")
    fields.finish()
    prompt = await chat_prompt(fields, service, values, use=use)
    tool_format = callable_format(use, service.model)
    shown = skip_special is False or (tool_format is not None and tool_format.marker_ids)
    answers = [ChatAnswer(None if tool_format is None else tool_format.parser(use)) for _ in range(n)]
    return delivery, asks_of([prompt], n, params, shown), answers


def _read_logprobs(fields: Fields) -> int | None:
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", LOGPROBS)
    if top and not wanted:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None


class ChatAnswer:
    """One answer: its text as deltas, in which tool calls are found if they are looked for."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        self._parser = parser

    def push(self, text: str) -> list[dict[str, Any]]:
        """What `delta` of a chunk says of this piece, a chunk each."""
        if self._parser is None:
            return [{"content": text}] if text else []
        return [_delta(part) for part in self._parser.push(text)]

    def finish(self) -> list[dict[str, Any]]:
        """What was held back."""
        return [] if self._parser is None else [_delta(part) for part in self._parser.finish()]

    def reason(self, end: Finished) -> str:
        called = self._parser is not None and self._parser.calls > 0
        return "tool_calls" if called and end.reason == "stop" else end.reason

    def message(self, text: str) -> dict[str, Any]:
        """The whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._parser is not None:
            spoken, calls = collect(self._parser.push(text) + self._parser.finish())
            message["content"] = spoken
            if calls:
                message |= {"content": spoken or None, "tool_calls": [call.as_openai() for call in calls]}
        return message


def _delta(part: Delta) -> dict[str, Any]:
    return {"content": part.text} if isinstance(part, TextDelta) else {"tool_calls": [part.as_openai()]}


def _body(
    service: Service, asks: Sequence[Ask], answers: Sequence[ChatAnswer], texts: Sequence[Text]
) -> dict[str, Any]:
    return {
        **answer_head(service, "chatcmpl-", "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": answers[index].message(text.text),
                "logprobs": chat_logprobs(text.logprobs, service.model)
                if asks[index].params.logprobs is not None
                else None,
                "finish_reason": answers[index].reason(text.end),
            }
            for index, text in enumerate(texts)
        ],
        **answer_tail([asks[0].prompt], [text.end for text in texts]),
    }


@dataclass
class _Chunks:
    """A stream of chat.completion.chunk objects."""

    service: Service
    asks: Sequence[Ask]
    answers: Sequence[ChatAnswer]
    include_usage: bool

    def __post_init__(self) -> None:
        self._head = answer_head(self.service, "chatcmpl-", "chat.completion.chunk")
        self._with_logprobs = self.asks[0].params.logprobs is not None
        self._model = self.service.model

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, first, None) for index in range(len(self.asks)))

    def piece(self, choice: int, piece: Piece) -> bytes:
        deltas = self.answers[choice].push(piece.text)
        if self._with_logprobs and not deltas:
            deltas = [{}]
        return b"".join(self._chunk(choice, d, None, None if i else piece) for i, d in enumerate(deltas))

    def finished(self, choice: int, end: Finished) -> bytes:
        answer = self.answers[choice]
        held = b"".join(self._chunk(choice, delta, None) for delta in answer.finish())
        return held + self._chunk(choice, {}, answer.reason(end))

    def end(self, ends: Sequence[Finished]) -> bytes:
        return stream_end(self._head, [self.asks[0].prompt], ends, self.include_usage)

    def _chunk(
        self, choice: int, delta: dict[str, Any], reason: str | None, piece: Piece | None = None
    ) -> bytes:
        entry: dict[str, Any] = {"index": choice, "delta": delta, "finish_reason": reason, "logprobs": None}
        if piece is not None and self._with_logprobs:
            entry["logprobs"] = chat_logprobs(piece.logprobs, self._model)
        return data({**self._head, "choices": [entry], **({"usage": None} if self.include_usage else {})})
