"""POST /v1/responses: items in, items out. Nothing is stored, so nothing can be referred to later."""

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.errors import EngineError
from quengine.serve.http import json_response, read_request, to_json, unless_gone
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece
from quengine.serve.routes.answers import new_id, token_counts
from quengine.serve.routes.constraints import answer_constraint, read_constraint, read_tools
from quengine.serve.routes.prompts import chat_ids, reasoning_wanted
from quengine.serve.routes.response_items import Event, OutputItems, messages_of
from quengine.serve.routes.sampling import requests_of, sampling_params
from quengine.serve.routes.streaming import ChunkForm, stream_answer, whole_answer
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.requests import ResponseRequest
from quengine.serve.service import Service
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.tool_calls import Tool, ToolUse


async def responses(service: Service, request: Request) -> Response:
    body = await read_request(request, ResponseRequest, service.limits)
    form = await unless_gone(request.receive, _prepared(service, body))
    if body.stream:
        return await stream_answer(service, request, [form.request], form)
    ((piece, end),) = await whole_answer(service, request, [form.request])
    form.take(piece)
    return json_response(form.ended(end))


async def _prepared(service: Service, body: ResponseRequest) -> "_Form":
    service.check_model_name(body.model)
    model = service.model
    form, use = model.answer_format, read_tools(body, model)
    text = _text_constraint(body)
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    messages = system + messages_of(body.input)
    effort = body.reasoning.effort
    variables, budget = reasoning_wanted(service, body, effort, "reasoning.effort")
    prompt = await chat_ids(service, messages, form.tools(use), variables, "input")
    end = model.end_of(prompt)
    constraint = answer_constraint(use, model, text, end, budget)
    params = await sampling_params(service, body, logprobs=None, constraint=constraint)
    (request,) = requests_of([prompt], 1, params, form.shown(use))
    return _Form(service, body, use, request, OutputItems(form.parser(use, end)))


def _text_constraint(body: ResponseRequest) -> ConstraintSpec | None:
    """The constraint of `text.format`, or another that the request has. Raises ApiError for both."""
    other = read_constraint(body)
    try:
        spec = ConstraintSpec.from_response_format(body.text.format)
    except EngineError as error:
        raise bad_request(str(error), "text.format") from None
    if spec is not None and other is not None:
        raise bad_request("text.format and another constraint: only one of them can hold", "text.format")
    return spec or other


class _Form(ChunkForm):
    """The response object, and the events that build it."""

    def __init__(
        self,
        service: Service,
        body: ResponseRequest,
        use: ToolUse,
        request: GenerationRequest,
        items: OutputItems,
    ) -> None:
        self.request = request
        self._service = service
        self._body = body
        self._use = use
        self._output = items
        self._id, self._created = new_id("resp_"), int(time.time())
        self._number = 0
        self._tokens: list[int] = []

    def take(self, piece: Piece) -> list[Event]:
        self._tokens += piece.tokens
        return self._output.push(piece.text)

    def ended(self, end: Finished) -> dict[str, Any]:
        """The whole object."""
        self._output.finish(end.reason == "length")
        return self._response(end)

    def begin(self) -> bytes:
        response = self._response(None)
        return self._events([("created", {"response": response}), ("in_progress", {"response": response})])

    def piece(self, choice: int, piece: Piece) -> bytes:
        del choice
        return self._events(self.take(piece))

    def finished(self, choice: int, end: Finished) -> bytes:
        del choice
        events = self._output.finish(end.reason == "length")
        response = self._response(end)
        return self._events([*events, (response["status"], {"response": response})])

    def _response(self, end: Finished | None) -> dict[str, Any]:
        """The object, whole with `end`."""
        body, params = self._body, self.request.params
        cut = end is not None and end.reason == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if end is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": params.max_tokens,
            "model": self._service.model_name,
            "output": [] if end is None else self._output.items,
            "parallel_tool_calls": self._use.parallel,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": body.text.format or {"type": "text"}},
            "tool_choice": self._use.choice if body.tool_choice is None else body.tool_choice,
            "tools": [_tool(tool) for tool in self._use.tools],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if end is None else self._usage(end),
            "metadata": {},
        }

    def _usage(self, end: Finished) -> dict[str, Any]:
        prompt, cached, generated = token_counts([self.request], [end])
        model = self._service.model
        end_of_prompt = model.end_of(self.request.prompt)
        reasoning = model.answer_format.reasoning_tokens(self._use, self._tokens, model.decode, end_of_prompt)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + generated,
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
