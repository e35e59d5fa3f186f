"""The events of a completion, from which every API encodes its answer: parts while it grows, and its end.

A completion is parsed only here: into reasoning, text and calls, the reason of its end, and whether it is valid under
the schema that constrained it.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece
from quengine.structured.answer_format import AnswerFormat, answer_violation
from quengine.structured.tool_calls import Delta, TextDelta, ToolUse, collect

logger = logging.getLogger("quengine.serve")


class Part(msgspec.Struct, frozen=True):
    """More of a completion.

    Attributes:
        choice: the completion's number in its request.
        piece: its tokens and text, their log-probabilities, and the progress of its prompt.
        deltas: what the piece makes certain; a piece may make nothing certain.
    """

    choice: int
    piece: Piece
    deltas: list[Delta]


class End(msgspec.Struct, frozen=True):
    """The end of a completion.

    Attributes:
        finished: the engine's event.
        deltas: the deltas that had been held back.
        reason: why the completion ended.
        violation: why an answer that ended by itself is not valid under its schema; UNSET: no violation.
    """

    choice: int
    finished: Finished
    deltas: list[Delta]
    reason: Literal["stop", "length", "tool_calls"]
    violation: str | UnsetType


class Answer:
    """One completion as it grows. `model` stays the model that computes it, even if its engine is replaced meanwhile.

    Args:
        request: the engine's request.
        choice: the completion's number among those of its HTTP request.
        form: parses the text, with the tools of `use`; None: all of it is text.
        prompt: the prompt's end (`ServedModel.end_of`).
    """

    def __init__(
        self,
        host: ModelHost,
        request: GenerationRequest,
        choice: int = 0,
        form: AnswerFormat | None = None,
        use: ToolUse | None = None,
        prompt: str = "",
    ) -> None:
        self.request = request
        self.use = use or ToolUse()
        self._host, self.model = host, host.model
        self.choice = choice
        self._form = form
        self._prompt = prompt
        self._parser = None if form is None else form.parser(self.use, prompt)
        self._tokens: list[int] = []
        self._kept: list[Delta] = []
        """For the check of the finished answer."""

    @property
    def reasoning_tokens(self) -> int:
        form = self._form
        return (
            0
            if form is None
            else form.reasoning_tokens(self.use, self._tokens, self.model.decode, self._prompt)
        )

    def part(self, piece: Piece) -> Part:
        """The event of a piece."""
        if self._parser is None:
            deltas: list[Delta] = [TextDelta(piece.text)] if piece.text else []
        else:
            self._tokens += piece.tokens
            deltas = self._parser.push(piece.text)
        return Part(self.choice, piece, self._held(deltas))

    def end(self, finished: Finished) -> End:
        """The event of the end."""
        deltas = [] if self._parser is None else self._held(self._parser.finish())
        called = self._parser is not None and self._parser.calls and finished.reason == "stop"
        reason: Any = "tool_calls" if called else finished.reason
        return End(self.choice, finished, deltas, reason, self._violation(finished))

    def _held(self, deltas: list[Delta]) -> list[Delta]:
        if self.request.params.constraint is not None:
            self._kept += deltas
        return deltas

    def _violation(self, finished: Finished) -> str | UnsetType:
        constraint = self.request.params.constraint
        if finished.reason != "stop" or constraint is None:
            return UNSET
        text, calls = collect(self._kept)
        violation = answer_violation(constraint, None if self._form is None else self.use, text, calls)
        if violation is None:
            return UNSET
        self._host.metrics.violated()
        logger.warning("a finished answer is not valid under its schema: %s", violation)
        return violation


def text_answers(host: ModelHost, requests: Sequence[GenerationRequest]) -> list[Answer]:
    """The completions of these requests, which are all text."""
    return [Answer(host, request, choice) for choice, request in enumerate(requests)]
