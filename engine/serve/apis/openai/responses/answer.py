"""The response object, and the events that build it."""

import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from quengine.serve.apis.openai.responses.output_items import OutputItems
from quengine.serve.apis.openai.responses.tools import OfferedTools
from quengine.serve.apis.openai.schemas import (
    CachedTokens,
    IncompleteDetails,
    ReasoningTokens,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseReasoning,
    ResponseRequest,
    ResponseStatus,
    ResponseText,
    ResponseUsage,
)
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished
from quengine.serve.routes.answer_events import Answer, End, Part
from quengine.serve.routes.answers import LiveTimings, new_id, timings_body, token_counts
from quengine.serve.routes.streaming import AnswerForm, named_event
from quengine.serve.schemas.errors import ApiError


class ResponseForm(AnswerForm):
    """One response.

    Args:
        body: the request. answer: its completion.
        tools: the request's tools; the functions among them are the tools of `answer`.
        conversation: the items of the input and all before it; stored with the items of the output.
    """

    def __init__(
        self,
        host: ModelHost,
        body: ResponseRequest,
        answer: Answer,
        tools: OfferedTools,
        conversation: Sequence[Any],
        notes: Sequence[str],
    ) -> None:
        super().__init__(host, [answer], body.stream, notes)
        self.answer = answer
        self._body = body
        self._conversation = conversation
        self._output = OutputItems(tools.custom, "reasoning.encrypted_content" in (body.include or ()))
        self._id, self._created = new_id("resp_"), int(time.time())
        self._stored = host.responses.keeps(body.store)
        self._tools = [tools.entry(tool) for tool in answer.use.tools]
        self._live = LiveTimings(body, [answer.request])
        self._number = 0

    def whole(self, outputs: Sequence[tuple[Part, End]]) -> ResponseObject:
        """The whole object, which is stored where the request wants it."""
        ((part, end),) = outputs
        self._output.take(part.deltas + end.deltas)
        self._output.finish(end.reason == "length")
        return self._whole(end)

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._events([_of_response("created", response), _of_response("in_progress", response)])

    def part(self, part: Part) -> bytes:
        steps, more = self._live.of(part.choice, part.piece)
        progress = [_of_response("in_progress", self._response("in_progress"), **step) for step in steps]
        events = self._output.take(part.deltas)
        return self._events([*progress, *(replace(event, **more) if more else event for event in events)])

    def finished(self, end: End) -> bytes:
        events = self._output.take(end.deltas) + self._output.finish(end.reason == "length")
        response = self._whole(end)
        last = _of_response(response.status, response, timings=timings_body(end.finished.timings))
        return self._events([*events, last])

    def failed(self, error: ApiError) -> bytes:
        response = self._response("failed")
        response.output = self._output.items
        response.error = ResponseFailure(error.code or "server_error", error.message)
        return self._events([_of_response("failed", response)])

    def _whole(self, end: End) -> ResponseObject:
        cut = end.reason == "length"
        response = self._response("incomplete" if cut else "completed")
        response.incomplete_details = IncompleteDetails() if cut else None
        response.completed_at = None if cut else int(time.time())
        response.output, response.usage = self._output.items, self._usage(end.finished)
        response.schema_violation = end.violation
        if self._stored:
            items = self._output.items
            ids = [item.id for item in items]
            self.host.responses.put(self._id, ids, response, [*self._conversation, *items])
        return response

    def _response(self, status: ResponseStatus) -> ResponseObject:
        """The object, as it is before the first item."""
        body, params, use = self._body, self.answer.request.params, self.answer.use
        return ResponseObject(
            id=self._id,
            created_at=self._created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=params.max_tokens,
            max_tool_calls=body.max_tool_calls,
            model=self.host.name,
            output=[],
            parallel_tool_calls=use.parallel,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=ResponseReasoning(body.reasoning.effort),
            safety_identifier=body.safety_identifier,
            store=self._stored,
            temperature=params.temperature,
            text=ResponseText(body.text.format or {"type": "text"}),
            tool_choice=use.choice if body.tool_choice is None else body.tool_choice,
            tools=self._tools,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
            metadata=body.metadata or {},
        )

    def _usage(self, end: Finished) -> ResponseUsage:
        prompt, cached, generated = token_counts([self.answer.request], [end])
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=CachedTokens(cached),
            output_tokens=generated,
            output_tokens_details=ReasoningTokens(self.answer.reasoning_tokens),
            total_tokens=prompt + generated,
        )

    def _events(self, events: Sequence[ResponseEvent]) -> bytes:
        written = b""
        for event in events:
            event.sequence_number = self._number
            self._number += 1
            written += named_event(event.type, event)
        return written


def _of_response(name: str, response: ResponseObject, **more: Any) -> ResponseEvent:
    return ResponseEvent(type=f"response.{name}", response=response, **more)
