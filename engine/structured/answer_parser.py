"""The base of the parsers of answers: text goes in as it comes, and deltas come out as soon as they are certain.

A parser is a coroutine (`_answer`) that waits where it needs more text, so that it reads like the parser of a whole
text. How the text is cut into pieces changes only where the deltas are cut.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

from quengine.structured.tool_calls import CallDelta, Delta, ReasoningDelta, TextDelta

T = TypeVar("T")
Reading = Generator[None, None, T]

SPACE = " \t\r\n"
BETWEEN = "\n\n"
"""Joins two messages of one kind, where an answer has several."""
_NAME_CHARACTERS = re.compile(r"[a-zA-Z0-9_-]+")


class NoMatchError(Exception):
    """The text that follows is not of the form that is being read, or is cut off."""


def held_back(text: str, marks: Collection[str]) -> int:
    """How many characters at the end of a text may be the beginning of one of `marks`."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class AnswerParser(ABC):
    """Parses one answer: `push` each piece of text, then `finish`. `calls` is how many calls there have been."""

    def __init__(self) -> None:
        self.calls = 0
        self._text = ""  # text that is still needed; [:_at] has been read
        self._at = 0
        self._closed = False
        self._out: list[Delta] = []
        self._reader = self._answer()
        next(self._reader, None)

    def push(self, text: str) -> list[Delta]:
        """The deltas that this piece makes certain."""
        self._text += text
        return self._resumed()

    def finish(self) -> list[Delta]:
        """The deltas that were held back, at the end of the text. A call that is cut off keeps its beginning."""
        self._closed = True
        return self._resumed()

    def _resumed(self) -> list[Delta]:
        next(self._reader, None)
        out, self._out = self._out, []
        return out

    @abstractmethod
    def _answer(self) -> Reading[None]:
        """Read the answer to its end."""

    def _drop_read(self) -> None:
        self._text, self._at = self._text[self._at :], 0

    def _span(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self._text, self._at)
        return 0 if found is None else len(found[0])

    def _pass(self, length: int, give: Callable[[str], None]) -> None:
        part = self._text[self._at : self._at + length]
        if not part:
            raise NoMatchError
        self._at += len(part)
        give(part)

    def _peek(self) -> Reading[str]:
        """The next character, "" at the end of all text."""
        while self._at == len(self._text) and not self._closed:
            yield
        return self._text[self._at : self._at + 1]

    def _space(self) -> Reading[None]:
        while (char := (yield from self._peek())) and char in SPACE:
            self._at += 1

    def _word(self, dots: bool = True) -> Reading[str]:
        word = ""
        while (char := (yield from self._peek())) and (
            _NAME_CHARACTERS.match(char) or (dots and char == ".")
        ):
            word += char
            self._at += 1
        return word

    def _take(self, text: str) -> Reading[bool]:
        """Skips `text` if it follows, and says whether it does. At the end of the answer its beginning is enough."""
        while text.startswith(rest := self._text[self._at : self._at + len(text)]) and rest != text:
            if self._closed:
                self._at += len(rest)
                return bool(rest)
            yield
        if rest != text:
            return False
        self._at += len(text)
        return True

    def _expect(self, char: str) -> Reading[None]:
        if (yield from self._peek()) != char:
            raise NoMatchError
        self._at += 1

    def _emit(self, delta: Delta) -> None:
        """Emits a delta, joined to the last one where both belong to the same text or call."""
        last = self._out[-1] if self._out else None
        if isinstance(delta, TextDelta | ReasoningDelta) and type(last) is type(delta):
            self._out[-1] = type(delta)(last.text + delta.text)
        elif isinstance(delta, CallDelta) and isinstance(last, CallDelta) and delta.name is None:
            self._out[-1] = CallDelta(last.index, last.arguments + delta.arguments, last.id, last.name)
        else:
            self._out.append(delta)


class TextParser(AnswerParser):
    """All of an answer is its text."""

    def _answer(self) -> Reading[None]:
        while True:
            if self._text:
                self._emit(TextDelta(self._text))
                self._text = ""
            if self._closed:
                return
            yield
