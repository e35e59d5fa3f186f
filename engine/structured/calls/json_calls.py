"""Reads tool calls from a text as it comes: the base of the parsers of all forms, and calls that are JSON objects.

A call's name and arguments are emitted as soon as they are certain. A tag, or the possible beginning of one, is emitted
as text only once it turns out to be no call. How the text is cut into pieces changes only where the deltas are cut.
White space before a call and after the last one belongs to the form.

Llama 3 writes {"name": ..., "parameters": ...} as the whole answer, and what `<|python_tag|>` begins: calls in JSON,
between semicolons, a built-in tool's name.call(key="value", ...), or code, which is a call where there is a tool for
it. Sources: the chat template of Llama 3.1, and Meta's page on its prompt format.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable

from quengine.structured.answer_parser import SPACE, AnswerParser, NoMatchError, Reading, held_back
from quengine.structured.tool_calls import CallDelta, Delta, TextDelta

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_IN_STRING = re.compile(r'[^"\\]+')
_IN_BRACKETS = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r"[^\s,\]}()]+")
_CLOSES = {"{": "}", "[": "]"}


class ToolCallParser(AnswerParser):
    """Parses one answer.

    Args:
        names: the tools that may be called. A call without a tag must name one of them, since `{"name": ...` may be an
            answer in JSON. After a tag any name is a call: models call unknown functions, too.
        new_id: makes the id of a call.
        only_calls: the text is constrained to calls. Text that is no call is then one that was cut off, and is dropped.
    """

    def __init__(self, names: frozenset[str], new_id: Callable[[], str], only_calls: bool = False) -> None:
        self._name_key = "name"
        self._argument_keys: tuple[str, ...] = ("arguments", "parameters")
        self._names = names
        self._new_id = new_id
        self._only_calls = only_calls
        self._first = True  # nothing has been read but white space
        self._after_call = False
        self._given = False  # part of what is being read was emitted as a call: it cannot become text
        super().__init__()

    def push(self, text: str) -> list[Delta]:
        """The deltas that this piece makes certain."""
        if self._given:
            self._drop_read()
        return super().push(text)

    # --- text

    def _answer(self) -> Reading[None]:
        while True:
            start = yield from self._until_call()
            if start is None:
                return
            opener = self._at + self._opener_length()
            try:
                yield from self._block()
                self._after_call = True
            except NoMatchError:
                if self._given:
                    yield from self._drop_debris()
                else:
                    self._at = opener
                    self._say(self._text[start:opener])
            self._given = self._first = False

    def _opener_length(self) -> int:
        """The length of the opener with which the rest of the text begins."""
        return max(len(mark) for mark in self._openers() if self._text.startswith(mark, self._at))

    def _until_call(self) -> Reading[int | None]:
        """Emits text up to a call's opener. Returns where the white space before it begins; None at the end of all
        text."""
        while True:
            self._drop_read()
            openers = self._openers()
            found = min((at for mark in openers if (at := self._text.find(mark)) >= 0), default=-1)
            certain = len(self._text) - held_back(self._text, openers) if found < 0 else found
            start = len(self._text[:certain].rstrip(SPACE))
            self._say(self._text[:start])
            if found >= 0:
                self._at = found
                return start
            self._at = start
            if self._closed:
                if not (self._after_call and not self._text[start:].strip(SPACE)):
                    self._say(self._text[start:])
                return None
            yield

    def _drop_debris(self) -> Reading[None]:
        """Skips the rest of a malformed call whose beginning was emitted as a call: it is not text."""
        end, over = self._debris_end()
        while True:
            found = self._text.find(end, self._at)
            if found >= 0:
                self._at = found + (len(end) if over else 0)
                return
            if self._closed:
                self._at = len(self._text)
                return
            self._at = max(self._at, len(self._text) - len(end) + 1)
            yield

    @abstractmethod
    def _openers(self) -> tuple[str, ...]:
        """The texts with which a call may begin here."""

    @abstractmethod
    def _block(self) -> Reading[None]:
        """Reads one call, or several, from the opener on."""

    @abstractmethod
    def _debris_end(self) -> tuple[str, bool]:
        """The text at which a malformed call ends, and whether that is skipped too."""

    # --- calls

    def _object(self, known: bool) -> Reading[None]:
        """Reads {"name": ..., "arguments": {...}} in any order, and skips other keys. known: the name must be a
        tool's."""
        name: str | None = None
        waiting: str | None = None  # arguments that came before the name
        give: Callable[[str], None] | None = None
        yield from self._expect("{")
        while True:
            key = yield from self._key()
            if key == self._name_key and name is None:
                name = self._checked(loads((yield from self._whole_value())), known)
                if waiting is not None:
                    give = self._begin(name)
                    give(waiting)
            elif key in self._argument_keys and give is None and waiting is None:
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
                raise NoMatchError
            self._begin(name)("{}")

    def _arguments_of(self, name: str) -> Reading[Callable[[str], None]]:
        if (yield from self._peek()) == "{":
            give = self._begin(name)
            yield from self._value(give)
        else:
            arguments = _arguments((yield from self._whole_value()))
            give = self._begin(name)
            give(arguments)
        return give

    def _checked(self, name: object, known: bool) -> str:
        if not isinstance(name, str) or not is_name(name) or (known and name not in self._names):
            raise NoMatchError
        return name

    def _begin(self, name: str, call_id: str | None = None) -> Callable[[str], None]:
        """Emits a call's name. Returns the function that emits pieces of its arguments."""
        index = self.calls
        self.calls += 1
        self._given = True
        self._emit(CallDelta(index, "", call_id or self._new_id(), name))
        return lambda arguments: self._emit(CallDelta(index, arguments))

    # --- JSON

    def _key(self) -> Reading[str]:
        yield from self._space()
        if (yield from self._peek()) != '"':
            raise NoMatchError
        key = loads((yield from self._whole_value()))
        yield from self._space()
        yield from self._expect(":")
        yield from self._space()
        return str(key)

    def _whole_value(self) -> Reading[str]:
        parts: list[str] = []
        yield from self._value(parts.append)
        return "".join(parts)

    def _value(self, give: Callable[[str], None]) -> Reading[None]:
        """Reads a JSON value, and gives its text on as it comes. Only quotes and brackets are checked."""
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

    def _string(self, give: Callable[[str], None]) -> Reading[None]:
        self._pass(1, give)
        while (char := (yield from self._peek())) != '"':
            if char == "\\":
                while len(self._text) - self._at < 2 and not self._closed:
                    yield
                self._pass(2, give)
            else:
                self._pass(self._span(_IN_STRING), give)
        self._pass(1, give)

    def _scalar(self, give: Callable[[str], None]) -> Reading[None]:
        length = self._span(_SCALAR)
        self._pass(length, give)
        while self._at == len(self._text) and not self._closed:
            yield
            if length := self._span(_SCALAR):
                self._pass(length, give)

    # --- deltas

    def _say(self, text: str) -> None:
        if text:
            self._first = self._after_call = False
            if not self._only_calls:
                self._emit(TextDelta(text))


def is_name(text: str) -> bool:
    """Whether `text` may be the name of a function."""
    return _NAME.fullmatch(text) is not None


def loads(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise NoMatchError from None


def _arguments(text: str) -> str:
    """The arguments in a value that is no object: some models write JSON in a string, or null for none."""
    value = loads(text)
    return "{}" if value is None else value if isinstance(value, str) else text


PYTHON_TAG = "<|python_tag|>"
_INTERPRETERS = ("code_interpreter", "python", "ipython")
"""The tool that is called by bare code."""


class LlamaCallParser(ToolCallParser):
    """Parses one answer; see `ToolCallParser`."""

    def _openers(self) -> tuple[str, ...]:
        bare = self._first and self._text.lstrip(SPACE).startswith("{")
        return ("{",) if bare else (PYTHON_TAG,)

    def _debris_end(self) -> tuple[str, bool]:
        return PYTHON_TAG, False

    def _block(self) -> Reading[None]:
        tagged = yield from self._take(PYTHON_TAG)
        yield from self._space()
        if (yield from self._peek()) != "{":
            yield from self._python()
            return
        while True:
            yield from self._object(known=not tagged)
            yield from self._space()
            if not (yield from self._take(";")):
                return
            yield from self._space()
            if (yield from self._peek()) != "{":
                return

    def _python(self) -> Reading[None]:
        """Reads name.call(key="value", ...), or, where there is a tool for code, all text up to the end as code."""
        start = self._at
        name = yield from self._word(dots=False)
        if (yield from self._take(".call(")) and name:
            arguments = yield from self._keywords()
            self._begin(name)(json.dumps(arguments, ensure_ascii=False))
            return
        interpreter = next((name for name in _INTERPRETERS if name in self._names), None)
        if interpreter is None:
            raise NoMatchError
        while not self._closed:
            yield
        code, self._at = self._text[start:], len(self._text)
        if not code.strip():
            raise NoMatchError
        self._begin(interpreter)(json.dumps({"code": code}, ensure_ascii=False))

    def _keywords(self) -> Reading[dict[str, object]]:
        arguments: dict[str, object] = {}
        while True:
            yield from self._space()
            if not arguments and (yield from self._take(")")):
                return arguments
            key = yield from self._word(dots=False)
            yield from self._expect("=")
            arguments[key] = loads((yield from self._whole_value()))
            yield from self._space()
            if not (yield from self._take(",")):
                yield from self._expect(")")
                return arguments
