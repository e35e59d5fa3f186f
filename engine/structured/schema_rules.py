"""Writes a schema as an expression of a Lark grammar: `%json`, and rules around the numbers that `%json` cannot have.

    expression = lark_expression(nearest_schema)
    expression.text        %json {...}, or %lark {...} where a node has EXACT (`schema_numbers`)
    expression.complete    False: an exact number stands where no rule can be written, and its type alone is held

Only parts that lead to an exact number are written as rules: objects by their properties, arrays, alternatives and
references. All else stays a schema that llguidance compiles. Rules and schemas have the same white space.

The second line of the rules is a comment with the schema without exact numbers (`plain_grammar`), to use where the
rules do not compile: llguidance drops impossible parts of a schema, but refuses a rule that is impossible.
"""

import json
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from quengine.structured.schema_dialect import Schema, without
from quengine.structured.schema_numbers import EXACT

# Between the parts of a JSON text: nothing, a space, or a new line with its indentation. JSON allows any amount, and
# a model that likes spaces then never ends.
_WHITESPACE = r"( |\r?\n[ \t]{0,64})"
_STRING = r'"(?:[^"\\\x00-\x1F\x7F]|\\["\\bfnrt]|\\u[0-9a-fA-F]{4})*"'

_MAX_CHARACTERS = 64 * 1024
_MAX_ITEMS = 1000
_PLAIN = re.compile(r"%lark \{\n// (\{.*\})\n(?:.*\n)*?\}")

_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
_OF_OTHERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}) | {
    "minLength",
    "maxLength",
    "pattern",
    "format",
}
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(frozen=True)
class LarkExpression:
    """An expression of a Lark grammar; see the file's docstring."""

    text: str
    complete: bool = True


def lark_expression(schema: Schema) -> LarkExpression:
    """The expression of a schema that `schema_grammar` made."""
    given = {} if isinstance(schema, bool) else schema
    definitions, root = given.get("$defs", {}), without(given, "$defs")
    names, marked = _with_exact(definitions), set[int]()
    if not _mark_exact(root, names, marked):
        return LarkExpression(_json(given))
    for part in definitions.values():
        _mark_exact(part, names, marked)
    writer = _Writer(definitions, names, marked)
    start = writer.expression(root) or writer.expression(writer.inexact(root))
    writer.write_definitions()
    plain = _json({**_inexact(root), **_defined(definitions)})
    head = [
        f"// {plain.removeprefix(_JSON)}",
        '%llguidance {"ignore_once": true}',
        f"%ignore /{_WHITESPACE}/",
    ]
    text = "\n".join(["%lark {", *head, f"start: {start}", *writer.rules, "}"])
    return (
        LarkExpression(plain, False) if len(text) > _MAX_CHARACTERS else LarkExpression(text, writer.complete)
    )


def plain_grammar(lark: str) -> str:
    """A grammar whose schemas have no exact numbers."""
    return _PLAIN.sub(lambda found: _JSON + found[1], lark)


_JSON = "%json "


def _json(schema: Mapping[str, Any]) -> str:
    return _JSON + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})


def _quoted(text: str) -> str:
    """A literal of Lark, in which % is escaped so that nothing looks like the beginning of a schema."""
    return json.dumps(text).replace("%", "\\u0025")


def _parts(schema: Schema) -> list[Schema]:
    """The schemas within one."""
    if isinstance(schema, bool):
        return []
    parts = [part for key in ("anyOf", "allOf", "prefixItems") for part in schema.get(key, ())]
    parts += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return parts + [
        part for key in ("properties", "patternProperties") for part in schema.get(key, {}).values()
    ]


def references(schema: Schema) -> set[str]:
    """The definitions that a schema and those within it refer to."""
    found, waiting = set[str](), [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, bool) and "$ref" in part:
            found.add(_name(part))
        waiting += _parts(part)
    return found


def with_users(
    definitions: Mapping[str, Schema], found: set[str], joins: Callable[[str, Set[str]], bool]
) -> set[str]:
    """`found`, with the definitions that refer to one of them, directly or not, and for which `joins` holds. `joins` is
    given a definition's name and all names found so far."""
    users: dict[str, list[str]] = {}
    for user, part in definitions.items() if found else ():
        for name in references(part):
            users.setdefault(name, []).append(user)
    waiting = [*found]
    while waiting:
        others = [user for user in users.get(waiting.pop(), ()) if user not in found]
        more = {user for user in others if joins(user, found)}
        found |= more
        waiting += more
    return found


def _mark_exact(schema: Schema, names: Set[str], found: set[int]) -> bool:
    """Whether a schema or one within it has EXACT, or refers to one of `names`; `found` takes the `id` of each."""
    if isinstance(schema, bool):
        return False
    within = [_mark_exact(part, names, found) for part in _parts(schema)]
    if any(within) or EXACT in schema or _name(schema) in names:
        found.add(id(schema))
    return id(schema) in found


def _name(schema: Mapping[str, Any]) -> str:
    """The definition that a schema refers to; "" where it refers to none."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _with_exact(definitions: Mapping[str, Schema]) -> frozenset[str]:
    """The definitions that have exact numbers, within them or in those that they refer to."""
    found = {name for name, part in definitions.items() if _mark_exact(part, frozenset(), set())}
    return frozenset(with_users(definitions, found, lambda _user, _found: True))


def _inexact(schema: Schema, renamed: Set[str] = frozenset()) -> Any:
    """A schema without EXACT. References to definitions in `renamed` get the suffix `-inexact`."""
    if isinstance(schema, bool):
        return schema
    made = without(schema, EXACT)
    for key in ("anyOf", "allOf", "prefixItems"):
        if key in made:
            made = {**made, key: [_inexact(part, renamed) for part in made[key]]}
    for key in ("items", "additionalProperties"):
        if key in made:
            made = {**made, key: _inexact(made[key], renamed)}
    for key in ("properties", "patternProperties"):
        if key in made:
            made = {**made, key: {name: _inexact(part, renamed) for name, part in made[key].items()}}
    if _name(made) in renamed:
        made = {**made, "$ref": made["$ref"] + "-inexact"}
    return made


def _defined(definitions: Mapping[str, Schema]) -> dict[str, Any]:
    """`$defs` without exact numbers."""
    return {"$defs": {name: _inexact(part) for name, part in definitions.items()}} if definitions else {}


@dataclass
class _Writer:
    definitions: Mapping[str, Schema]
    exact: Set[str]
    marked: Set[int]
    rules: list[str] = field(default_factory=list)
    complete: bool = True
    _names: dict[str, str] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)

    def expression(self, schema: Schema) -> str | None:
        """The expression of a schema; None where no value is valid under it."""
        if schema is False:
            return None
        if isinstance(schema, bool) or id(schema) not in self.marked:
            return self._schema({} if isinstance(schema, bool) else schema)
        if EXACT in schema and schema.keys() <= {"type", EXACT}:
            return self._named("N", f"/{schema[EXACT]}/")
        if schema.keys() == {"anyOf"}:
            return self._either([self.expression(part) for part in schema["anyOf"]])
        if schema.keys() == {"allOf"} and len(schema["allOf"]) == 1:
            return self.expression(schema["allOf"][0])
        if schema.keys() == {"$ref"}:
            return self._reference(_name(schema))
        if schema.keys() <= _OF_ARRAYS | _OF_OBJECTS | _OF_OTHERS | {"type"}:
            return self._by_type(schema)
        return self.expression(self.inexact(schema))

    def write_definitions(self) -> None:
        """Write the rules of all definitions that rules refer to."""
        while self._waiting:
            name = self._waiting.pop()
            part = self.definitions[name]
            made = self.expression(part) or self.expression(self.inexact(part))
            self.rules.append(f"d_{name}: {made}")

    def inexact(self, schema: Schema) -> Schema:
        """A schema without exact numbers, which allows more."""
        self.complete = False
        made: Schema = _inexact(schema, self.exact)
        return made

    # --- the parts

    def _schema(self, schema: dict[str, Any]) -> str:
        """A schema that llguidance compiles, with the definitions that it refers to."""
        needed, waiting = dict[str, Schema](), sorted(references(schema))
        while waiting:
            if (name := waiting.pop()) in needed:
                continue
            given = name.removesuffix("-inexact")
            part = self.definitions[given]
            needed[name] = part if given == name else _inexact(part, self.exact)
            waiting += sorted(references(needed[name]))
        definitions = {"$defs": dict(sorted(needed.items()))} if needed else {}
        return self._named("s", _json({**schema, **definitions}))

    def _named(self, kind: str, text: str) -> str:
        """The name of a rule, or of a terminal (`N`, `K`), whose text is `text`."""
        if text not in self._names:
            self._names[text] = f"{kind}{len(self._names)}"
            self.rules.append(f"{self._names[text]}: {text}")
        return self._names[text]

    def _either(self, parts: list[str | None]) -> str | None:
        possible = list(dict.fromkeys(part for part in parts if part is not None))
        return f"({' | '.join(possible)})" if possible else None

    def _reference(self, name: str) -> str:
        if name not in self._known:
            self._known.add(name)
            self._waiting.append(name)
        return f"d_{name}"

    def _by_type(self, schema: dict[str, Any]) -> str | None:
        if max(schema.get("minItems", 0), schema.get("maxItems", 0)) > _MAX_ITEMS:
            return self.expression(self.inexact(schema))
        given = schema.get("type", list(_TYPES))
        types = [given] if isinstance(given, str) else list(given)
        parts: list[str | None] = []
        if "array" in types:
            parts.append(self._array(schema))
        if "object" in types:
            parts.append(self._object(schema))
        if rest := [each for each in types if each not in ("array", "object")]:
            others = {key: schema[key] for key in schema if key in _OF_OTHERS}
            parts.append(self._schema({"type": rest, **others}))
        return self._either(parts)

    def _array(self, schema: Mapping[str, Any]) -> str | None:
        prefix, items = schema.get("prefixItems", []), self.expression(schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        parts: list[str] = []
        for part in prefix[:most]:
            made = self.expression(part)
            if made is None:
                items = None
                break
            parts.append(made)
        if items is None or (most is not None and most <= len(parts)):
            items, most = None, len(parts)
        if most is not None and least > most:
            return None
        rest = "" if items is None else self._more(items, max(least - len(parts), 0), most, len(parts))
        for n in reversed(range(len(parts))):
            rest = f'"," {parts[n]} {rest}' if n else f"{parts[n]} {rest}"
            rest = rest if n < least else f"{self._named('t', rest)}?"
        return self._named("a", f'"[" {rest} "]"')

    @staticmethod
    def _more(item: str, least: int, most: int | None, before: int) -> str:
        """`least` further items or more, up to `most` in all with the `before` that come first."""
        count = None if most is None else most - before
        if before:
            return f'("," {item}){_times(least, count)}'
        others = f'{item} ("," {item}){_times(max(least - 1, 0), None if count is None else count - 1)}'
        return others if least else f"({others})?"

    def _object(self, schema: Mapping[str, Any]) -> str | None:
        rest, properties = schema.get("additionalProperties", True), schema.get("properties", {})
        required = dict.fromkeys(schema.get("required", ()))
        named = {**properties, **{name: rest for name in required if name not in properties}}
        members: list[tuple[str, bool]] = []
        for name, part in named.items():
            value = self.expression(part)
            if value is None and name in required:
                return None
            if value is not None:
                members.append(
                    (f'{_quoted(json.dumps(name, ensure_ascii=False))} ":" {value}', name in required)
                )
        others, value = "", self.expression(rest)
        if value is not None:
            taken = " | ".join(_quoted(json.dumps(name, ensure_ascii=False)) for name in named)
            key = self._named("K", f"/{_STRING}/" + (f" & ~({taken})" if taken else ""))
            others = f'{key} ":" {value}'
        return self._named("o", f'"{{" {self._members(members, others)} "}}"')

    def _members(self, members: list[tuple[str, bool]], others: str) -> str:
        """Members in their order, with commas between those that are present, and then any number of `others`."""
        after = f'("," {others})*' if others else ""
        first = f"({others} {after})?" if others else ""
        for member, needed in reversed(members):
            rest = self._named("m", after) if after else ""
            first = f"{member} {rest}" if needed else self._first(f"{member} {rest}", first)
            after = f'"," {member} {rest}' if needed else f'("," {member})? {rest}'
        return first

    def _first(self, with_member: str, without_member: str) -> str:
        if not without_member:
            return f"({with_member})?"
        return f"({with_member} | {self._named('f', without_member)})"


def _times(least: int, most: int | None) -> str:
    if most is None:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{most}}}"
