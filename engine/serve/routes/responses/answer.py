"""The response object, and the events that build it."""

import time
from collections.abc import Sequence
from typing import Any

from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished
from quengine.serve.routes.answer_events import Answer, End, Part
from quengine.serve.routes.answers import LiveTimings, new_id, timings_body, token_counts
from quengine.serve.routes.responses.output_items import Event, OutputItems
from quengine.serve.routes.responses.tools import OfferedTools
from quengine.serve.routes.streaming import ChunkForm, named_event
from quengine.serve.schemas.errors import ApiError
from quengine.serve.schemas.openai import ResponseRequest

Item = dict[str, Any]


class ResponseForm(ChunkForm):
    """One response.

    Args:
        body: the request, `answer` its completion.
        tools: those of the request; the functions among them are those of `answer`.
        conversation: the items of the input and all before it; stored with those of the output.
    """

    def __init__(
        self,
        host: ModelHost,
        body: ResponseRequest,
        answer: Answer,
        tools: OfferedTools,
        conversation: Sequence[Item],
    ) -> None:
        self.answer = answer
        self._host = host
        self._body = body
        self._conversation = conversation
        self._output = OutputItems(tools.custom, "reasoning.encrypted_content" in (body.include or ()))
        self._id, self._created = new_id("resp_"), int(time.time())
        self._stored = host.responses.keeps(body.store)
        self._tools = [tools.entry(tool) for tool in answer.use.tools]
        self._live = LiveTimings(body, [answer.request])
        self._number = 0

    def whole(self, part: Part, end: End) -> Item:
        """The whole object, which is stored where the request wants it."""
        self._output.take(part.deltas + end.deltas)
        self._output.finish(end.reason == "length")
        return self._whole(end)

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._events([("created", {"response": response}), ("in_progress", {"response": response})])

    def part(self, part: Part) -> bytes:
        steps = self._live.progress(part.choice, part.piece)
        response = self._response("in_progress") if steps else {}
        progress = self._events([("in_progress", {"response": response, **step}) for step in steps])
        more, events = self._live.after(part.choice, part.piece), self._output.take(part.deltas)
        return progress + self._events([(name, {**values, **more}) for name, values in events])

    def finished(self, end: End) -> bytes:
        events = self._output.take(end.deltas) + self._output.finish(end.reason == "length")
        response = self._whole(end)
        last = {"response": response, "timings": timings_body(end.finished.timings)}
        return self._events([*events, (response["status"], last)])

    def failed(self, error: ApiError) -> bytes:
        failure = {"code": error.code or "server_error", "message": error.message}
        response = {**self._response("failed"), "output": self._output.items, "error": failure}
        return self._events([("failed", {"response": response})])

    def _whole(self, end: End) -> Item:
        cut = end.reason == "length"
        response = {
            **self._response("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": self._output.items,
            "usage": self._usage(end.finished),
            **end.checked,
        }
        if self._stored:
            self._host.responses.put(response, [*self._conversation, *self._output.items])
        return response

    def _response(self, status: str) -> Item:
        """The object, as it is before the first item."""
        body, params, use = self._body, self.answer.request.params, self.answer.use
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": params.max_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self._host.name,
            "output": [],
            "parallel_tool_calls": use.parallel,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self._stored,
            "temperature": params.temperature,
            "text": {"format": body.text.format or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": use.choice if body.tool_choice is None else body.tool_choice,
            "tools": self._tools,
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self, end: Finished) -> Item:
        prompt, cached, generated = token_counts([self.answer.request], [end])
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": self.answer.reasoning_tokens},
            "total_tokens": prompt + generated,
        }

    def _events(self, events: Sequence[Event]) -> bytes:
        written = b""
        for name, values in events:
            kind = f"response.{name}"
            event = {"type": kind, "sequence_number": self._number, **values}
            self._number += 1
            written += named_event(kind, event)
        return written
