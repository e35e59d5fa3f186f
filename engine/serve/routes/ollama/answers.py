"""Ollama's answers: a line of JSON for each part of a stream, or one object; the last has counts and durations.

Durations are whole nanoseconds.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from quengine.serve.http import LINES, to_json
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece
from quengine.serve.routes.answers import prompt_tokens
from quengine.serve.routes.constraints import TextCheck
from quengine.serve.routes.logprob_forms import chat_logprobs
from quengine.serve.routes.model_route import seconds_of
from quengine.serve.routes.streaming import ChunkForm
from quengine.serve.schemas.error_forms import OllamaError
from quengine.serve.schemas.errors import ApiError


class Reader(Protocol):
    """Takes an answer apart into deltas as chat completions have them (`chat.ChatAnswer`)."""

    def push(self, piece: Piece) -> list[dict[str, Any]]: ...

    def finish(self) -> list[dict[str, Any]]: ...

    def checked(self, host: ModelHost, end: Finished) -> dict[str, Any]: ...


class RawReader:
    """Of an answer that is all text."""

    def __init__(self, host: ModelHost, request: GenerationRequest) -> None:
        self._check = TextCheck(host, [request])

    def push(self, piece: Piece) -> list[dict[str, Any]]:
        self._check.add(0, piece.text)
        return [{"content": piece.text}] if piece.text else []

    def finish(self) -> list[dict[str, Any]]:
        return []

    def checked(self, host: ModelHost, end: Finished) -> dict[str, Any]:
        del host
        return self._check.field(0, end)


@dataclass
class AnswerPart:
    """More of an answer."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


def now() -> str:
    return timestamp(time.time())


def timestamp(seconds: float) -> str:
    """A Unix time as RFC 3339 writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def line(value: Any) -> bytes:
    return to_json(value) + b"\n"


class AnswerLines(ChunkForm, ABC):
    """One answer. `began` is the `time.perf_counter()` at which its request came."""

    media_type = LINES

    def __init__(self, host: ModelHost, request: GenerationRequest, reader: Reader, began: float) -> None:
        self._host = host
        self._model = host.model
        self._request = request
        self._reader = reader
        self._began = began
        self._call: dict[str, Any] | None = None
        """The call whose arguments are coming: Ollama's are values, not the pieces of a text."""
        self._calls = 0

    @staticmethod
    @abstractmethod
    def part_body(part: AnswerPart) -> dict[str, Any]:
        """The fields that a part of the answer is in."""

    def piece(self, choice: int, piece: Piece) -> bytes:
        del choice
        parts = self._parts(self._reader.push(piece))
        scores = self._logprobs(piece)
        if scores and not parts:
            parts = [AnswerPart()]
        return b"".join(self._line(part, scores if not n else {}) for n, part in enumerate(parts))

    def finished(self, choice: int, end: Finished) -> bytes:
        del choice
        held = b"".join(self._line(part, {}) for part in self._rest())
        return held + line(self._head() | self.part_body(AnswerPart()) | self._tail(end))

    def failed(self, error: ApiError) -> bytes:
        return line(OllamaError(error).body)

    def whole(self, piece: Piece, end: Finished) -> dict[str, Any]:
        """The answer that is not streamed."""
        parts = self._parts(self._reader.push(piece)) + self._rest()
        part = AnswerPart(
            "".join(each.content for each in parts),
            "".join(each.thinking for each in parts),
            [call for each in parts for call in each.calls],
        )
        return self._head() | self.part_body(part) | self._logprobs(piece) | self._tail(end)

    def _line(self, part: AnswerPart, scores: dict[str, Any]) -> bytes:
        return line(self._head() | self.part_body(part) | scores | {"done": False})

    def _head(self) -> dict[str, Any]:
        return {"model": self._host.name, "created_at": now()}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        if self._request.params.logprobs is None or not piece.logprobs:
            return {}
        return {"logprobs": chat_logprobs(piece.logprobs, self._model)["content"]}

    def _tail(self, end: Finished) -> dict[str, Any]:
        timings = end.timings
        return {
            "done": True,
            "done_reason": end.reason,
            "total_duration": nanoseconds(time.perf_counter() - self._began),
            "load_duration": 0,  # the model is there before a request is taken
            "prompt_eval_count": prompt_tokens(self._request, end),
            "prompt_eval_duration": nanoseconds(timings.prompt_s),
            "eval_count": timings.generated_tokens,
            "eval_duration": nanoseconds(timings.decode_s),
            **self._reader.checked(self._host, end),
        }

    def _rest(self) -> list[AnswerPart]:
        return self._parts(self._reader.finish()) + self._end_call()

    def _parts(self, deltas: Sequence[dict[str, Any]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for delta in deltas:
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    parts += self._end_call()
                    self._call = {"id": call["id"], **call["function"]}
                elif self._call is not None:
                    self._call["arguments"] += call["function"]["arguments"]
            content, thinking = delta.get("content") or "", delta.get("reasoning_content") or ""
            if content or thinking:
                parts += self._end_call()
                parts.append(AnswerPart(content, thinking))
        return parts

    def _end_call(self) -> list[AnswerPart]:
        """The call that has come; nothing of one whose arguments were cut, as the reason of the end says."""
        call, self._call = self._call, None
        if call is None:
            return []
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except ValueError:
            return []
        if not isinstance(arguments, dict):
            return []
        function = {"index": self._calls, "name": call["name"], "arguments": arguments}
        self._calls += 1
        return [AnswerPart(calls=[{"id": call["id"], "function": function}])]


class ChatLines(AnswerLines):
    @staticmethod
    def part_body(part: AnswerPart) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.content}
        if part.thinking:
            message["thinking"] = part.thinking
        if part.calls:
            message["tool_calls"] = part.calls
        return {"message": message}


class GenerateLines(AnswerLines):
    @staticmethod
    def part_body(part: AnswerPart) -> dict[str, Any]:
        return {"response": part.content, **({"thinking": part.thinking} if part.thinking else {})}


def loaded(host: ModelHost, empty: dict[str, Any], keep_alive: Any = None) -> dict[str, Any]:
    """The answer to a request that only wants the model to be there, or to go. Raises ApiError while it is not."""
    goes = keep_alive is not None and seconds_of(keep_alive) == 0
    if not goes:
        _ = host.model
    reason = "unload" if goes else "load"
    return {"model": host.name, "created_at": now(), **empty, "done": True, "done_reason": reason}
