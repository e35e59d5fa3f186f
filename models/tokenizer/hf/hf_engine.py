"""Runs a tokenizer.json: in our own process where all its parts are known, else in one with limits."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from quengine.models.gguf.vocab_checks import MAX_VOCABULARY
from quengine.models.template.limited_process import LimitedProcess, Limits, ProcessStoppedError
from quengine.models.tokenizer.errors import TokenizerError
from quengine.models.tokenizer.hf.bounded_parts import is_bounded
from quengine.models.tokenizer.hf.library_engine import LibraryEngine
from quengine.models.tokenizer.vocabulary import control_texts

_WORKER = Path(__file__).with_name("library_engine.py")
# The largest tokenizer in use takes 0.4 GiB.
_LIMITS = Limits(cpu_seconds=1.0, memory_bytes=1 << 30)


class Engine(Protocol):
    """What runs a tokenizer.json, as `LibraryEngine` does. A LimitedEngine raises ProcessStoppedError too."""

    def describe(self) -> dict[str, Any]: ...

    def encode(self, text: str, special: bool) -> list[int]: ...


class LimitedEngine:
    """A tokenizer.json in a process with limits."""

    def __init__(self, path: str, text: str | None = None) -> None:
        """As LibraryEngine's, but nothing is read before the first question."""
        self._process = LimitedProcess(_WORKER, {"path": path, "json": text}, _LIMITS)

    def describe(self) -> dict[str, Any]:
        return self._ask({})

    def encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._ask({"text": text, "special": special})["ids"]
        return ids

    def _ask(self, question: Any) -> dict[str, Any]:
        answer = self._process.ask(question)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


class WholeTextEncoder:
    """tokenizer.json as an encoder. Whether control tokens are matched is a switch on the library's object."""

    def __init__(self, engine: Engine, origin: Path) -> None:
        self._engine = engine
        self._origin = origin
        self._lock = Lock()

    def encode(self, text: str, special: bool) -> list[int]:
        """Raises TokenizerError: the file's patterns fail at `text`, or need too much time or memory for it."""
        with self._lock:
            try:
                return self._engine.encode(text, special)
            except (ValueError, ProcessStoppedError) as failure:
                raise TokenizerError(f"{self._origin}: {failure}") from None


@dataclass(frozen=True)
class Described:
    """`LibraryEngine.describe`, checked."""

    vocab: Mapping[str, int]
    added: Sequence[tuple[int, str, bool]]
    empty: Sequence[int]


def engine_for(path: Path, parts: Mapping[str, Any]) -> Engine:
    """What runs the tokenizer.json `parts`, with marks that end a turn made special where the file forgot to.

    Raises TokenizerError: the library refuses the file.
    """
    given = parts.get("added_tokens")
    if given is not None and not isinstance(given, list):
        raise TokenizerError(f"{path}: added_tokens is no array")
    added = [token for token in given or () if isinstance(token, dict)]
    contents = [token["content"] for token in added if isinstance(token.get("content"), str)]
    marks = control_texts(set(contents), ())
    unmarked = [
        t
        for t in added
        if isinstance(t.get("content"), str) and t["content"] in marks and not t.get("special")
    ]
    for token in unmarked:
        token["special"] = True
    text = json.dumps(parts) if unmarked else None
    kind = LibraryEngine if is_bounded(parts) else LimitedEngine
    try:
        return kind(str(path.absolute()), text)
    except ValueError as failure:
        raise TokenizerError(f"{path}: {failure}") from None


def describe(path: Path, engine: Engine) -> Described:
    """What `engine` says of its tokens. Raises TokenizerError: it does not work, or has too large an id."""
    try:
        found = engine.describe()
    except (ValueError, ProcessStoppedError) as failure:
        raise TokenizerError(f"{path}: {failure}") from None
    added = [(int(i), str(text), bool(special)) for i, text, special in found["added"]]
    largest = max((*found["vocab"].values(), *(i for i, _, _ in added)), default=-1)
    if largest >= MAX_VOCABULARY:
        raise TokenizerError(f"{path}: token {largest} is not from 0 to {MAX_VOCABULARY - 1}")
    return Described(found["vocab"], added, found["empty"])
