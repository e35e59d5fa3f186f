"""The items of an answer as they grow, and the events that build them.

Source: OpenAI's API reference, "responses", `output` and the events of a stream.
"""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from quengine.serve.apis.openai.responses.input_items import sealed
from quengine.serve.apis.openai.responses.tools import CustomInput
from quengine.serve.apis.openai.schemas import ItemPart, OutputItem, ResponseEvent
from quengine.serve.routes.answers import new_id
from quengine.structured.answer_parser import BETWEEN
from quengine.structured.tool_calls import CallDelta, Delta, ReasoningDelta

Events = list[ResponseEvent]


class OutputItems:
    """An answer's items: what it thinks, says and calls, in the order they came.

    Args:
        custom: the names of the functions that are custom tools.
        seal: whether reasoning has `encrypted_content` too.
    """

    def __init__(self, custom: Collection[str] = (), seal: bool = False) -> None:
        self.items: list[OutputItem] = []
        self._custom = custom
        self._seal = seal
        self._input = CustomInput()
        self._open = False

    def finish(self, cut: bool) -> Events:
        """The events of the answer's end. `cut`: its length was the limit. There is at least one item then."""
        begun = [] if self.items else self._begin_text(_MESSAGE)
        return begun + self._close("incomplete" if cut else "completed")

    def take(self, deltas: Sequence[Delta]) -> Events:
        """The events of what the answer goes on with."""
        events = Events()
        for delta in deltas:
            if isinstance(delta, CallDelta):
                events += self._call(delta)
            else:
                events += self._text(
                    delta.text, _REASONING if isinstance(delta, ReasoningDelta) else _MESSAGE
                )
        return events

    def _text(self, text: str, kind: "_TextKind") -> Events:
        goes_on = self._open and self.items[-1].type == kind.type
        if not goes_on and any(item.type == kind.type for item in self.items):
            text = text.removeprefix(BETWEEN)  # items are apart
        events = [] if goes_on else self._begin_text(kind)
        self._part.text += text
        return [*events, self._in_part(f"{kind.part}.delta", delta=text, logprobs=kind.logprobs)]

    def _call(self, delta: CallDelta) -> Events:
        events = Events()
        if delta.name is not None and delta.name in self._custom:
            self._input = CustomInput()
            call = OutputItem(id=new_id("ctc_"), type="custom_tool_call", input="")
            events += self._begin_call(call, delta)
        elif delta.name is not None:
            call = OutputItem(id=new_id("fc_"), type="function_call", arguments="")
            events += self._begin_call(call, delta)
        if delta.arguments and self.items[-1].type == "custom_tool_call":
            events += self._more_input(self._input.push(delta.arguments))
        elif delta.arguments:
            item = self.items[-1]
            assert isinstance(item.arguments, str)
            item.arguments += delta.arguments
            events.append(self._event("function_call_arguments.delta", delta=delta.arguments))
        return events

    def _begin_call(self, call: OutputItem, delta: CallDelta) -> Events:
        assert delta.name is not None
        call.call_id, call.name = delta.id or "", delta.name
        return self._begin(call)

    def _more_input(self, delta: str) -> Events:
        """More of the text that a custom tool is called with."""
        if not delta:
            return []
        item = self.items[-1]
        assert isinstance(item.input, str)
        item.input += delta
        return [self._event("custom_tool_call_input.delta", delta=delta)]

    def _begin_text(self, kind: "_TextKind") -> Events:
        item = OutputItem(
            id=new_id(kind.prefix), type=kind.type, role=kind.role, summary=kind.summary, content=[]
        )
        events = self._begin(item)
        part = ItemPart(type=kind.part, annotations=kind.logprobs, logprobs=kind.logprobs)
        item.content = [part]
        return [*events, self._in_part("content_part.added", part=copy.copy(part))]

    def _begin(self, item: OutputItem) -> Events:
        events = self._close("completed")
        self.items.append(item)
        self._open = True
        return [*events, self._whole("output_item.added")]

    def _close(self, status: Literal["completed", "incomplete"]) -> Events:
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item.status = status
        events = self._more_input(self._input.finish()) if item.type == "custom_tool_call" else []
        if item.type == "reasoning" and self._seal:
            item.encrypted_content = sealed(self._part.text)
        done = self._whole("output_item.done")
        if item.type == "function_call":
            given = self._event("function_call_arguments.done", name=item.name, arguments=item.arguments)
            return [given, done]
        if item.type == "custom_tool_call":
            return [*events, self._event("custom_tool_call_input.done", input=item.input), done]
        kind, part = _REASONING if item.type == "reasoning" else _MESSAGE, copy.copy(self._part)
        text = self._in_part(f"{kind.part}.done", text=part.text, logprobs=kind.logprobs)
        return [text, self._in_part("content_part.done", part=part), done]

    @property
    def _part(self) -> ItemPart:
        """The text of the last item."""
        content = self.items[-1].content
        assert isinstance(content, list)
        return content[0]

    def _whole(self, name: str) -> ResponseEvent:
        item = copy.deepcopy(self.items[-1])
        return ResponseEvent(type=f"response.{name}", output_index=len(self.items) - 1, item=item)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        """An event of the last item."""
        at = len(self.items) - 1
        return ResponseEvent(type=f"response.{kind}", item_id=self.items[at].id, output_index=at, **fields)

    def _in_part(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._event(kind, content_index=0, **fields)


@dataclass(frozen=True)
class _TextKind:
    """An item whose content is one part of text."""

    prefix: str
    """Of its id."""
    type: Literal["message", "reasoning"]
    part: Literal["output_text", "reasoning_text"]
    """The type of the part, and of its events."""
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    """Always empty; of the part and its events."""


_MESSAGE = _TextKind("msg_", "message", "output_text", role="assistant", logprobs=[])
_REASONING = _TextKind("rs_", "reasoning", "reasoning_text", summary=[])
