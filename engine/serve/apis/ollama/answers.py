"""Ollama's answers: a line of JSON for each part of a stream, or one object; the last has counts and durations.

Durations are whole nanoseconds.
"""

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET

from quengine.serve.apis.ollama.schemas import (
    OllamaAnswer,
    OllamaAnswerCall,
    OllamaAnswerFunction,
    OllamaChat,
    OllamaGenerate,
)
from quengine.serve.http import LINES, to_json
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Piece
from quengine.serve.routes.answer_events import Answer, End, Part
from quengine.serve.routes.answers import prompt_tokens
from quengine.serve.routes.dispatch import seconds_of
from quengine.serve.routes.logprob_forms import scored_tokens
from quengine.serve.routes.streaming import AnswerForm
from quengine.serve.schemas.errors import ApiError, OllamaError
from quengine.structured.tool_calls import CallDelta, Delta, ReasoningDelta, ToolCall


@dataclass
class AnswerPart:
    """More of an answer."""

    content: str = ""
    thinking: str = ""
    calls: list[OllamaAnswerCall] = field(default_factory=list)


def now() -> str:
    return timestamp(time.time())


def timestamp(seconds: float) -> str:
    """A Unix time as RFC 3339 writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def line(value: Any) -> bytes:
    return to_json(value) + b"\n"


class AnswerLines(AnswerForm):
    """One answer. began: the `time.perf_counter()` at which its request came."""

    media_type = LINES

    def __init__(
        self, host: ModelHost, answers: Sequence[Answer], streams: bool, notes: Sequence[str], began: float
    ) -> None:
        super().__init__(host, answers, streams, notes)
        self._request = answers[0].request
        self._began = began
        self._call: ToolCall | None = None
        """The call whose arguments are still coming: Ollama sends them as one value, not as pieces of text."""
        self._calls = 0

    @staticmethod
    @abstractmethod
    def written(name: str, part: AnswerPart, done: bool = False, **more: Any) -> OllamaChat | OllamaGenerate:
        """A part of the answer of a model, with `more` fields."""

    def part(self, part: Part) -> bytes:
        parts = self._parts(part.deltas)
        scores = self._logprobs(part.piece)
        if scores and not parts:
            parts = [AnswerPart()]
        return b"".join(self._line(each, scores if not n else {}) for n, each in enumerate(parts))

    def finished(self, end: End) -> bytes:
        held = b"".join(self._line(each, {}) for each in self._rest(end))
        return held + line(self.written(self.host.name, AnswerPart(), **self._tail(end)))

    def failed(self, error: ApiError) -> bytes:
        return line(OllamaError(error.message))

    def whole(self, outputs: Sequence[tuple[Part, End]]) -> OllamaChat | OllamaGenerate:
        ((part, end),) = outputs
        parts = self._parts(part.deltas) + self._rest(end)
        said = AnswerPart(
            "".join(each.content for each in parts),
            "".join(each.thinking for each in parts),
            [call for each in parts for call in each.calls],
        )
        return self.written(self.host.name, said, **self._logprobs(part.piece), **self._tail(end))

    def _line(self, part: AnswerPart, scores: dict[str, Any]) -> bytes:
        return line(self.written(self.host.name, part, **scores))

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        if self._request.params.logprobs is None or not piece.logprobs:
            return {}
        return {"logprobs": scored_tokens(piece.logprobs, self.answers[0].model)}

    def _tail(self, end: End) -> dict[str, Any]:
        timings = end.finished.timings
        return {
            "done": True,
            "done_reason": end.finished.reason,
            "total_duration": nanoseconds(time.perf_counter() - self._began),
            "load_duration": 0,  # the model is there before a request is taken
            "prompt_eval_count": prompt_tokens(self._request, end.finished),
            "prompt_eval_duration": nanoseconds(timings.prompt_s),
            "eval_count": timings.generated_tokens,
            "eval_duration": nanoseconds(timings.decode_s),
            "schema_violation": end.violation,
        }

    def _rest(self, end: End) -> list[AnswerPart]:
        return self._parts(end.deltas) + self._end_call()

    def _parts(self, deltas: Sequence[Delta]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for delta in deltas:
            if isinstance(delta, CallDelta):
                if delta.name is not None:
                    parts += self._end_call()
                    self._call = ToolCall(delta.id or "", delta.name, delta.arguments)
                elif self._call is not None:
                    self._call = replace(self._call, arguments=self._call.arguments + delta.arguments)
            elif delta.text:
                parts += self._end_call()
                thinks = isinstance(delta, ReasoningDelta)
                parts.append(AnswerPart(thinking=delta.text) if thinks else AnswerPart(delta.text))
        return parts

    def _end_call(self) -> list[AnswerPart]:
        """The finished call, if any. One whose arguments were cut off is left out; the reason of the end says so."""
        call, self._call = self._call, None
        if call is None:
            return []
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError:
            return []
        if not isinstance(arguments, dict):
            return []
        function = OllamaAnswerFunction(self._calls, call.name, arguments)
        self._calls += 1
        return [AnswerPart(calls=[OllamaAnswerCall(call.id, function)])]


class ChatLines(AnswerLines):
    @staticmethod
    def written(name: str, part: AnswerPart, done: bool = False, **more: Any) -> OllamaChat:
        message = OllamaAnswer(
            content=part.content, thinking=part.thinking or UNSET, tool_calls=part.calls or UNSET
        )
        return OllamaChat(model=name, created_at=now(), message=message, done=done, **more)


class GenerateLines(AnswerLines):
    @staticmethod
    def written(name: str, part: AnswerPart, done: bool = False, **more: Any) -> OllamaGenerate:
        thinking = part.thinking or UNSET
        return OllamaGenerate(
            model=name, created_at=now(), response=part.content, thinking=thinking, done=done, **more
        )


def loaded(host: ModelHost, lines: type[AnswerLines], keep_alive: Any = None) -> OllamaChat | OllamaGenerate:
    """The answer to a request that only loads or unloads the model. Raises ApiError while it is not loaded."""
    goes = keep_alive is not None and seconds_of(keep_alive) == 0
    if not goes:
        _ = host.model
    return lines.written(host.name, AnswerPart(), done=True, done_reason="unload" if goes else "load")
