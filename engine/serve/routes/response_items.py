"""The items of /v1/responses: those of an input as messages, and those of an answer as they grow.

Source: OpenAI's API reference, "responses", `input` and `output`.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quengine.serve.routes.answers import new_id
from quengine.serve.routes.prompts import content_text, template_message
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.messages import FunctionCallItem, InputItem, MessageItem, ReasoningItem
from quengine.serve.schemas.reading import read_part
from quengine.structured.answer_parser import BETWEEN, AnswerParser
from quengine.structured.tool_calls import CallDelta, Delta, ReasoningDelta

Item = dict[str, Any]
Event = tuple[str, dict[str, Any]]
"""An event's type, without "response." before it, and its fields."""


def messages_of(values: str | Sequence[Item]) -> list[Item]:
    """The messages of an input: text, messages, reasoning, calls and their outputs. Raises ApiError for any other item.

    Calls belong to the assistant's message before them, or make one; reasoning to the one behind it. What an earlier
    answer gave its items beside their content (id, status) means nothing here.
    """
    if isinstance(values, str):
        return [{"role": "user", "content": values}]
    typed = [{"type": "message", **value} if isinstance(value, dict) else value for value in values]
    messages: list[Item] = []
    called: dict[str, str] = {}
    thought: Item = {}
    for i, item in enumerate(read_part(list[InputItem], typed, "input")):
        if isinstance(item, MessageItem):
            more = thought if item.role == "assistant" else {}
            messages.append(template_message({"role": item.role, **more}, item.content))
        elif isinstance(item, FunctionCallItem):
            called[item.call_id] = item.name
            _add_call(messages, item, thought)
        elif isinstance(item, ReasoningItem):
            thought = {"reasoning_content": "\n\n".join(part.text for part in item.content)}
            continue
        elif item.call_id in called:
            output = {"role": "tool", "tool_call_id": item.call_id, "name": called[item.call_id]}
            messages.append({**output, "content": content_text(item.output)})
        else:
            problem = f"{item.call_id[:40]!r}: no function_call before it has this id"
            raise bad_request(f"input[{i}].call_id = {problem}", "input")
        thought = {}
    return messages


def _add_call(messages: list[Item], item: FunctionCallItem, thought: Item) -> None:
    if thought or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": "", **thought, "tool_calls": []})
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


class OutputItems:
    """An answer's items: what it thinks, says and calls, in the order they came. `parser` takes its text apart."""

    def __init__(self, parser: AnswerParser) -> None:
        self.items: list[Item] = []
        self._parser = parser
        self._open = False

    def push(self, text: str) -> list[Event]:
        """The events of a piece of the answer's text."""
        return self._take(self._parser.push(text))

    def finish(self, cut: bool) -> list[Event]:
        """The events of the answer's end. `cut`: its length was the limit. There is at least one item then."""
        events = self._take(self._parser.finish())
        if not self.items:
            events += self._begin_text(_MESSAGE)
        return events + self._close("incomplete" if cut else "completed")

    def _take(self, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, CallDelta):
                events += self._call(delta)
            else:
                events += self._text(
                    delta.text, _REASONING if isinstance(delta, ReasoningDelta) else _MESSAGE
                )
        return events

    def _text(self, text: str, kind: "_TextKind") -> list[Event]:
        goes_on = self._open and self.items[-1]["type"] == kind.item["type"]
        if not goes_on and any(item["type"] == kind.item["type"] for item in self.items):
            text = text.removeprefix(BETWEEN)  # items are apart
        events = [] if goes_on else self._begin_text(kind)
        self.items[-1]["content"][0]["text"] += text
        return [*events, (f"{kind.event}.delta", {**self._part_at, "delta": text, **kind.logprobs})]

    def _call(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.name is not None:
            call = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
            events += self._begin({"id": new_id("fc_"), **call})
        if delta.arguments:
            self.items[-1]["arguments"] += delta.arguments
            events.append(("function_call_arguments.delta", {**self._at, "delta": delta.arguments}))
        return events

    def _begin_text(self, kind: "_TextKind") -> list[Event]:
        events = self._begin({"id": new_id(kind.prefix), **kind.item, "content": []})
        part = {**kind.part, "text": ""}
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
        kind = _REASONING if item["type"] == "reasoning" else _MESSAGE
        part = dict(item["content"][0])
        text = {**self._part_at, "text": part["text"], **kind.logprobs}
        return [(f"{kind.event}.done", text), ("content_part.done", {**self._part_at, "part": part}), *done]

    def _whole(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item": copy.deepcopy(self.items[-1])}

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _part_at(self) -> dict[str, Any]:
        return {**self._at, "content_index": 0}


@dataclass(frozen=True)
class _TextKind:
    """An item whose content is one part of text."""

    prefix: str
    """Of its id."""
    item: Item
    part: dict[str, Any]
    event: str
    logprobs: dict[str, Any]
    """What its events have beside the text."""


_MESSAGE = _TextKind(
    prefix="msg_",
    item={"type": "message", "role": "assistant"},
    part={"type": "output_text", "annotations": [], "logprobs": []},
    event="output_text",
    logprobs={"logprobs": []},
)
_REASONING = _TextKind(
    prefix="rs_",
    item={"type": "reasoning", "summary": []},
    part={"type": "reasoning_text"},
    event="reasoning_text",
    logprobs={},
)
