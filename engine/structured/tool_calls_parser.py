"""Reads tool calls out of a text as it comes.

A call's name and arguments go out as soon as they are certain. Nothing of a tag, or of what may still become one, is
given out as text; what only looked like a call is given back as the text it was. How the text was cut into pieces
changes where deltas are cut, and nothing else. White space before a call and after the last one is the format's.

The reader is a coroutine: it waits where it needs more text, and so reads like one for a whole text. Knows the
formats' spelling; not tokens, schemas or requests.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from quengine.structured.tool_calls import CallDelta, Delta, TextDelta

T = TypeVar("T")
_Reading = Generator[None, None, T]

_SPACE = " \t\r\n"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NAME_CHARACTERS = re.compile(r"[a-zA-Z0-9_-]+")
_OPEN = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral-named": "[TOOL_CALLS]",
    "llama3": "<|python_tag|>",
}
_HERMES_END = "</tool_call>"
_INTERPRETERS = ("code_interpreter", "python", "ipython")  # what Llama's bare code is a call of
_IN_STRING = re.compile(r'[^"\\]+')
_IN_BRACKETS = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r"[^\s,\]}()]+")
_CLOSES = {"{": "}", "[": "]"}


class _NotACallError(Exception):
    """What follows is no call, or is cut off."""


class ToolCallParser:
    """Parses one answer: `push` each piece of text, then `finish`.

    Args:
        format_name: one of `tool_calls_format.FormatName`.
        names: the tools that may be called. Only Llama's untagged calls must be of these, for `{"name": ...` may be an
            answer in JSON. After a tag any name is a call: models also call what there is not.
        new_id: makes the id of a call.
        only_calls: the text is held to calls, so that what is none is one that was cut off: it is not given back.

    `calls` is how many there have been.
    """

    def __init__(
        self, format_name: str, names: frozenset[str], new_id: Callable[[], str], only_calls: bool = False
    ) -> None:
        self.calls = 0
        self._format = format_name
        self._open = _OPEN[format_name]
        self._names = names
        self._new_id = new_id
        self._only_calls = only_calls
        self._text = ""  # what is not done with, of which [:_at] is read
        self._at = 0
        self._closed = False
        self._out: list[Delta] = []
        self._first = True  # nothing has been read but white space
        self._after_call = False
        self._given = False  # a call of what is being read went out: it cannot be given back as text
        self._reader = self._answer()
        next(self._reader, None)

    def push(self, text: str) -> list[Delta]:
        """What this piece makes certain."""
        if self._given:
            self._drop_read()
        self._text += text
        return self._resumed()

    def finish(self) -> list[Delta]:
        """What was held back, once there is no more text. A call that was cut off keeps what it had."""
        self._closed = True
        return self._resumed()

    def _resumed(self) -> list[Delta]:
        next(self._reader, None)
        out, self._out = self._out, []
        return out

    # --- text

    def _answer(self) -> _Reading[None]:
        while True:
            start = yield from self._until_call()
            if start is None:
                return
            opener = self._at + (1 if self._text.startswith("{", self._at) else len(self._open))
            try:
                yield from self._block()
                self._after_call = True
            except _NotACallError:
                if self._given:
                    yield from self._drop_debris()
                else:
                    self._at = opener
                    self._say(self._text[start:opener])
            self._given = self._first = False

    def _until_call(self) -> _Reading[int | None]:
        """Give text out up to a call's opener; where the white space before it begins, None at the end of all text."""
        while True:
            self._drop_read()
            found = self._text.find(self._open)
            bare = self._first and self._format == "llama3" and self._text.lstrip(_SPACE).startswith("{")
            if bare:
                found = self._text.index("{")
            certain = len(self._text) - self._unsure() if found < 0 else found
            start = len(self._text[:certain].rstrip(_SPACE))
            self._say(self._text[:start])
            if found >= 0:
                self._at = found
                return start
            self._at = start
            if self._closed:
                if not (self._after_call and not self._text[start:].strip(_SPACE)):
                    self._say(self._text[start:])
                return None
            yield

    def _unsure(self) -> int:
        """How many characters at the end may be the beginning of an opener."""
        longest = min(len(self._text), len(self._open) - 1)
        return next((n for n in range(longest, 0, -1) if self._text.endswith(self._open[:n])), 0)

    def _drop_debris(self) -> _Reading[None]:
        """Read over the rest of a call that went wrong after it was given out: it is no text."""
        end = _HERMES_END if self._format == "hermes" else self._open
        while True:
            found = self._text.find(end, self._at)
            if found >= 0:
                self._at = found + (len(end) if self._format == "hermes" else 0)
                return
            if self._closed:
                self._at = len(self._text)
                return
            self._at = max(self._at, len(self._text) - len(end) + 1)
            yield

    def _drop_read(self) -> None:
        self._text, self._at = self._text[self._at :], 0

    # --- calls

    def _block(self) -> _Reading[None]:
        """One call, or several in one list; stands at the opener."""
        tagged = yield from self._take(self._open)
        yield from self._space()
        following = yield from self._peek()
        if self._format == "hermes":
            yield from self._object(known=False)
            yield from self._space()
            yield from self._take(_HERMES_END)
        elif self._format == "llama3":
            yield from self._llama(tagged) if following == "{" else self._python()
        elif following in ("[", "{"):
            yield from self._list() if following == "[" else self._object(known=False)
        else:
            yield from self._named()

    def _list(self) -> _Reading[None]:
        yield from self._expect("[")
        while True:
            yield from self._space()
            yield from self._object(known=False)
            yield from self._space()
            if not (yield from self._take(",")):
                yield from self._expect("]")
                return

    def _llama(self, tagged: bool) -> _Reading[None]:
        while True:
            yield from self._object(known=not tagged)
            yield from self._space()
            if not (yield from self._take(";")):
                return
            yield from self._space()
            if (yield from self._peek()) != "{":
                return

    def _named(self) -> _Reading[None]:
        """Mistral's name[ARGS]{...}, with [CALL_ID] and an id in between in some."""
        name = yield from self._word()
        call_id = None
        if (yield from self._take("[CALL_ID]")):
            call_id = yield from self._word()
        if not _NAME.fullmatch(name) or not (yield from self._take("[ARGS]")):
            raise _NotACallError
        yield from self._space()
        if (yield from self._peek()) != "{":
            raise _NotACallError
        yield from self._value(self._begin(name, call_id))

    def _python(self) -> _Reading[None]:
        """Llama's built-in tools: name.call(key="value", ...), or code up to the end where there is a tool for it."""
        start = self._at
        name = yield from self._word(dots=False)
        if (yield from self._take(".call(")) and name:
            arguments = yield from self._keywords()
            self._begin(name)(json.dumps(arguments, ensure_ascii=False))
            return
        interpreter = next((name for name in _INTERPRETERS if name in self._names), None)
        if interpreter is None:
            raise _NotACallError
        while not self._closed:
            yield
        code, self._at = self._text[start:], len(self._text)
        if not code.strip():
            raise _NotACallError
        self._begin(interpreter)(json.dumps({"code": code}, ensure_ascii=False))

    def _keywords(self) -> _Reading[dict[str, object]]:
        arguments: dict[str, object] = {}
        while True:
            yield from self._space()
            if not arguments and (yield from self._take(")")):
                return arguments
            key = yield from self._word(dots=False)
            yield from self._expect("=")
            arguments[key] = _loads((yield from self._whole_value()))
            yield from self._space()
            if not (yield from self._take(",")):
                yield from self._expect(")")
                return arguments

    def _object(self, known: bool) -> _Reading[None]:
        """{"name": ..., "arguments": {...}} in any order, other keys read over; `known`: of a tool that there is."""
        name: str | None = None
        waiting: str | None = None  # arguments that came before the name
        give: Callable[[str], None] | None = None
        yield from self._expect("{")
        while True:
            key = yield from self._key()
            if key == "name" and name is None:
                name = self._checked(_loads((yield from self._whole_value())), known)
                if waiting is not None:
                    give = self._begin(name)
                    give(waiting)
            elif key in ("arguments", "parameters") and give is None and waiting is None:
                if name is None:
                    waiting = _arguments((yield from self._whole_value()))
                else:
                    give = yield from self._arguments_of(name)
            else:
                yield from self._whole_value()
            yield from self._space()
            if not (yield from self._take(",")):
                break
        yield from self._expect("}")
        if give is None:
            if name is None or known:  # an answer in JSON may have a name that is a tool's
                raise _NotACallError
            self._begin(name)("{}")

    def _arguments_of(self, name: str) -> _Reading[Callable[[str], None]]:
        if (yield from self._peek()) == "{":
            give = self._begin(name)
            yield from self._value(give)
        else:
            arguments = _arguments((yield from self._whole_value()))
            give = self._begin(name)
            give(arguments)
        return give

    def _checked(self, name: object, known: bool) -> str:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or (known and name not in self._names):
            raise _NotACallError
        return name

    def _begin(self, name: str, call_id: str | None = None) -> Callable[[str], None]:
        """Give a call's name out; returns what takes its arguments."""
        index = self.calls
        self.calls += 1
        self._given = True
        self._emit(CallDelta(index, "", call_id or self._new_id(), name))
        return lambda arguments: self._emit(CallDelta(index, arguments))

    # --- JSON

    def _key(self) -> _Reading[str]:
        yield from self._space()
        if (yield from self._peek()) != '"':
            raise _NotACallError
        key = _loads((yield from self._whole_value()))
        yield from self._space()
        yield from self._expect(":")
        yield from self._space()
        return str(key)

    def _whole_value(self) -> _Reading[str]:
        parts: list[str] = []
        yield from self._value(parts.append)
        return "".join(parts)

    def _value(self, give: Callable[[str], None]) -> _Reading[None]:
        """One JSON value, its text given as it comes. Quotes and brackets must match; the rest is the model's."""
        open_brackets: list[str] = []
        while True:
            char = yield from self._peek()
            if char == '"':
                yield from self._string(give)
            elif char in _CLOSES:
                open_brackets.append(_CLOSES[char])
                self._pass(1, give)
            elif open_brackets and char == open_brackets[-1]:
                open_brackets.pop()
                self._pass(1, give)
            elif open_brackets:
                self._pass(self._span(_IN_BRACKETS), give)
            else:
                yield from self._scalar(give)
            if not open_brackets:
                return

    def _string(self, give: Callable[[str], None]) -> _Reading[None]:
        self._pass(1, give)
        while (char := (yield from self._peek())) != '"':
            if char == "\\":
                while len(self._text) - self._at < 2 and not self._closed:
                    yield
                self._pass(2, give)
            else:
                self._pass(self._span(_IN_STRING), give)
        self._pass(1, give)

    def _scalar(self, give: Callable[[str], None]) -> _Reading[None]:
        length = self._span(_SCALAR)
        self._pass(length, give)
        while self._at == len(self._text) and not self._closed:
            yield
            if length := self._span(_SCALAR):
                self._pass(length, give)

    # --- characters

    def _span(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self._text, self._at)
        return 0 if found is None else len(found[0])

    def _pass(self, length: int, give: Callable[[str], None]) -> None:
        part = self._text[self._at : self._at + length]
        if not part:
            raise _NotACallError
        self._at += len(part)
        give(part)

    def _peek(self) -> _Reading[str]:
        """The next character, "" at the end of all text."""
        while self._at == len(self._text) and not self._closed:
            yield
        return self._text[self._at : self._at + 1]

    def _space(self) -> _Reading[None]:
        while (char := (yield from self._peek())) and char in _SPACE:
            self._at += 1

    def _word(self, dots: bool = True) -> _Reading[str]:
        word = ""
        while (char := (yield from self._peek())) and (
            _NAME_CHARACTERS.match(char) or (dots and char == ".")
        ):
            word += char
            self._at += 1
        return word

    def _take(self, text: str) -> _Reading[bool]:
        """Read over `text` if it follows. At the end of all text a beginning of it counts as cut off."""
        while text.startswith(rest := self._text[self._at : self._at + len(text)]) and rest != text:
            if self._closed:
                self._at += len(rest)
                return bool(rest)
            yield
        if rest != text:
            return False
        self._at += len(text)
        return True

    def _expect(self, char: str) -> _Reading[None]:
        if (yield from self._peek()) != char:
            raise _NotACallError
        self._at += 1

    # --- deltas

    def _say(self, text: str) -> None:
        if text:
            self._first = self._after_call = False
            if not self._only_calls:
                self._emit(TextDelta(text))

    def _emit(self, delta: Delta) -> None:
        """Give out a delta, as one with the one before where both go on with the same."""
        last = self._out[-1] if self._out else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            self._out[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, CallDelta) and isinstance(last, CallDelta) and delta.name is None:
            self._out[-1] = CallDelta(last.index, last.arguments + delta.arguments, last.id, last.name)
        else:
            self._out.append(delta)


def _loads(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise _NotACallError from None


def _arguments(text: str) -> str:
    """Arguments that are no object: some models write JSON in a string, or null for none."""
    value = _loads(text)
    return "{}" if value is None else value if isinstance(value, str) else text
