"""Translates JSON schemas as programs write them to JSON Schema draft 2020-12, which all other parts read.

    standard = standard_schema(given)      {"type": "OBJECT", "properties": null, ...} -> {"type": "object", ...}

Besides the standard's own keywords it accepts those of drafts 4 to 7 (`definitions`, `dependencies`, arrays in `items`,
`exclusiveMinimum: true`), OpenAPI's `nullable`, types in capitals (Gemini) or as programming languages name them, and
null for an absent keyword. Keywords that describe without constraining (`title`, `default`, unknown ones) are dropped.

Subschemas that are referred to stand under `$defs` by numbers, so that no reference depends on where it stands.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from quengine.errors import EngineError, shown

Schema = dict[str, Any] | bool

_TYPES = {name: name for name in ("string", "number", "integer", "boolean", "object", "array", "null")}
_TYPES |= {"str": "string", "float": "number", "double": "number", "int": "integer", "bool": "boolean"}
_TYPES |= {"dict": "object", "list": "array", "tuple": "array", "none": "null"}
_ANY_TYPE = frozenset({"any", "type_unspecified"})
_MAX_LEVELS = 100
_MAX_SCHEMAS = 20_000
"""The grammar of more is longer than `constraint_spec.MAX_CHARACTERS`; to find that out would take seconds."""

_COUNTS = frozenset(
    {
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "minContains",
        "maxContains",
    }
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("pattern", "format")
_SCHEMAS = frozenset(
    {
        "items",
        "additionalProperties",
        "unevaluatedProperties",
        "unevaluatedItems",
        "propertyNames",
        "contains",
    }
    | {"not", "if", "then", "else"}
)
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


@dataclass(frozen=True)
class StandardSchema:
    """`schema` is draft 2020-12 and refers to nothing outside. `dropped` names the keywords that were left out."""

    schema: Schema
    dropped: tuple[str, ...] = ()


def standard_schema(given: Any) -> StandardSchema:
    """A schema as draft 2020-12.

    Raises:
        EngineError: it is no schema. The message begins with the path within it (`properties.size.type: ...`).
    """
    reader = _Reader(given)
    schema = reader.schema(given, "", 0)
    definitions = reader.definitions()
    if definitions and isinstance(schema, dict):
        schema["$defs"] = definitions
    return StandardSchema(schema, tuple(dict.fromkeys(reader.dropped)))


def without(schema: Mapping[str, Any], *keywords: str) -> dict[str, Any]:
    """A schema without some keywords."""
    return {keyword: value for keyword, value in schema.items() if keyword not in keywords}


def with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema whose direct subschemas are changed."""
    made = {**schema}
    for keyword in ("items", "additionalProperties"):
        if keyword in made:
            made[keyword] = change(made[keyword])
    for keyword in ("anyOf", "allOf", "prefixItems"):
        if keyword in made:
            made[keyword] = [change(part) for part in made[keyword]]
    for keyword in ("properties", "patternProperties", "$defs"):
        if keyword in made:
            made[keyword] = {name: change(part) for name, part in made[keyword].items()}
    return made


def conjunction(*schemas: Schema) -> Schema:
    """The schema of values that are valid under all of `schemas`."""
    parts = [schema for schema in schemas if schema is not True and schema != {}]
    if not parts:
        return {}
    return parts[0] if len(parts) == 1 else {"allOf": parts}


@dataclass
class _Reader:
    root: Any
    dropped: list[str] = field(default_factory=list)
    _schemas_read: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)  # of definitions, by their places
    _waiting: deque[tuple[str, Any]] = field(default_factory=deque)

    def definitions(self) -> dict[str, Schema]:
        """All definitions that are referred to, by number."""
        found: dict[str, Schema] = {}
        while self._waiting:
            place, given = self._waiting.popleft()
            found[str(self._numbers[place])] = self.schema(given, place, 0)
        return found

    def schema(self, given: Any, at: str, level: int) -> Schema:
        if isinstance(given, bool):
            return given
        if not isinstance(given, Mapping):
            _fail(at, given, "must be a schema: an object, true or false")
        if level > _MAX_LEVELS:
            raise EngineError(f"{_excerpt(at)}: nested too deeply, a schema has at most {_MAX_LEVELS} levels")
        self._schemas_read += 1
        if self._schemas_read > _MAX_SCHEMAS:
            raise EngineError(f"more than the {_MAX_SCHEMAS} schemas within it that are accepted")
        made: dict[str, Any] = {}
        for keyword, value in given.items():
            if value is not None or keyword in ("const", "properties"):
                self._take(made, keyword, value, given, f"{at}.{keyword}" if at else str(keyword), level)
        if given.get("nullable") is True:
            made = _with_null(made)
        return made

    def _take(
        self, made: dict[str, Any], keyword: str, value: Any, given: Mapping[str, Any], at: str, level: int
    ) -> None:
        """Adds one keyword, translated, to `made`."""
        if keyword == "type":
            self._type(made, value, at)
        elif keyword in _COUNTS:
            made[keyword] = self._count(value, at)
        elif keyword in _NUMBERS:
            self._number(made, keyword, value, given, at)
        elif keyword in _TEXTS:
            made[keyword] = value if isinstance(value, str) else _fail(at, value, "must be text")
        elif keyword == "uniqueItems":
            made[keyword] = value if isinstance(value, bool) else _fail(at, value, "must be true or false")
        elif keyword == "const":
            made[keyword] = self._value(value, at)
        elif keyword == "enum":
            values = value if isinstance(value, list | tuple) else _fail(at, value, "must be an array")
            made[keyword] = self._value(list(values), at)
        elif keyword == "required":
            if not isinstance(value, bool):  # draft 3 has it within a property
                made[keyword] = self._names(value, at)
        elif keyword in _REFERENCES:
            self._reference(made, value, at)
        else:
            self._applicator(made, keyword, value, given, at, level)

    def _applicator(
        self, made: dict[str, Any], keyword: str, value: Any, given: Mapping[str, Any], at: str, level: int
    ) -> None:
        """Keywords whose values are schemas."""
        if keyword == "items" and isinstance(value, list | tuple):
            made["prefixItems"] = self._schemas(value, at, level)
            if given.get("additionalItems") is not None:
                made["items"] = self.schema(given["additionalItems"], f"{at[:-5]}additionalItems", level + 1)
        elif keyword in _SCHEMAS:
            made[keyword] = self.schema(value, at, level + 1)
        elif keyword in _LISTS_OF_SCHEMAS:
            if parts := self._schemas(value, at, level):
                made[keyword] = parts
        elif keyword in _NAMED_SCHEMAS:
            named = self._named({} if value is None else value, at, level)
            made[keyword] = {**made.get(keyword, {}), **named}
        elif keyword == "dependentRequired":
            names = {
                name: self._names(each, f"{at}.{name}") for name, each in self._object(value, at).items()
            }
            made[keyword] = {**made.get(keyword, {}), **names}
        elif keyword == "dependencies":
            for name, each in self._object(value, at).items():
                if isinstance(each, list | tuple):
                    made.setdefault("dependentRequired", {})[name] = self._names(each, f"{at}.{name}")
                else:
                    part = self.schema(each, f"{at}.{name}", level + 1)
                    made.setdefault("dependentSchemas", {})[name] = part

    def _type(self, made: dict[str, Any], value: Any, at: str) -> None:
        named = list(value) if isinstance(value, list | tuple) else [value]
        types = []
        for each in named:
            name = each.lower() if isinstance(each, str) else None
            if name in _ANY_TYPE:
                return
            if name not in _TYPES:
                _fail(at, each, "must be string, number, integer, boolean, object, array or null")
            types.append(_TYPES[name])
        types = list(dict.fromkeys(types))
        if types:
            made["type"] = types[0] if len(types) == 1 else types

    def _count(self, value: Any, at: str) -> int:
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not whole or value < 0:
            _fail(at, value, "must be a whole number of at least 0")
        return int(value)

    def _number(
        self, made: dict[str, Any], keyword: str, value: Any, given: Mapping[str, Any], at: str
    ) -> None:
        bound = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}.get(keyword)
        if bound is not None and isinstance(value, bool):  # draft 4: whether the other bound is one itself
            if value and isinstance(given.get(bound), int | float):
                made[keyword] = given[bound]
            return
        finite = (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(_float(value))
        )
        if not finite:
            _fail(at, value, "must be a number")
        if keyword == "multipleOf" and value <= 0:
            if value == 0:
                _fail(at, value, "must be above 0")
            value = abs(value)
        made[keyword] = value

    def _value(self, value: Any, at: str, level: int = 0) -> Any:
        """A value that is JSON."""
        if level > _MAX_LEVELS:
            raise EngineError(f"{_excerpt(at)}: nested too deeply, a value has at most {_MAX_LEVELS} levels")
        if isinstance(value, Mapping):
            return {str(key): self._value(each, at, level + 1) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(each, at, level + 1) for each in value]
        if not isinstance(value, str | int | float | None) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            _fail(at, value, "is no JSON value")
        return value

    def _names(self, value: Any, at: str) -> list[str]:
        names = value if isinstance(value, list | tuple) else [None]
        if not all(isinstance(name, str) for name in names):
            _fail(at, value, "must be an array of names")
        return list(dict.fromkeys(names))

    def _object(self, value: Any, at: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            _fail(at, value, "must be an object")
        return value

    def _schemas(self, value: Any, at: str, level: int) -> list[Schema]:
        if not isinstance(value, list | tuple):
            _fail(at, value, "must be an array of schemas")
        return [self.schema(each, f"{at}[{n}]", level + 1) for n, each in enumerate(value)]

    def _named(self, value: Any, at: str, level: int) -> dict[str, Schema]:
        parts = self._object(value, at).items()
        return {
            str(name): True if each is None else self.schema(each, f"{at}.{name}", level + 1)
            for name, each in parts
        }

    # --- references

    def _reference(self, made: dict[str, Any], value: Any, at: str) -> None:
        if not isinstance(value, str):
            _fail(at, value, "must be text")
        target = self._target(value, at)
        if target is None:
            self.dropped.append(f"{_excerpt(at)} (of another document)")
            return
        place, given = target
        if place not in self._numbers:
            self._numbers[place] = len(self._numbers)
            self._waiting.append((place, given))
        reference = f"#/$defs/{self._numbers[place]}"
        if "$ref" in made:
            made["allOf"] = [*made.get("allOf", []), {"$ref": reference}]
        else:
            made["$ref"] = reference

    def _target(self, reference: str, at: str) -> tuple[str, Any] | None:
        """The place to which a reference leads, and the schema there; None for another document."""
        document, fragment = urldefrag(urljoin(self._base, reference))
        if document in ("", self._base):
            place, found = "", self.root
        elif document in self._identified:
            place, found = self._identified[document]
        else:
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            named = self._identified.get(f"#{fragment}")
            return named or _fail(at, reference, "is no part of the schema")
        for step in fragment.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list | tuple) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                _fail(at, reference, "is no part of the schema")
            place = f"{place}.{key}" if place else key
        return place, found

    @property
    def _base(self) -> str:
        given = self.root.get("$id", self.root.get("id")) if isinstance(self.root, Mapping) else None
        return urldefrag(given)[0] if isinstance(given, str) else ""

    @property
    def _identified(self) -> dict[str, tuple[str, Any]]:
        """Subschemas with names of their own: addresses (`$id`), and anchors after a `#`."""
        if self._anchors is None:
            self._anchors = {}
            self._identify(self.root, "", 0)
        return self._anchors

    _anchors: dict[str, tuple[str, Any]] | None = None

    def _identify(self, given: Any, at: str, level: int) -> None:
        if level > _MAX_LEVELS or self._anchors is None:
            return
        if isinstance(given, list | tuple):
            for n, each in enumerate(given):
                self._identify(each, f"{at}[{n}]", level + 1)
        elif isinstance(given, Mapping):
            for keyword, mark in (("$anchor", "#"), ("$dynamicAnchor", "#"), ("$id", ""), ("id", "")):
                name = given.get(keyword)
                if isinstance(name, str):
                    whole = mark + name if mark or name.startswith("#") else urljoin(self._base, name)
                    self._anchors.setdefault(whole, (at, given))
            for key, each in given.items():
                if key not in ("enum", "const", "default", "examples"):
                    self._identify(each, f"{at}.{key}" if at else str(key), level + 1)


def _fail(at: str, value: Any, problem: str) -> NoReturn:
    raise EngineError(f"{_excerpt(at)}: {shown(value)} {problem}" if at else f"{shown(value)} {problem}")


def _excerpt(at: str) -> str:
    return at if len(at) <= 200 else f"{at[:100]}...{at[-100:]}"


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that also allows null, as OpenAPI's `nullable` does."""
    if schema == {}:
        return schema
    if "type" in schema and not {"const", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        made = {**schema, "type": list(dict.fromkeys([*types, "null"]))}
        if "enum" in made and None not in made["enum"]:
            made["enum"] = [*made["enum"], None]
        return made
    return {"anyOf": [schema, {"type": "null"}]}
