"""The items of an answer as they grow, and the events that build them.

Source: OpenAI's API reference, "responses", `output` and the events of a stream.
"""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from quengine.serve.routes.answers import new_id
from quengine.serve.routes.responses.input_items import sealed
from quengine.serve.routes.responses.tools import CustomInput
from quengine.structured.answer_parser import BETWEEN
from quengine.structured.tool_calls import CallDelta, Delta, ReasoningDelta

Item = dict[str, Any]
Event = tuple[str, dict[str, Any]]
"""An event's type, without "response." before it, and its fields."""


class OutputItems:
    """An answer's items: what it thinks, says and calls, in the order they came.

    Args:
        custom: the names of the functions that are custom tools.
        seal: whether reasoning has `encrypted_content` too.
    """

    def __init__(self, custom: Collection[str] = (), seal: bool = False) -> None:
        self.items: list[Item] = []
        self._custom = custom
        self._seal = seal
        self._input = CustomInput()
        self._open = False

    def finish(self, cut: bool) -> list[Event]:
        """The events of the answer's end. `cut`: its length was the limit. There is at least one item then."""
        begun = [] if self.items else self._begin_text(_MESSAGE)
        return begun + self._close("incomplete" if cut else "completed")

    def take(self, deltas: Sequence[Delta]) -> list[Event]:
        """The events of what the answer goes on with."""
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
        if delta.name is not None and delta.name in self._custom:
            self._input = CustomInput()
            call = {"type": "custom_tool_call", "call_id": delta.id, "name": delta.name, "input": ""}
            events += self._begin({"id": new_id("ctc_"), **call})
        elif delta.name is not None:
            call = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
            events += self._begin({"id": new_id("fc_"), **call})
        if delta.arguments and self.items[-1]["type"] == "custom_tool_call":
            events += self._more("input", self._input.push(delta.arguments))
        elif delta.arguments:
            events += self._more("arguments", delta.arguments)
        return events

    def _more(self, field: str, delta: str) -> list[Event]:
        """More of what a tool is called with; `field` of its item."""
        if not delta:
            return []
        item = self.items[-1]
        item[field] += delta
        return [(f"{item['type']}_{field}.delta", {**self._at, "delta": delta})]

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
        events = self._more("input", self._input.finish()) if item["type"] == "custom_tool_call" else []
        if item["type"] == "reasoning" and self._seal:
            item["encrypted_content"] = sealed(item["content"][0]["text"])
        done: Event = ("output_item.done", self._whole())
        if item["type"] == "function_call":
            given = {**self._at, "name": item["name"], "arguments": item["arguments"]}
            return [("function_call_arguments.done", given), done]
        if item["type"] == "custom_tool_call":
            return [*events, ("custom_tool_call_input.done", {**self._at, "input": item["input"]}), done]
        kind = _REASONING if item["type"] == "reasoning" else _MESSAGE
        part = dict(item["content"][0])
        text = {**self._part_at, "text": part["text"], **kind.logprobs}
        return [(f"{kind.event}.done", text), ("content_part.done", {**self._part_at, "part": part}), done]

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
