"""An answer's blocks of content as they grow, and the events of a stream that build them.

Source: Anthropic's API reference, "Streaming Messages".
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from quengine.structured.answer_parser import BETWEEN
from quengine.structured.tool_calls import CallDelta, Delta, ReasoningDelta

Block = dict[str, Any]
Event = dict[str, Any]

_SIGNATURE = "unsigned"
"""Of thinking blocks, which clients send back with it; nothing is checked by it."""


class ContentBlocks:
    """What an answer thinks, says and calls, in that order; `thinking`: whether it has blocks of the first."""

    def __init__(self, thinking: bool) -> None:
        self.blocks: list[Block] = []
        self._thinking = thinking
        self._open = False
        self._input = ""
        """The JSON text of the last call."""

    def take(self, deltas: Sequence[Delta]) -> list[Event]:
        """The events of what the answer goes on with."""
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, CallDelta):
                events += self._call(delta)
            elif not isinstance(delta, ReasoningDelta):
                events += self._text("text", delta.text)
            elif self._thinking:
                events += self._text("thinking", delta.text)
        return events

    def finish(self) -> list[Event]:
        """The events of the answer's end. There is at least one block then."""
        return ([] if self.blocks else self._begin({"type": "text", "text": ""})) + self._close()

    def whole(self) -> list[Block]:
        """The blocks of a finished answer, without a call that was cut: it would look like one without arguments."""
        called = bool(self.blocks) and self.blocks[-1]["type"] == "tool_use"
        cut = called and _object(self._input) is None
        return (self.blocks[:-1] or [{"type": "text", "text": ""}]) if cut else self.blocks

    def _text(self, kind: Literal["text", "thinking"], text: str) -> list[Event]:
        goes_on = self._open and self.blocks[-1]["type"] == kind
        if not goes_on and any(block["type"] == kind for block in self.blocks):
            text = text.removeprefix(BETWEEN)  # blocks are apart
        if not text:
            return []
        signature = {"signature": ""} if kind == "thinking" else {}
        events = [] if goes_on else self._begin({"type": kind, kind: "", **signature})
        self.blocks[-1][kind] += text
        return [*events, self._delta(f"{kind}_delta", kind, text)]

    def _call(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.name is not None:
            events = self._begin({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
            self._input = ""
        if delta.arguments:
            self._input += delta.arguments
            events.append(self._delta("input_json_delta", "partial_json", delta.arguments))
        return events

    def _begin(self, block: Block) -> list[Event]:
        events = self._close()
        self.blocks.append(block)
        self._open = True
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        events, block = [], self.blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            events.append(self._delta("signature_delta", "signature", _SIGNATURE))
        elif block["type"] == "tool_use":
            block["input"] = _object(self._input) or {}
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, kind: str, key: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, key: text}}

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1


def _object(text: str) -> dict[str, Any] | None:
    """A call's input; None of one that was cut off."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
