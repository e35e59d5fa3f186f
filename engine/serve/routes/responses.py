"""POST /v1/responses: items in, items out. Nothing is stored, so nothing can be referred to later."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.errors import EngineError
from quengine.serve.http import json_response, read_fields, to_json, unless_gone
from quengine.serve.processes.server_thread import Ask
from quengine.serve.processes.shared_engine import Finished, Piece
from quengine.serve.routes.chat import chat_prompt
from quengine.serve.routes.extensions import callable_format, read_constraint, read_tools, tool_constraint
from quengine.serve.routes.response_items import Event, OutputItems, messages_of
from quengine.serve.routes.streaming import stream_texts, whole_texts
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.fields import Fields
from quengine.serve.schemas.request_form import asks_of, prepare, read_max_tokens
from quengine.serve.schemas.sampling_fields import read_sampling
from quengine.serve.service import Service, Usage, new_id
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.tool_calls import Tool, ToolUse
from quengine.structured.tool_calls_parser import ToolCallParser


@dataclass(frozen=True)
class _Wanted:
    stream: bool
    instructions: str | None
    text_format: dict[str, Any]
    use: ToolUse
    tool_choice: Any
    ask: Ask
    parser: ToolCallParser | None


async def responses(service: Service, request: Request) -> Response:
    wanted = await unless_gone(request.receive, _read(await read_fields(request, service.limits), service))
    form = _Form(service, wanted)
    if wanted.stream:
        return await stream_texts(service, request, [wanted.ask], form)
    (text,) = await whole_texts(service, request, [wanted.ask])
    form.take(text.text)
    return json_response(form.ended(text.end))


async def _read(fields: Fields, service: Service) -> _Wanted:
    service.check_model_name(fields)
    use, constraint = read_tools(fields, service.model), read_constraint(fields)
    stream, instructions = fields.flag("stream") or False, fields.text("instructions")
    text_format, spec = _text_format(fields)
    if spec is not None and constraint is not None:
        raise bad_request("text.format and another constraint: only one of them can hold", "text.format")
    params = read_sampling(
        fields,
        service.settings.defaults,
        service.limits,
        service.model,
        max_tokens=read_max_tokens(fields, service, "max_output_tokens"),
        logprobs=None,
        constraint=tool_constraint(use, service.model, spec or constraint),
    )
    await prepare(service, params)
    _refuse_others(fields)
    values, tool_choice = fields.any("input"), fields.any("tool_choice")
    fields.object("chat_template_kwargs")
    fields.finish()
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    prompt = await chat_prompt(fields, service, system + messages_of(values), "input", use)
    tool_format = callable_format(use, service.model)
    shown = tool_format.marker_ids if tool_format is not None else False
    (ask,) = asks_of([prompt], 1, params, shown)
    parser = None if tool_format is None else tool_format.parser(use)
    return _Wanted(stream, instructions, text_format, use, tool_choice, ask, parser)


def _refuse_others(fields: Fields) -> None:
    """What this route takes elsewhere and would change the answer."""
    fields.ignore("stream_options", "include", "truncation_strategy")
    fields.neutral("truncation", "disabled")
    fields.neutral("background", False)
    fields.neutral("top_logprobs", 0)
    for key in ("previous_response_id", "conversation", "prompt", "reasoning", "max_tool_calls"):
        fields.neutral(key)


def _text_format(fields: Fields) -> tuple[dict[str, Any], ConstraintSpec | None]:
    """`text.format` as it was given, and what it holds the text to."""
    inner = Fields(fields.object("text") or {}, "text")
    given = inner.object("format")
    wanted = {"type": "text"} if given is None else given
    inner.neutral("verbosity", "medium")
    inner.finish()
    try:
        return wanted, ConstraintSpec.from_response_format(wanted)
    except EngineError as error:
        raise bad_request(str(error), "text.format") from None


class _Form:
    """The response object, and the events that build it."""

    def __init__(self, service: Service, wanted: _Wanted) -> None:
        self._service = service
        self._wanted = wanted
        self._output = OutputItems(wanted.parser)
        self._id, self._created = new_id("resp_"), int(time.time())
        self._number = 0

    def take(self, text: str) -> list[Event]:
        return self._output.push(text)

    def ended(self, end: Finished) -> dict[str, Any]:
        """The whole object."""
        self._output.finish(end.reason == "length")
        return self._response(end)

    def begin(self) -> bytes:
        response = self._response(None)
        return self._events([("created", {"response": response}), ("in_progress", {"response": response})])

    def piece(self, choice: int, piece: Piece) -> bytes:
        del choice
        return self._events(self.take(piece.text))

    def finished(self, choice: int, end: Finished) -> bytes:
        del choice
        events = self._output.finish(end.reason == "length")
        response = self._response(end)
        return self._events([*events, (response["status"], {"response": response})])

    def end(self, ends: Sequence[Finished]) -> bytes:
        del ends
        return b""

    def _response(self, end: Finished | None) -> dict[str, Any]:
        """The object, whole with `end`."""
        wanted, params = self._wanted, self._wanted.ask.params
        cut = end is not None and end.reason == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if end is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": wanted.instructions,
            "max_output_tokens": params.max_tokens,
            "model": self._service.model_name,
            "output": [] if end is None else self._output.items,
            "parallel_tool_calls": wanted.use.parallel,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": wanted.text_format},
            "tool_choice": wanted.use.choice if wanted.tool_choice is None else wanted.tool_choice,
            "tools": [_tool(tool) for tool in wanted.use.tools],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if end is None else self._usage(end),
            "metadata": {},
        }

    def _usage(self, end: Finished) -> dict[str, Any]:
        usage = Usage.of([self._wanted.ask.prompt], [end])
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.generated,
        }

    def _events(self, events: Sequence[Event]) -> bytes:
        written = b""
        for name, values in events:
            kind = f"response.{name}"
            event = {"type": kind, "sequence_number": self._number, **values}
            self._number += 1
            written += b"event: " + kind.encode() + b"\ndata: " + to_json(event) + b"\n\n"
        return written


def _tool(tool: Tool) -> dict[str, Any]:
    """As this route's requests have it: the function's fields beside the type."""
    function = tool.described["function"]
    return {"strict": False, "description": None, "parameters": None, **function, "type": "function"}
