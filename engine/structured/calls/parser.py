"""Reads tool calls from a text, in the form that a `form.CallForm` describes.

White space may be more or less than in the form, since models do not write it exactly like their templates. The texts
around all calls may be missing. Parameters that are not JSON become JSON by the tool's schema.
"""

import ast
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quengine.structured.answer_parser import SPACE, NoMatchError, Reading, held_back
from quengine.structured.calls.form import ID, INDEX, KEY, NAME, SLOTS, CallForm, ParameterForm, types_of
from quengine.structured.calls.json_calls import ToolCallParser, is_name
from quengine.structured.tool_calls import Tool

_MOST_NESTED = 100
_PARTS = re.compile(rf"\s+|[{SLOTS}]|[^\s{SLOTS}]+")
_CDATA = re.compile(r"\A\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL)
_ID_CHARACTERS = re.compile(r"[a-zA-Z0-9_.:-]+")


class CallFormParser(ToolCallParser):
    """Parses one answer. tools: the tools that may be called. The other arguments are those of `ToolCallParser`."""

    def __init__(
        self, form: CallForm, tools: Sequence[Tool], new_id: Callable[[], str], only_calls: bool = False
    ) -> None:
        self._form = form
        self._tools = {tool.name: tool for tool in tools}
        self._keys = form.keys
        self._listed = form.open.rstrip().endswith("[")
        self._outer = form.open.rstrip().removesuffix("[").strip()
        self._close = form.close.strip().removeprefix("]" if self._listed else "").strip()
        self._head = form.head if self._keys is None else self._keys.before
        self._tail = form.tail if self._keys is None else self._keys.after
        first = _PARTS.findall(self._head)
        marks = (
            self._outer,
            next((part for part in first if part not in SLOTS and part.strip()), ""),
        )
        self._marks: tuple[str, ...] = tuple(
            mark for mark in dict.fromkeys(marks) if re.search(r"[^\[{(\"\s]", mark)
        )
        super().__init__(frozenset(self._tools), new_id, only_calls)
        if self._keys is not None:
            self._name_key, self._argument_keys = self._keys.name, (self._keys.arguments,)

    # --- where calls begin

    def _openers(self) -> tuple[str, ...]:
        if self._marks:
            return (*self._marks, *self._form.text_ends)
        begin = self._text.lstrip(SPACE) if self._first else ""
        if self._keys is not None:
            return ("{",) if begin.startswith("{") else ("\0",)
        names = [f"{name}{self._form.middle}" for name in self._names]
        known = (
            tuple(name for name in names if begin.startswith(name) or name.startswith(begin)) if begin else ()
        )
        return (*known, self._form.separator.strip(), self._form.text_mark or "\0")

    def _block(self) -> Reading[None]:
        for end in self._form.text_ends:
            if (yield from self._take(end)):
                return
        if self._form.text_mark and (yield from self._take(self._form.text_mark)):
            return
        if not self._marks:
            yield from self._take(self._form.separator.strip())
            if self._form.text_mark and (yield from self._take(self._form.text_mark)):
                return
        yield from self._take(self._outer)
        if self._listed:
            yield from self._space()
            yield from self._take("[")
        separator, alike = self._form.separator.strip(), self._keys is not None and not self._head.strip()
        while True:
            yield from self._space()
            yield from self._call()
            if not (self._marks and (separator or alike or self._listed or self._close)):
                return
            yield from self._space()
            if not (yield from self._passed(separator)) and not (alike and (yield from self._peek()) == "{"):
                break
        if self._listed:
            yield from self._passed("]")
            yield from self._space()
        yield from self._passed(self._close)

    def _debris_end(self) -> tuple[str, bool]:
        end = self._close or self._tail.strip()
        return (end, True) if end else (self._openers()[0], False)

    # --- one call

    def _call(self) -> Reading[None]:
        if self._keys is not None:
            yield from self._match(self._keys.before)
            yield from self._object(known=not self._marks)
        else:
            yield from self._named_call()
        if self._tail:
            yield from self._space()
            yield from self._match(self._tail, optional=True)

    def _named_call(self) -> Reading[None]:
        call_id = yield from self._match(self._form.head)
        name = yield from self._word()
        if not is_name(name) or (not self._marks and name not in self._names):
            raise NoMatchError
        call_id = (yield from self._match(self._form.middle)) or call_id
        if self._form.parameters is not None:
            yield from self._parameters(name, call_id, self._form.parameters)
            return
        yield from self._space()
        if (yield from self._peek()) != "{":
            raise NoMatchError
        yield from self._value(self._begin(name, call_id))

    def _match(self, text: str, optional: bool = False) -> Reading[str | None]:
        """Skips a text of the form, with any white space where it has some. Returns the id in it, if there is one."""
        call_id: str | None = None
        left_out = False  # an id, with what stands before it
        parts = _PARTS.findall(text)
        for part, following in itertools.zip_longest(parts, parts[1:]):
            if left_out:
                left_out = False
            elif part in (INDEX, ID, NAME):
                word = yield from self._slot()
                call_id = word if part == ID else call_id
            elif part.isspace():
                yield from self._space()
            elif not (yield from self._passed(part)):
                left_out = following == ID
                if optional and not left_out:
                    return call_id
                if not left_out:
                    raise NoMatchError
        return call_id

    def _slot(self) -> Reading[str]:
        word = ""
        while (char := (yield from self._peek())) and _ID_CHARACTERS.match(char):
            word += char
            self._at += 1
        return word

    def _passed(self, text: str) -> Reading[bool]:
        return bool(text) and (yield from self._take(text))

    # --- parameters

    def _parameters(self, name: str, call_id: str | None, form: ParameterForm) -> Reading[None]:
        """Reads parameters up to the first text that begins none, and gives them on as one JSON object."""
        give = self._begin(name, call_id)
        schemas = self._schemas(name)
        prefix = form.separator_start
        comma = ""
        give("{")
        while True:
            yield from self._space()
            if comma and (yield from self._passed(form.between.strip())):
                yield from self._space()
            if form.item and (yield from self._passed(tail := self._tail.strip())):
                if self._text[: self._at].endswith(tail):  # else the call is cut off
                    give("}")
                return
            if form.head.strip():
                if not (yield from self._passed(form.head.strip())):
                    break
            elif (yield from self._peek()) == self._tail[:1]:
                break
            key, whole = yield from self._until(prefix)
            if not whole:  # cut off
                return
            key = key.strip()
            give(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            if form.item:
                give((yield from self._element(form, key, schemas.get(key, {})))[0])
            else:
                yield from self._parameter(form, schemas.get(key, {}), give)
            comma = ", "
        if (yield from self._peek()):  # else the call is cut off
            give("}")

    def _parameter(self, form: ParameterForm, schema: Any, give: Callable[[str], None]) -> Reading[None]:
        kind, separator = yield from self._separator(form)
        if form.quote:
            yield from self._quoted(form, give)
            return
        text, whole = yield from self._until(form.tail.strip())
        text = _without_margin(text, separator, form.tail)
        types = ("string",) if kind == "string" else types_of(schema)
        if kind not in ("", "string"):
            types = tuple(each for each in types if each != "string") or ("object",)
        if whole:
            give(as_json(text, types))
        elif text:  # cut off: what there is of it
            give(json.dumps(text, ensure_ascii=False)[:-1] if "string" in types else text)

    def _element(
        self, form: ParameterForm, key: str, schema: Any, depth: int = 0
    ) -> Reading[tuple[str, bool]]:
        """Reads a value of JSON, elements or text. Returns it as JSON and whether it is complete; a text that is cut
        off keeps its beginning."""
        if depth > _MOST_NESTED:
            raise NoMatchError
        members: list[tuple[str, str]] = []
        types = types_of(schema)
        while True:
            text, whole = yield from self._until(form.head)
            if not whole:
                started = json.dumps(text, ensure_ascii=False)[:-1] if "string" in types else text
                return started if text and not members else "", False
            if (yield from self._take(form.tail.replace(KEY, key).removeprefix(form.head))):
                break
            name, whole = yield from self._until(form.separator_start)
            value, whole = (
                (yield from self._element(form, name, _within(schema, name), depth + 1))
                if whole
                else ("", False)
            )
            if not whole:
                return "", False
            members.append((name, value))
        if not members and (text.strip() or "string" in types):
            return as_json(text, types), True
        if "array" in types and all(name == form.item for name, _ in members):
            return f"[{', '.join(value for _, value in members)}]", True
        pairs = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in members)
        return f"{{{', '.join(pairs)}}}", True

    def _quoted(self, form: ParameterForm, give: Callable[[str], None]) -> Reading[None]:
        """Reads a quoted string, or another value, which ends where it is complete."""
        if (yield from self._take(form.quote)):
            text, whole = yield from self._until(form.quote)
            string = json.dumps(text, ensure_ascii=False)
            give(string if whole else string[:-1])
        else:
            text = yield from self._whole_value()
            give(as_json(with_quotes(text, form.quote) if form.bare else text, ("object",)))
        yield from self._match(form.tail, optional=True)

    def _separator(self, form: ParameterForm) -> Reading[tuple[str, str]]:
        """Skips the separator before a value. Returns the JSON type that it tells ("": none), and its text."""
        texts = dict.fromkeys(form.separators.values())
        prefix = form.separator_start
        for text in sorted(texts, key=len, reverse=True):
            if (yield from self._take(text[len(prefix) :].strip())) or not text[len(prefix) :].strip():
                kinds = [kind for kind, each in form.separators.items() if each == text]
                return (kinds[0] if form.typed else ""), text
        raise NoMatchError

    def _until(self, mark: str) -> Reading[tuple[str, bool]]:
        """Reads up to `mark`, and skips it. Returns the text before it, and whether `mark` came."""
        searched = 0  # after `_at`, which moves where what is read is dropped
        while (found := self._text.find(mark, self._at + searched)) < 0:
            if self._closed:
                text, self._at = self._text[self._at :], len(self._text)
                return text[: len(text) - held_back(text, [mark])], False
            searched = max(0, len(self._text) - self._at - len(mark) + 1)
            yield
        text, self._at = self._text[self._at : found], found + len(mark)
        return text, True

    def _schemas(self, name: str) -> Mapping[str, Any]:
        tool = self._tools.get(name)
        given = tool.parameters.get("properties") if tool is not None else None
        return given if isinstance(given, Mapping) else {}


def _within(schema: Any, name: str) -> Any:
    """The schema of a value's property `name`, or of an array's item; {} where the schema has none."""
    if not isinstance(schema, Mapping):
        return {}
    properties = schema.get("properties")
    return properties.get(name, {}) if isinstance(properties, Mapping) else schema.get("items", {})


def _without_margin(text: str, separator: str, tail: str) -> str:
    """A value without the form's white space around it."""
    text = _CDATA.sub(r"\1", text)
    before, after = separator[len(separator.rstrip()) :], tail[: len(tail) - len(tail.lstrip())]
    return text.removeprefix(before).removesuffix(after)


def as_json(text: str, types: Sequence[str]) -> str:
    """A parameter's text as JSON: a string where its schema allows only that, else the value that it spells."""
    string = json.dumps(text, ensure_ascii=False)
    if tuple(types) == ("string",):
        return string
    value = text.strip()
    try:
        read = json.loads(value, strict=False)
    except (ValueError, RecursionError):
        try:  # some templates write Python's True and 'text'
            read = ast.literal_eval(value)
            value = json.dumps(read, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return string
    return string if isinstance(read, str) and "string" in types else value


def with_quotes(text: str, quote: str) -> str:
    """The JSON of a value whose keys have no quotes and whose strings are in `quote`."""
    parts = text.split(quote)
    keyed = [re.sub(r"([{,]\s*)([a-zA-Z0-9_.-]+)\s*:", r'\1"\2": ', part) for part in parts[::2]]
    strings = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(part for pair in itertools.zip_longest(keyed, strings, fillvalue="") for part in pair)
