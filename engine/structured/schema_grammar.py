"""The schema nearest to a standard one that the grammar's compiler accepts; it constrains a text token by token.

    nearest = grammar_schema(standard_schema(given).schema)
    nearest.schema      for `schema_rules`, which writes it as a grammar
    nearest.dropped     keywords of which something is left to the check of the finished text (`schema_check`)

Whatever is valid under the given schema is valid under this one, with two exceptions. Objects with `properties` are
closed unless the schema opens them: a model that may invent keys goes on inventing. And times have no leap seconds,
which programs cannot read.

Closing looks at an object as a whole, as `unevaluatedProperties: false` does: the keys are those of `properties` and
`required` here and of everything that applies to the same value (`allOf`, `anyOf`, `$ref`, `if`, ...), so that schemas
joined by `allOf` do not shut each other out. An alternative of `anyOf` has its own keys and those around it.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from quengine.structured.schema_check import (
    CHECKED_FORMATS,
    ENFORCED_FORMATS,
    FORMAT_PATTERNS,
    value_violation,
)
from quengine.structured.schema_dialect import Schema, conjunction, without
from quengine.structured.schema_impossible import without_impossible
from quengine.structured.schema_keys import Absent, Keys, KnownKeys
from quengine.structured.schema_numbers import (
    NUMERIC,
    any_of,
    exact_numbers,
    exact_values,
    is_large,
    is_nothing,
)

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_DEFINITIONS = 2000
_MAX_DEPENDENCIES = 6
"""With more, alternatives would be nested in alternatives, and each doubles the forms of an object."""
_MAX_MULTIPLE = 5000
"""A grammar of multiples has about as many states as the number is large: `multipleOf: 99999999` takes minutes."""
_MAX_NUMBER = 2**53
"""The compiler reads numbers as doubles. Larger ones are written by `schema_numbers`, or left out."""


@dataclass(frozen=True)
class GrammarSchema:
    """`schema` is for the compiler. `dropped` names keywords that it does not enforce, or only in part."""

    schema: Schema
    dropped: tuple[str, ...] = ()


def grammar_schema(standard: Schema) -> GrammarSchema:
    """The nearest schema to `standard` (`schema_dialect.standard_schema`) that can be compiled."""
    if isinstance(standard, bool):
        return GrammarSchema(standard)
    definitions = standard.get("$defs", {})
    builder = _Builder(definitions, KnownKeys(definitions))
    schema = builder.build(without(standard, "$defs"), Keys())
    if isinstance(schema, dict) and (built := builder.definitions()):
        schema = {**schema, "$defs": built}
    return GrammarSchema(without_impossible(schema), tuple(dict.fromkeys(builder.dropped)))


@dataclass(frozen=True)
class _Group:
    """Alternatives, one of which must hold for the value of the schema around them."""

    alternatives: list[Schema]
    closed: bool = True  # whether they are the user's own, and so may be closed


@dataclass
class _Builder:
    given: Mapping[str, Schema]
    known: KnownKeys
    dropped: list[str] = field(default_factory=list)
    _numbers: dict[tuple[str, Keys], int] = field(default_factory=dict)
    _waiting: deque[tuple[str, Keys]] = field(default_factory=deque)
    _within: str | None = None  # the definition whose whole schema is being built

    def definitions(self) -> dict[str, Schema]:
        found: dict[str, Schema] = {}
        while self._waiting:
            name, around = self._waiting.popleft()
            self._within = name
            found[str(self._numbers[name, around])] = self.build(self.given[name], around)
        return found

    def build(self, schema: Schema, around: Keys) -> Schema:
        """The compiler's form of a schema. Other schemas hold for its value too, and know the keys `around`."""
        if isinstance(schema, bool):
            return schema
        if (exact := self._exact(schema)) is not None:
            return exact
        own = {k: v for k, v in schema.items() if k in _PLAIN}
        self._take_not(own, schema.get("not"))
        self._take_texts_and_numbers(own)
        groups = [*self._groups(schema)]
        if (values := _finite(own)) is not None and not values:
            return False
        self._take_array(own, schema)
        if not self._take_object(own, schema, groups, around):
            return False
        combined = self._combined(groups, self.known.own(schema), around)
        first = next((k for k in schema if k in _APPLICATORS or k == "properties"), None)
        return {**own, **combined} if first == "properties" else {**combined, **own}

    # --- schemas of the same value

    def _groups(self, schema: Mapping[str, Any]) -> Iterator[_Group]:
        if "$ref" in schema and not self._leads_back(schema["$ref"]):
            yield _Group([{"$ref": schema["$ref"]}])
        yield from (_Group([part]) for part in schema.get("allOf", ()))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield _Group(schema[keyword])
        yield from self._conditions(schema)
        yield from self._dependencies(schema)

    def _leads_back(self, reference: str) -> bool:
        """Whether a reference leads back, for the same value, to the definition that contains it. Such a reference
        means nothing."""
        waiting, seen = [reference], set[str]()
        while waiting and self._within is not None:
            name = waiting.pop().rpartition("/")[2]
            if name == self._within:
                return True
            if name not in seen:
                seen.add(name)
                waiting += _references(self.given[name])
        return False

    def _conditions(self, schema: Mapping[str, Any]) -> Iterator[_Group]:
        condition = schema.get("if")
        if condition is None or not {"then", "else"} & schema.keys():
            return
        then, other = schema.get("then", True), schema.get("else", True)
        if isinstance(condition, bool):
            yield _Group([then if condition else other])
            return
        denied = _denied(condition, schema.get("properties", {}))
        if denied is None:
            self.dropped.append("if")
        otherwise = other if denied is None else conjunction({"anyOf": denied}, other)
        yield _Group([conjunction(condition, then), otherwise])

    def _dependencies(self, schema: Mapping[str, Any]) -> Iterator[_Group]:
        """The groups of `dependentRequired` and `dependentSchemas`: a key is absent, or what depends on it holds."""
        dependent: list[tuple[str, Schema]] = []
        dependent += [
            (key, {"required": names}) for key, names in schema.get("dependentRequired", {}).items()
        ]
        dependent += schema.get("dependentSchemas", {}).items()
        if len(dependent) > _MAX_DEPENDENCIES:
            self.dropped.append("dependentRequired" if "dependentRequired" in schema else "dependentSchemas")
        for key, then in dependent[:_MAX_DEPENDENCIES]:
            yield _Group([Absent({"properties": {key: False}}), conjunction({"required": [key]}, then)])

    def _combined(self, groups: list[_Group], own: Keys, around: Keys) -> dict[str, Any]:
        """The keywords for the groups. Each group allows the keys that all others know."""
        known = [self._keys_of_group(group) for group in groups]
        made: list[Schema] = []
        for n, group in enumerate(groups):
            others = Keys.all_of([around, own, *known[:n], *known[n + 1 :]])
            within, self._within = self._within, self._within if len(group.alternatives) == 1 else None
            parts = [self._alternative(part, others) for part in group.alternatives]
            self._within = within
            if any(part is True or part == {} for part in parts):
                continue
            made.append(parts[0] if len(parts) == 1 else {"anyOf": parts})
        if len(made) == 1 and isinstance(made[0], dict) and made[0].keys() <= {"$ref", "anyOf"}:
            return made[0]
        return {"allOf": made} if made else {}

    def _alternative(self, part: Schema, around: Keys) -> Schema:
        if isinstance(part, Absent):
            return dict(part)
        if not isinstance(part, dict) or part.keys() != {"$ref"}:
            return self.build(part, around)
        name = part["$ref"].rpartition("/")[2]
        if not self.known.of(part).names and not self.known.of(part).patterns:
            around = Keys()
        if len(self._numbers) > _MAX_DEFINITIONS:
            around = Keys(open=True)
        if (name, around) not in self._numbers:
            self._numbers[name, around] = len(self._numbers)
            self._waiting.append((name, around))
        return {"$ref": f"#/$defs/{self._numbers[name, around]}"}

    # --- keys

    def _keys_of_group(self, group: _Group) -> Keys:
        return Keys.all_of(map(self.known.of, group.alternatives))

    # --- keywords

    def _exact(self, schema: Mapping[str, Any]) -> Schema | None:
        """The whole schema rewritten, where its values or bounds are numbers that the compiler cannot read; else
        None."""
        values = _finite(schema)
        if values is None:
            return _exact_range(schema)
        if not any(map(is_large, values)):
            return None
        rule = json.dumps(schema)
        if '"$ref"' in rule:
            rule = json.dumps({**schema, "$defs": dict(self.given)})
        alone = schema.keys() <= {"const", "enum"}
        valid = values if alone else [each for each in values if value_violation(rule, each) is None]
        small = [each for each in valid if not is_large(each)]
        parts = ([{"enum": small}] if small else []) + exact_values(
            [each for each in valid if is_large(each)]
        )
        return any_of(parts) if parts else False

    def _take_not(self, own: dict[str, Any], denied: Schema | None) -> None:
        """`not` in terms of other keywords, where it has such a form."""
        if denied is None or denied is False:
            return
        if denied is True or denied == {}:
            own["enum"] = []
            return
        if denied.keys() == {"anyOf"}:
            for part in denied["anyOf"]:
                self._take_not(own, part)
        elif denied.keys() == {"type"}:
            types = set(_list(denied["type"]))
            if "integer" in types and "number" not in types:
                self.dropped.append("not")
                types.discard("integer")
            if "number" in types:
                types.add("integer")
            own["type"] = [each for each in _list(own.get("type", list(_TYPES))) if each not in types]
            if not own["type"]:
                own["enum"] = []
        elif denied.keys() <= {"const", "enum", "type"} and (values := _finite(own)) is not None:
            own.pop("const", None)
            own["enum"] = [each for each in values if not _contains(_finite(denied) or [], each)]
        elif denied.keys() <= {"required", "type"} and len(denied.get("required", ())) == 1:
            own["properties"] = {**own.get("properties", {}), denied["required"][0]: False}
            if "type" not in denied:  # what is no object has all keys that are required of objects
                own["type"] = [each for each in _list(own.get("type", "object")) if each == "object"]
                if not own["type"]:
                    own["enum"] = []
        else:
            self.dropped.append("not")

    def _take_texts_and_numbers(self, own: dict[str, Any]) -> None:
        name = own.pop("format", None)
        if name in FORMAT_PATTERNS:
            if "pattern" in own:
                own["allOf"] = [{"pattern": own.pop("pattern")}]
            own["pattern"] = FORMAT_PATTERNS[name]
        elif name in ENFORCED_FORMATS:
            own["format"] = name
        elif name in CHECKED_FORMATS:
            self.dropped.append(f"format {name}")
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if keyword in own and abs(own[keyword]) > _MAX_NUMBER:
                del own[keyword]
                self.dropped.append(keyword)
        if "multipleOf" in own and not _is_small_multiple(own["multipleOf"]):
            del own["multipleOf"]
            self.dropped.append("multipleOf")

    def _take_array(self, own: dict[str, Any], schema: Mapping[str, Any]) -> None:
        items, prefix = schema.get("items"), schema.get("prefixItems")
        if prefix is not None:
            own["prefixItems"] = [self._part(part) for part in prefix]
            if items is None and schema.get("unevaluatedItems") is False:
                items = False
        if items is not None:
            own["items"] = self._part(items)
        if schema.get("uniqueItems") and own.get("maxItems", 2) > 1:
            self.dropped.append("uniqueItems")
            if prefix is None and isinstance(items, dict) and (values := self._values_of(items)) is not None:
                own["maxItems"] = min(own.get("maxItems", len(values)), len(values))
        if "contains" in schema:
            least = schema.get("minContains", 1)
            own["minItems"] = max(own.get("minItems", 0), least)
            if least or "maxContains" in schema:
                self.dropped.append("contains")

    def _take_object(
        self, own: dict[str, Any], schema: Mapping[str, Any], groups: list[_Group], around: Keys
    ) -> bool:
        """The keywords of keys and their values. False where no value is valid."""
        if "properties" in own:
            own["properties"] = {name: self._part(part) for name, part in own["properties"].items()}
        if "patternProperties" in schema:
            patterns = schema["patternProperties"]
            own["patternProperties"] = {name: self._part(part) for name, part in patterns.items()}
        if "additionalProperties" in schema:
            own["additionalProperties"] = self._part(schema["additionalProperties"])
        self._take_unevaluated(own, schema, groups)
        others = Keys.all_of([around, *map(self._keys_of_group, groups)])
        self._take_property_names(own, schema, others)
        self._close(own, schema, others)
        return self._take_counts_of_properties(own, others)

    def _part(self, schema: Schema) -> Schema:
        """A schema of a value within this one."""
        within, self._within = self._within, None
        made = self._alternative(schema, Keys())
        self._within = within
        return made

    def _take_unevaluated(self, own: dict[str, Any], schema: Mapping[str, Any], groups: list[_Group]) -> None:
        rest = schema.get("unevaluatedProperties")
        if rest is None or rest is True or "additionalProperties" in own:
            return
        if rest is False:
            own.setdefault("properties", {})
        elif groups:
            self.dropped.append("unevaluatedProperties")
        else:
            own["additionalProperties"] = self._part(rest)

    def _take_property_names(self, own: dict[str, Any], schema: Mapping[str, Any], others: Keys) -> None:
        names, seen = schema.get("propertyNames"), 0
        while isinstance(names, dict) and names.keys() == {"$ref"} and seen <= len(self.given):
            names, seen = self.given[names["$ref"].rpartition("/")[2]], seen + 1
        if names is None or isinstance(names, bool):
            if names is False:
                own["maxProperties"] = 0
            return
        simple = names.keys() <= _OF_TEXTS
        if simple and (properties := own.get("properties")):
            rule = json.dumps(names)
            own["properties"] = {
                name: part if value_violation(rule, name) is None else False
                for name, part in properties.items()
            }
        rest = own.get("additionalProperties", "properties" not in schema)
        if rest is False or "patternProperties" in own:  # the schema's own names
            more = (
                others.names
                or others.patterns
                or own.get("minProperties", 0) > len(own.get("properties", {}))
            )
            if more or not simple or "patternProperties" in own:
                self.dropped.append("propertyNames")
            return
        self._open_names(own, names, rest, simple)

    def _open_names(self, own: dict[str, Any], names: Mapping[str, Any], rest: Schema, simple: bool) -> None:
        """`propertyNames` of an object that is open, its other values under `rest`."""
        values = _finite(names)
        if values is not None:
            own["properties"] = {each: rest for each in values if isinstance(each, str)} | own.get(
                "properties", {}
            )
            own["additionalProperties"] = False
            return
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        pattern = names.get("pattern", FORMAT_PATTERNS.get(names.get("format", "")))
        if pattern is None and {"minLength", "maxLength"} & names.keys():
            pattern = f"^(?s:.{{{least},{most}}})$"
        shared = rest is not True and own.get("properties")  # the pattern would hold these to `rest` too
        if pattern is None or shared or not simple:
            self.dropped.append("propertyNames")
            return
        own["patternProperties"] = {pattern: rest}
        own["additionalProperties"] = False

    def _close(self, own: dict[str, Any], schema: Mapping[str, Any], others: Keys) -> None:
        """Allows an object only the known keys, unless a keyword allows others."""
        if not {"properties", "patternProperties"} & schema.keys() and schema.get(
            "unevaluatedProperties", True
        ):
            return
        required = [name for name in own.get("required", ()) if name not in own.get("properties", {})]
        if (
            "additionalProperties" in own
            or others.open
            or schema.get("unevaluatedProperties", False) is not False
        ):
            return
        names = [*required, *others.names]
        properties = {**own.get("properties", {})}
        properties |= {name: True for name in names if name not in properties}
        patterns = {
            **dict.fromkeys(sorted(others.patterns), True),
            **own.get("patternProperties", {}),
        }
        if own.get("minProperties", 0) > len(properties) and not patterns:
            return  # there must be others
        own["properties"] = properties
        if patterns:
            own["patternProperties"] = patterns
        own["additionalProperties"] = False

    def _take_counts_of_properties(self, own: dict[str, Any], others: Keys) -> bool:
        """`minProperties` and `maxProperties`, as far as the compiler knows them. False where no value is valid."""
        least, most = own.pop("minProperties", 0), own.pop("maxProperties", None)
        properties = own.get("properties", {})
        possible = [name for name, part in properties.items() if part is not False]
        required = [name for name in own.get("required", ()) if name in properties]
        closed = own.get("additionalProperties") is False and "patternProperties" not in own
        if most is not None and most < max(least, len(set(own.get("required", ())))):
            return self._only_others(own)
        if closed and least >= len(possible) > 0:
            if least > len(possible):
                return self._only_others(own)
            own["required"] = list(dict.fromkeys([*own.get("required", ()), *possible]))
            least = 0
        if most == 0 or (most is not None and most == len(own.get("required", ()))):
            own["properties"] = {
                n: p if n in own.get("required", ()) else False for n, p in properties.items()
            }
            own.pop("patternProperties", None)
            own["additionalProperties"] = False
            least, most = (0, None) if least <= len(own.get("required", ())) else (least, most)
        if least <= len(own.get("required", ())):
            least = 0
        if closed and most is not None and most >= len(possible):
            most = None
        if not least and most is None:
            return True
        optional = len(possible) - len(required)
        simple = closed and least <= len(required) + 1 and most in (None, len(required) + 1)
        if others.names or others.patterns or (optional and not (simple and least in (0, len(required) + 1))):
            self.dropped.append("minProperties" if least else "maxProperties")
            return True
        if least > 1 and not closed:
            self.dropped.append("minProperties")  # of the same key twice, which the compiler counts as two
        own |= ({"minProperties": least} if least else {}) | (
            {"maxProperties": most} if most is not None else {}
        )
        return True

    def _only_others(self, own: dict[str, Any]) -> bool:
        """Excludes objects, which cannot have that number of keys. False where no other type is allowed."""
        types = [each for each in _list(own.get("type", list(_TYPES))) if each != "object"]
        own["type"] = types
        return bool(types)

    def _values_of(self, schema: Schema) -> list[Any] | None:
        """The values of `const` or `enum` in a schema or where it refers to; None without them."""
        for _ in range(len(self.given) + 1):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                break
            schema = self.given[schema["$ref"].rpartition("/")[2]]
        return None if isinstance(schema, bool) else _finite(schema)


_PLAIN = frozenset(
    [
        "type",
        "const",
        "enum",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minItems",
        "maxItems",
        "properties",
        "required",
        "minProperties",
        "maxProperties",
    ]
)
_OF_TEXTS = frozenset(["type", "const", "enum", "minLength", "maxLength", "pattern", "format"])
_APPLICATORS = frozenset(["$ref", "allOf", "anyOf", "oneOf", "if", "dependentRequired", "dependentSchemas"])


def _references(schema: Schema) -> list[str]:
    """The references of a schema that hold for the same value."""
    if isinstance(schema, bool):
        return []
    found = [schema["$ref"]] if "$ref" in schema else []
    return found + [name for part in schema.get("allOf", ()) for name in _references(part)]


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _finite(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of `const` and `enum`; None without them."""
    if "const" in schema:
        return [each for each in [schema["const"]] if "enum" not in schema or _contains(schema["enum"], each)]
    return schema.get("enum")


def _contains(values: Iterable[Any], value: Any) -> bool:
    """Whether one of `values` is the same JSON value: true is not 1."""
    return any(each == value and isinstance(each, bool) == isinstance(value, bool) for each in values)


def _exact_range(schema: Mapping[str, Any]) -> Schema | None:
    """The form of a schema with bounds that the compiler cannot read; None where its numbers cannot be separated from
    other values."""
    if not any(map(is_large, (schema[key] for key in NUMERIC & schema.keys()))):
        return None
    types = _list(schema.get("type", list(_TYPES)))
    rest = [each for each in types if each not in ("integer", "number")]
    others = schema.keys() - NUMERIC - {"type"}
    if len(rest) == len(types) or (others and not (set(rest) <= {"null", "boolean"} and others <= _PLAIN)):
        return None
    bounds = {key: schema[key] for key in NUMERIC & schema.keys()}
    exact = exact_numbers({"type": "number" if "number" in types else "integer", **bounds})
    if exact is None:
        return None
    parts = [] if is_nothing(exact) else [exact]
    parts += [{"type": rest}] if rest else []
    return any_of(parts) if parts else False


def _denied(condition: Mapping[str, Any], properties: Mapping[str, Any]) -> list[Schema] | None:
    """Alternatives for values that violate `condition`, where that gives one key's value, and the key has few
    values."""
    keys = condition.get("properties", {})
    if not condition.keys() <= {"properties", "required", "type"} or len(keys) != 1:
        return None
    ((name, wanted),) = keys.items()
    if isinstance(wanted, bool) or not wanted.keys() <= {"const", "enum", "type"}:
        return None
    given = properties.get(name, {})
    values = None if isinstance(given, bool) else _finite(given)
    if values is None and not isinstance(given, bool) and given.get("type") == "boolean":
        values = [True, False]
    chosen = _finite(wanted)
    required = condition.get("required", [])
    if values is None or chosen is None or not set(required) <= {name}:
        return None
    rest = [each for each in values if not _contains(chosen, each)]
    if any(map(is_large, rest)):
        return None
    denied: list[Schema] = (
        [Absent({"properties": {name: {"enum": rest}}, "required": [name]})] if rest else []
    )
    if required:
        denied.append(Absent({"properties": {name: False}}))
    return denied or [False]


def _is_small_multiple(value: float) -> bool:
    """Whether the grammar of multiples of `value` is small."""
    digits = Decimal(repr(value)).normalize().as_tuple()
    coefficient = int("".join(map(str, digits.digits)))
    return coefficient <= _MAX_MULTIPLE and isinstance(digits.exponent, int) and -9 <= digits.exponent <= 6
