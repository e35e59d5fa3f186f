"""The items of /v1/responses: those of an input as messages, and those of an answer as they grow.

Source: OpenAI's API reference, "responses", `input` and `output`.
"""

import copy
from collections.abc import Sequence
from typing import Any

from quengine.serve.routes.answers import new_id
from quengine.serve.routes.prompts import content_text, template_message
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.reading import read_part
from quengine.serve.schemas.requests import FunctionCallItem, InputItem, MessageItem
from quengine.structured.tool_calls import CallDelta, Delta, TextDelta
from quengine.structured.tool_calls_parser import ToolCallParser

Item = dict[str, Any]
Event = tuple[str, dict[str, Any]]
"""An event's type, without "response." before it, and its fields."""


def messages_of(values: str | Sequence[Item]) -> list[Item]:
    """The messages of an input: text, messages, calls and their outputs. Raises ApiError for any other item.

    Calls belong to the assistant's message before them, or make one. What an earlier answer gave its items beside
    their content (id, status) means nothing here.
    """
    if isinstance(values, str):
        return [{"role": "user", "content": values}]
    typed = [{"type": "message", **value} if isinstance(value, dict) else value for value in values]
    messages: list[Item] = []
    called: dict[str, str] = {}
    for i, item in enumerate(read_part(list[InputItem], typed, "input")):
        if isinstance(item, MessageItem):
            messages.append(template_message({"role": item.role}, item.content))
        elif isinstance(item, FunctionCallItem):
            called[item.call_id] = item.name
            _add_call(messages, item)
        elif item.call_id in called:
            output = {"role": "tool", "tool_call_id": item.call_id, "name": called[item.call_id]}
            messages.append({**output, "content": content_text(item.output)})
        else:
            problem = f"{item.call_id[:40]!r}: no function_call before it has this id"
            raise bad_request(f"input[{i}].call_id = {problem}", "input")
    return messages


def _add_call(messages: list[Item], item: FunctionCallItem) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": "", "tool_calls": []})
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


class OutputItems:
    """An answer's items: a message for text, a function_call for each call, in the order they came.

    `parser` finds the calls; None where none are looked for.
    """

    def __init__(self, parser: ToolCallParser | None) -> None:
        self.items: list[Item] = []
        self._parser = parser
        self._open = False

    def push(self, text: str) -> list[Event]:
        """The events of a piece of the answer's text."""
        if self._parser is not None:
            return self._take(self._parser.push(text))
        return self._take([TextDelta(text)] if text else [])

    def finish(self, cut: bool) -> list[Event]:
        """The events of the answer's end. `cut`: its length was the limit. There is at least one item then."""
        events = self._take([] if self._parser is None else self._parser.finish())
        if not self.items:
            events += self._begin_message()
        return events + self._close("incomplete" if cut else "completed")

    def _take(self, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            events += self._text(delta.text) if isinstance(delta, TextDelta) else self._call(delta)
        return events

    def _text(self, text: str) -> list[Event]:
        events = [] if self._open and self.items[-1]["type"] == "message" else self._begin_message()
        self.items[-1]["content"][0]["text"] += text
        return [*events, ("output_text.delta", {**self._part_at, "delta": text, "logprobs": []})]

    def _call(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.name is not None:
            call = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
            events += self._begin({"id": new_id("fc_"), **call})
        if delta.arguments:
            self.items[-1]["arguments"] += delta.arguments
            events.append(("function_call_arguments.delta", {**self._at, "delta": delta.arguments}))
        return events

    def _begin_message(self) -> list[Event]:
        message = {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": []}
        events = self._begin(message)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        return [*events, ("content_part.added", {**self._part_at, "part": dict(part)})]

    def _begin(self, item: Item) -> list[Event]:
        events = self._close("completed")
        self.items.append({**item, "status": "in_progress"})
        self._open = True
        return [*events, ("output_item.added", self._whole())]

    def _close(self, status: str) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        done: list[Event] = [("output_item.done", self._whole())]
        if item["type"] == "function_call":
            given = {**self._at, "name": item["name"], "arguments": item["arguments"]}
            return [("function_call_arguments.done", given), *done]
        part = dict(item["content"][0])
        text = {**self._part_at, "text": part["text"], "logprobs": []}
        return [("output_text.done", text), ("content_part.done", {**self._part_at, "part": part}), *done]

    def _whole(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item": copy.deepcopy(self.items[-1])}

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _part_at(self) -> dict[str, Any]:
        return {**self._at, "content_index": 0}
