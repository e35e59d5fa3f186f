"""The form of tool calls: a description of the texts around names and arguments, and the grammar that follows from it.

    OPEN call (SEPARATOR call)* CLOSE          call = HEAD name MIDDLE arguments TAIL

Arguments are a JSON object, or, with a `ParameterForm`, parameters one by one:

    HEAD key SEPARATOR value TAIL (BETWEEN ...)*

Values are JSON, or objects and arrays are such parameters again, one within the other.

`calls.probe` reads a description off renderings of a chat template; `calls.parser` parses by it.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quengine.errors import EngineError
from quengine.structured.constraint_spec import JsonExpression
from quengine.structured.schema_dialect import standard_schema
from quengine.structured.tool_calls import Tool

NAME, ID, INDEX = "\ue100", "\ue101", "\ue102"
"""Placeholders in the texts of a form: for the call's name, its id, and its number in the answer."""
SLOTS = NAME + ID + INDEX
KEY = "\ue103"
"""The placeholder of a parameter's key, in its tail."""

SEPARATED_TYPES = ("string", "integer", "number", "boolean", "object", "array")
"""The JSON types of `ParameterForm.separators`."""

_ID_CHARACTERS = "[a-zA-Z0-9_.:-]"
_FREE_TEXT = "(?s:.)*"
_BARE_RULES = """\
{p}bare: {p}quoted | /-?[0-9]+(\\.[0-9]+)?/ | "true" | "false" | "null" | {p}object | {p}list
{p}quoted: {quote} {text}
{p}object: "{{" ({p}pair ("," {p}pair)*)? "}}"
{p}list: "[" ({p}bare ("," {p}bare)*)? "]"
{p}pair: /[a-zA-Z0-9_.-]+/ ":" {p}bare"""


@dataclass(frozen=True)
class ObjectKeys:
    """The keys of a call that is one JSON object, and the texts before and after the object, in `head` and `tail`."""

    name: str
    arguments: str
    before: str
    after: str


@dataclass(frozen=True)
class ParameterForm:
    """Parameters one by one.

    Attributes:
        separators: the text between key and value, by the value's JSON type.
        quote: the quote of strings; other values then end where they are complete. "": strings have no quotes.
        bare: keys within values have no quotes, and strings within values have `quote`.
        item: the name of an array's elements, where objects and arrays are written as elements like the parameters;
            "" where they are JSON.
    """

    head: str
    separators: Mapping[str, str] = field(hash=False)
    tail: str
    between: str = ""
    quote: str = ""
    bare: bool = False
    item: str = ""

    @property
    def typed(self) -> bool:
        """Whether the text between key and value depends on the value's type."""
        return len(set(self.separators.values())) > 1

    @property
    def separator_start(self) -> str:
        """The common beginning of all separators, which ends a key."""
        return common_start(*self.separators.values()).rstrip()


@dataclass(frozen=True)
class CallForm:
    """One form of calls.

    Attributes:
        several: whether an answer may hold several calls.
        index: the number of an answer's first call, where the form counts them.
        parameters: None where arguments are a JSON object.
        text_mark: what stands before an answer's text where no call does (functionary's `all`).
        text_ends: what stands after an answer's text, with or without calls, and is no text.
        python_tag: what stands before Llama's other calls (`json_calls`).
        as_text: the template reads arguments as JSON text.
        id_length: how many letters and digits an id must have; 0 where any is taken.
        shows_tools: whether the template writes the tools of a request into the prompt.
        writes_calls: whether it writes an answer's calls; else they become text of the answer.
        takes_system: whether it takes a system message.
    """

    head: str
    middle: str
    tail: str
    open: str = ""
    separator: str = ""
    close: str = ""
    several: bool = True
    index: int = 0
    parameters: ParameterForm | None = None
    text_mark: str = ""
    text_ends: tuple[str, ...] = ()
    python_tag: str = ""
    as_text: bool = False
    id_length: int = 0
    shows_tools: bool = True
    writes_calls: bool = True
    takes_system: bool = True

    @property
    def starts_marked(self) -> bool:
        """Whether a call begins unlike text: with more than white space, brackets and quotes."""
        return bool(re.search(r"[^\[{(\"\s]", self.open + self.head.partition("{")[0]))

    @property
    def keys(self) -> ObjectKeys | None:
        """The keys of a call that is one JSON object; None where it is not."""
        if self.parameters is not None:
            return None
        for at in (found.start() for found in re.finditer("{", self.head)):
            text = f"{self.head[at:]}{NAME}{self.middle}{{}}{self.tail}"
            try:
                value, end = json.JSONDecoder().raw_decode(text.replace(INDEX, "0"))
            except ValueError:
                continue
            names = [key for key, part in value.items() if part == NAME]
            arguments = [key for key, part in value.items() if part == {}]
            if len(names) == len(arguments) == 1:
                behind = len(text) - end
                return ObjectKeys(
                    names[0], arguments[0], self.head[:at], self.tail[len(self.tail) - behind :]
                )
        return None

    def texts(self) -> Iterator[str]:
        """All texts of the form, which may contain control tokens."""
        yield from (self.open, self.head, self.middle, self.tail, self.separator, self.close)
        yield from (self.text_mark, *self.text_ends, self.python_tag)
        if self.parameters is not None:
            parts = self.parameters
            yield from (parts.head, parts.tail, parts.between, parts.quote)
            yield from self.parameters.separators.values()

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """The text of calls in an answer, given their names and arguments."""
        texts = []
        for number, (name, arguments) in enumerate(calls):
            call = f"{self.head}{NAME}{self.middle}{self._arguments(arguments)}{self.tail}"
            slots = {NAME: name, INDEX: str(self.index + number), ID: f"call{number:05d}"}
            texts.append("".join(slots.get(part, part) for part in re.split(f"([{SLOTS}])", call)))
        return f"{self.open}{self.separator.join(texts)}{self.close}"

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        form = self.parameters
        if form is None:
            return json.dumps(arguments, ensure_ascii=False)
        texts = []
        for key, value in arguments.items():
            quoted = isinstance(value, str)
            text = f"{form.quote}{value}{form.quote}" if quoted else json.dumps(value, ensure_ascii=False)
            texts.append(f"{form.head}{key}{form.separators[json_type(value)]}{text}{form.tail}")
        return form.between.join(texts)


class CallGrammar:
    """The grammar of an answer that must be calls. literal: turns a text of the form, with its control tokens, into an
    expression."""

    def __init__(self, form: CallForm, literal: Callable[[str], str]) -> None:
        self._form = form
        self._literal = literal

    def lark(self, tools: tuple[Tool, ...], several: bool) -> str:
        form = self._form
        more = f"({self._text(form.separator)} one)*" if several and form.several else ""
        behind_text = f"({self._text(form.text_ends[0])})?" if form.text_ends else ""
        start = f"start: {behind_text} {self._text(form.open)} one {more} {self._text(form.close)}"
        one = " | ".join(f"call{n}" for n in range(len(tools)))
        rules = [rule for n, tool in enumerate(tools) for rule in self._call(n, tool)]
        return "\n".join([start, f"one: {one}", *rules])

    def _call(self, number: int, tool: Tool) -> Iterator[str]:
        form, rule = self._form, f"call{number}"
        head, middle, tail = (self._text(text, tool.name) for text in (form.head, form.middle, form.tail))
        if form.parameters is None:
            arguments = arguments_expression(tool).lark
        else:
            arguments = f"{rule}_arguments"
            yield from self._parameters(f"{rule}_", tool, form.parameters)
            if form.middle.endswith("\n"):  # some templates end this line twice where there is no parameter
                middle += ' "\\n"?'
        yield f"{rule}: {head} {json.dumps(tool.name)} {middle} {arguments} {tail}"

    def _parameters(self, prefix: str, tool: Tool, form: ParameterForm) -> Iterator[str]:
        """The rules of parameters in the order of the schema; those that are not required may be left out.

        If the form has a text between parameters, the rule `_from{n}` is what may follow after the first one.
        """
        parameters = standard_parameters(tool)
        properties = _properties(parameters)
        required = parameters.get("required", ())
        for n, (key, schema) in enumerate(properties.items()):
            yield f"{prefix}p{n}: {self._text(form.head)} {json.dumps(key)} {self._values(key, schema, form, prefix)}"
        if form.item:
            yield f"{prefix}element: {self._any_element(form, prefix)}"
        if form.bare:
            yield from _BARE_RULES.format(
                p=prefix, quote=self._text(form.quote), text=self._free(form.quote)
            ).splitlines()
        between = self._text(form.between)
        count = len(properties)
        for n, key in enumerate(properties):
            optional = "" if key in required else "?"
            yield f"{prefix}more{n}: ({between} {prefix}p{n}){optional} {prefix}more{n + 1}"
            skip = "" if key in required else f" | {prefix}first{n + 1}"
            yield f"{prefix}first{n}: {prefix}p{n} {prefix}more{n + 1}{skip}"
        yield f'{prefix}more{count}: ""'
        yield f'{prefix}first{count}: ""'
        yield f"{prefix}arguments: {prefix}first0"

    def _values(self, key: str, schema: Any, form: ParameterForm, prefix: str) -> str:
        """Separator, value and tail. Strings are written as they are, other values as JSON or elements."""
        schema = schema if isinstance(schema, Mapping) else {}
        own = replace(form, tail=form.tail.replace(KEY, key))
        return f"({' | '.join(self._alternatives(schema, own, form, prefix))})"

    def _alternatives(
        self, schema: Mapping[str, Any], form: ParameterForm, inner: ParameterForm, prefix: str
    ) -> Iterator[str]:
        """The alternatives of `_values`. `form` has this key's tail, `inner` the tail of any key."""
        types = types_of(schema)
        tail = self._text(form.tail)
        if "string" in types:
            yield f"{self._text(form.separators['string'])} {self._string(schema, form)}"
        others = [each for each in types if each != "string"]
        if form.item:
            separator = self._text(form.separators["object"])
            nested = [each for each in others if each in ("object", "array")]
            yield from (
                f"{separator} {self._elements(schema, each, inner, prefix)} {tail}" for each in nested
            )
            others = [each for each in others if each not in nested]
        for separator in dict.fromkeys(
            form.separators.get(kind, form.separators["object"]) for kind in others
        ):
            kinds = [
                each for each in others if form.separators.get(each, form.separators["object"]) == separator
            ]
            given = {**schema, "type": kinds} if "type" in schema else {**schema}
            if isinstance(values := schema.get("enum"), list):
                given["enum"] = [each for each in values if not isinstance(each, str)]
            value = (
                f"{prefix}bare"
                if form.bare and {"object", "array"} & {*kinds}
                else JsonExpression.of(given).lark
            )
            yield f"{self._text(separator)} {value} {tail}"

    def _elements(self, schema: Mapping[str, Any], kind: str, form: ParameterForm, prefix: str) -> str:
        """The content of an array or object: the array's items, or the object's properties in their order."""
        head = self._text(form.head)
        if kind == "array":
            items = schema.get("items", {})
            return f'({head} "{form.item}" {self._values(form.item, items, form, prefix)})*'
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return f"{prefix}element*"
        required = schema.get("required", ())
        return " ".join(
            f"({head} {json.dumps(key)} {self._values(key, each, form, prefix)}){'' if key in required else '?'}"
            for key, each in properties.items()
        )

    def _any_element(self, form: ParameterForm, prefix: str) -> str:
        """An element of any name, with text or elements."""
        key, (begin, _, end) = "/[a-zA-Z0-9_.-]+/", form.tail.partition(KEY)
        within = f"{prefix}element+ {self._text(begin)} | {self._free(begin)}"
        head, separator = self._text(form.head), self._text(form.separators["object"])
        return f"{head} {key} {separator} ({within}) {key} {self._text(end)}"

    def _string(self, schema: Any, form: ParameterForm) -> str:
        """A string, and the tail that ends it. `pattern` and `format` are not enforced."""
        chosen = [schema["const"]] if "const" in schema else schema.get("enum")
        begin, end = self._text(form.quote), form.quote + form.tail
        if chosen:
            texts = [json.dumps(each) for each in chosen if isinstance(each, str)]
            return f"{begin} ({' | '.join(texts)}) {self._text(end)}"
        if "maxLength" in schema:
            length = f"(?s:.){{{int(schema.get('minLength', 0))},{int(schema['maxLength'])}}}"
            return f"{begin} /{length}/ {self._text(end)}"
        return f"{begin} {self._free(end)}"

    def _free(self, end: str) -> str:
        """Any text, and `end` after it."""
        if self._literal(end).startswith("<["):  # no text matches a control token
            return f"/{_FREE_TEXT}/ {self._text(end)}"
        return f"%lark {{\nstart: text\ntext[suffix={json.dumps(end)}]: /{_FREE_TEXT}/\n}}"

    def _text(self, text: str, name: str = "") -> str:
        """A text of the form as an expression."""
        slots = {
            NAME: json.dumps(name),
            ID: f"/{_ID_CHARACTERS}{{1,64}}/" if not self._form.id_length else "/[a-zA-Z0-9]{9}/",
            INDEX: "/[0-9]{1,3}/",
        }
        parts = re.split(f"([{NAME}{ID}{INDEX}])", text)
        return " ".join(slots.get(part) or self._literal(part) for part in parts if part)


def arguments_expression(tool: Tool) -> JsonExpression:
    """The expression of a tool's arguments. The tool's schema need not say that they are an object.

    Raises:
        EngineError: its parameters are no schema; the message begins with their place in the request.
    """
    combined = {"type", "$ref", "anyOf", "oneOf", "allOf"} & tool.parameters.keys()
    schema = tool.parameters if combined else {"type": "object", **tool.parameters}
    return JsonExpression.of(schema, tool.place)


def dropped_of(tools: Iterable[Tool]) -> tuple[str, ...]:
    """The parts of the tools' schemas that a grammar does not enforce, each after the tool's name."""
    return tuple(f"{tool.name}: {what}" for tool in tools for what in arguments_expression(tool).dropped)


def standard_parameters(tool: Tool) -> Mapping[str, Any]:
    """A tool's parameters as draft 2020-12. Raises EngineError, as `arguments_expression`."""
    try:
        schema = standard_schema(tool.parameters).schema
    except EngineError as error:
        raise EngineError(f"{tool.place}: {error}") from None
    return schema if isinstance(schema, Mapping) else {}


def _properties(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of a tool's parameters, each with the definitions that it may refer to."""
    shared = {"$defs": parameters["$defs"]} if "$defs" in parameters else {}
    given = parameters.get("properties")
    return {
        key: {**shared, **schema} if isinstance(schema, Mapping) else {}
        for key, schema in (given.items() if isinstance(given, Mapping) else ())
    }


_ALL_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


def types_of(schema: Any) -> tuple[str, ...]:
    """The JSON types that a value of this schema may have; all types where the schema names none."""
    if not isinstance(schema, Mapping):
        return _ALL_TYPES
    given = schema.get("type")
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list | tuple):
        return tuple(str(each) for each in given)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return tuple(dict.fromkeys("null" if each is None else json_type(each) for each in values))
    parts = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(parts, list) and parts:
        return tuple(dict.fromkeys(kind for part in parts for kind in types_of(part)))
    return _ALL_TYPES if "$ref" not in schema else ("object",)


def json_type(value: Any) -> str:
    """The JSON type of a value, one of SEPARATED_TYPES."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "object")


def common_start(*texts: str) -> str:
    """The longest common beginning of all texts."""
    same = itertools.takewhile(lambda found: len(set(found)) == 1, zip(*texts, strict=False))
    return "".join(found[0] for found in same)
