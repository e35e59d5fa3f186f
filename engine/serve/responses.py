"""POST /v1/responses: text in, text out. Nothing is stored, so nothing can be referred to later."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.constraint_spec import ConstraintSpec
from quengine.errors import EngineError
from quengine.serve.chat import chat_prompt
from quengine.serve.engine_port import Finished, Piece
from quengine.serve.errors import bad_request
from quengine.serve.extensions import read_constraint, refuse_tools
from quengine.serve.fields import Fields
from quengine.serve.http import json_response, read_fields, to_json
from quengine.serve.request_form import asks_of, prepare, read_max_tokens
from quengine.serve.sampling_fields import read_sampling
from quengine.serve.service import Service, Text, Usage, new_id
from quengine.serve.streaming import stream_texts, whole_texts
from quengine.serve.worker import Ask


async def responses(service: Service, request: Request) -> Response:
    fields = await read_fields(request, service.limits)
    stream, instructions, ask = await _read(fields, service)
    form = _Form(service, ask, instructions, (fields.object("text") or {}).get("format") or {"type": "text"})
    if stream:
        return await stream_texts(service, request, [ask], form)
    (text,) = await whole_texts(service, request, [ask])
    return json_response(form.response(text, text.end))


async def _read(fields: Fields, service: Service) -> tuple[bool, str | None, Ask]:
    service.check_model_name(fields)
    constraint = read_constraint(fields)
    refuse_tools(fields)
    stream, instructions = fields.flag("stream") or False, fields.text("instructions")
    fields.ignore("stream_options", "include", "truncation_strategy")
    params = read_sampling(
        fields,
        service.settings.defaults,
        service.limits,
        service.model,
        max_tokens=read_max_tokens(fields, service, "max_output_tokens"),
        logprobs=None,
        constraint=_text_format(fields) or constraint,
    )
    await prepare(service, params)
    fields.neutral("truncation", "disabled")
    fields.neutral("background", False)
    fields.neutral("top_logprobs", 0)
    for key in ("previous_response_id", "conversation", "prompt", "reasoning", "max_tool_calls"):
        fields.neutral(key)
    values = fields.any("input")
    fields.object("chat_template_kwargs")
    fields.finish()
    messages = [{"role": "user", "content": values}] if isinstance(values, str) else _messages(values)
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    prompt = await chat_prompt(fields, service, system + messages, "input")
    (ask,) = asks_of([prompt], 1, params)
    return stream, instructions, ask


def _text_format(fields: Fields) -> ConstraintSpec | None:
    text = fields.object("text")
    if text is None:
        return None
    inner = Fields(text, "text")
    wanted = inner.any("format")
    inner.neutral("verbosity", "medium")
    inner.finish()
    try:
        return ConstraintSpec.from_response_format(wanted)
    except EngineError as error:
        raise bad_request(str(error), "text.format") from None


def _messages(values: Any) -> list[Any]:
    """Items of an input that are messages; the id and status that an earlier answer gave them mean nothing here."""
    if not isinstance(values, list) or not values:
        raise bad_request("input must be a string or an array of messages", "input")
    messages = []
    for i, value in enumerate(values):
        if not isinstance(value, dict) or value.get("type", "message") != "message":
            raise bad_request(
                f"input[{i}] must be a message: nothing else is supported", "input", "unsupported"
            )
        messages.append({key: value[key] for key in ("role", "content") if key in value})
    return messages


@dataclass
class _Form:
    """The response object, and the events that build it."""

    service: Service
    ask: Ask
    instructions: str | None
    text_format: dict[str, Any]
    _text: Text = field(default_factory=Text)
    _number: int = 0

    def __post_init__(self) -> None:
        self._id, self._item_id = new_id("resp_"), new_id("msg_")
        self._created = time.time()

    def response(self, text: Text | None, end: Finished | None) -> dict[str, Any]:
        """The object as far as it has come; whole with `end`."""
        params = self.ask.params
        cut = end is not None and end.reason == "length"
        status = "in_progress" if end is None else "incomplete" if cut else "completed"
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(self._created),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": self.instructions,
            "max_output_tokens": params.max_tokens,
            "model": self.service.model_name,
            "output": [] if text is None or end is None else [self._item(text.text, status)],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": self.text_format},
            "tool_choice": "none",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if end is None else self._usage(end),
            "metadata": {},
        }

    def _usage(self, end: Finished) -> dict[str, Any]:
        usage = Usage.of([self.ask.prompt], [end])
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.generated,
        }

    def _item(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        item = {"id": self._item_id, "type": "message", "role": "assistant"}
        return item | {"status": status, "content": content}

    def begin(self) -> bytes:
        response = self.response(None, None)
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=self._item(None, "in_progress"))
            + self._event("response.content_part.added", **self._where, part=_part(""))
        )

    def piece(self, choice: int, piece: Piece) -> bytes:
        del choice
        if not piece.text:
            return b""
        self._text.text += piece.text
        return self._event("response.output_text.delta", **self._where, delta=piece.text, logprobs=[])

    def finished(self, choice: int, end: Finished) -> bytes:
        del choice
        text, response = self._text.text, self.response(self._text, end)
        return (
            self._event("response.output_text.done", **self._where, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._where, part=_part(text))
            + self._event("response.output_item.done", output_index=0, item=response["output"][0])
            + self._event(f"response.{response['status']}", response=response)
        )

    def end(self, ends: Sequence[Finished]) -> bytes:
        del ends
        return b""

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **values: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + to_json(event) + b"\n\n"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
