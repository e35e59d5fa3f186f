"""An answer's blocks of content as they grow, and the events of a stream that build them.

Source: Anthropic's API reference, "Streaming Messages".
"""

import json
from collections.abc import Sequence
from copy import copy
from typing import Any

from quengine.serve.apis.anthropic.schemas import (
    AnthropicBlock,
    AnthropicBlockDelta,
    AnthropicBlockStart,
    AnthropicBlockStop,
    AnthropicDelta,
    AnthropicEvent,
    AnthropicInputDelta,
    AnthropicSignatureDelta,
    AnthropicText,
    AnthropicTextDelta,
    AnthropicThinking,
    AnthropicThinkingDelta,
    AnthropicToolUse,
)
from quengine.structured.answer_parser import BETWEEN
from quengine.structured.tool_calls import CallDelta, Delta, ReasoningDelta

Events = list[AnthropicEvent]

_SIGNATURE = "unsigned"
"""The signature of thinking blocks. Clients send it back; it is not checked."""


class ContentBlocks:
    """The blocks of an answer: reasoning, text and calls, in that order. thinking: whether reasoning is shown."""

    def __init__(self, thinking: bool) -> None:
        self.blocks: list[AnthropicBlock] = []
        self._thinking = thinking
        self._open = False
        self._input = ""
        """The JSON text of the last call."""

    def take(self, deltas: Sequence[Delta]) -> Events:
        """The events of the next parts of the answer."""
        events: Events = []
        for delta in deltas:
            if isinstance(delta, CallDelta):
                events += self._call(delta)
            elif not isinstance(delta, ReasoningDelta):
                events += self._text(AnthropicText, delta.text)
            elif self._thinking:
                events += self._text(AnthropicThinking, delta.text)
        return events

    def finish(self) -> Events:
        """The events of the answer's end, which begin a block where there is none."""
        return ([] if self.blocks else self._begin(AnthropicText())) + self._close()

    def whole(self) -> list[AnthropicBlock]:
        """The blocks of a finished answer. A cut-off call is left out, as it would seem to have no arguments."""
        called = bool(self.blocks) and isinstance(self.blocks[-1], AnthropicToolUse)
        cut = called and _object(self._input) is None
        return (self.blocks[:-1] or [AnthropicText()]) if cut else self.blocks

    def _text(self, kind: type[AnthropicText] | type[AnthropicThinking], text: str) -> Events:
        goes_on = self._open and isinstance(self.blocks[-1], kind)
        if not goes_on and any(isinstance(block, kind) for block in self.blocks):
            text = text.removeprefix(BETWEEN)  # blocks are apart
        if not text:
            return []
        events = [] if goes_on else self._begin(kind())
        block = self.blocks[-1]
        if isinstance(block, AnthropicThinking):
            block.thinking += text
            return [*events, self._delta(AnthropicThinkingDelta(text))]
        assert isinstance(block, AnthropicText)
        block.text += text
        return [*events, self._delta(AnthropicTextDelta(text))]

    def _call(self, delta: CallDelta) -> Events:
        events: Events = []
        if delta.name is not None:
            events = self._begin(AnthropicToolUse(delta.id or "", delta.name, {}))
            self._input = ""
        if delta.arguments:
            self._input += delta.arguments
            events.append(self._delta(AnthropicInputDelta(delta.arguments)))
        return events

    def _begin(self, block: AnthropicBlock) -> Events:
        events = self._close()
        self.blocks.append(block)
        self._open = True
        return [*events, AnthropicBlockStart(self._index, copy(block))]

    def _close(self) -> Events:
        if not self._open:
            return []
        self._open = False
        events, block = Events(), self.blocks[-1]
        if isinstance(block, AnthropicThinking):
            block.signature = _SIGNATURE
            events.append(self._delta(AnthropicSignatureDelta(_SIGNATURE)))
        elif isinstance(block, AnthropicToolUse):
            block.input = _object(self._input) or {}
        return [*events, AnthropicBlockStop(self._index)]

    def _delta(self, delta: AnthropicDelta) -> AnthropicBlockDelta:
        return AnthropicBlockDelta(self._index, delta)

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1


def _object(text: str) -> dict[str, Any] | None:
    """The input of a call; None where it is cut off, or is no object."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
