"""The keys that the schemas of one value know: a schema's own ones, and those of all schemas of the same value.

    known = KnownKeys(definitions)
    known.of(schema)      with those of `allOf`, `anyOf`, `$ref`, `if` ...
    known.own(schema)     of `properties`, `required` and the like alone

A definition's keys are found once, those that it refers to first, so that a chain of a thousand takes no longer than
its length. Definitions that refer to each other know the same keys.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quengine.structured.schema_dialect import Schema

_MOST_TOGETHER = 50
"""If more definitions than this refer to each other, the keys of all of them are in one order."""


@dataclass(frozen=True)
class Keys:
    """The keys that the schemas of one value know, in their order. `open`: one of the schemas allows others."""

    names: tuple[str, ...] = ()
    patterns: frozenset[str] = frozenset()
    open: bool = False

    @classmethod
    def all_of(cls, parts: Iterable["Keys"]) -> "Keys":
        every = list(parts)
        names = tuple(dict.fromkeys(name for keys in every for name in keys.names))
        patterns = frozenset().union(*(keys.patterns for keys in every))
        return cls(names, patterns, any(keys.open for keys in every))


class Absent(dict[str, Any]):
    """A schema in the compiler's form that excludes a key. Its names do not count as known keys."""


class KnownKeys:
    """See the file's docstring. `given` are the definitions by name."""

    def __init__(self, given: Mapping[str, Schema]) -> None:
        self._given = given
        self._found: dict[str, Keys] = {}
        for together in _in_order({name: list(_referred(part)) for name, part in given.items()}):
            for name in together[:_MOST_TOGETHER]:
                self._found[name] = self._of(given[name], {name}, frozenset(together))
            self._found |= dict.fromkeys(together[_MOST_TOGETHER:], self._found[together[0]])

    def of(self, schema: Schema) -> Keys:
        """The keys that a schema and all others of the same value know."""
        return self._of(schema, set(), frozenset())

    def own(self, schema: Mapping[str, Any]) -> Keys:
        """The keys that a schema's own keywords know."""
        dependent = schema.get("dependentRequired", {})
        names = [*schema.get("properties", ()), *schema.get("required", ()), *dependent]
        names += [name for each in dependent.values() for name in each]
        opened = any(
            schema.get(keyword, False) is not False
            for keyword in ("additionalProperties", "unevaluatedProperties")
        )
        return Keys(tuple(dict.fromkeys(names)), frozenset(schema.get("patternProperties", ())), opened)

    def _of(self, schema: Schema, seen: set[str], together: frozenset[str]) -> Keys:
        """As `of`. Definitions in `together` are followed, unless they are in `seen` and so counted already."""
        if isinstance(schema, (bool, Absent)):
            return Keys()
        parts = [self.own(schema)] + [self._of(part, seen, together) for part in _applied(schema)]
        name = _name(schema)
        if name in together and name not in seen:
            seen.add(name)
            parts.append(self._of(self._given[name], seen, together))
        elif name and name not in together:
            parts.append(self._found[name])
        return Keys.all_of(parts) if len(parts) > 1 else parts[0]


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _applied(schema: Mapping[str, Any]) -> Iterator[Schema]:
    """The schemas within one that apply to the same value."""
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from schema.get(keyword, ())
    yield from (schema[keyword] for keyword in ("if", "then", "else") if keyword in schema)
    yield from schema.get("dependentSchemas", {}).values()


def _referred(schema: Schema) -> Iterator[str]:
    """The definitions that apply to the same value as a schema."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, bool):
            waiting += _applied(part)
            if name := _name(part):
                yield name


def _in_order(references: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """The groups of names that refer to each other, each after the groups that it refers to (Tarjan, "Depth-first
    search and linear graph algorithms", 1972, without recursion)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_names, closed = list[str](), set[str]()
    for root in references:
        path = [] if root in index else [(root, iter(references[root]))]
        while path:
            name, others = path[-1]
            if name not in index:
                index[name] = lowest[name] = len(index)
                open_names.append(name)
            for other in others:
                if other not in index:
                    path.append((other, iter(references[other])))
                    break
                if other not in closed:
                    lowest[name] = min(lowest[name], index[other])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[name])
                if lowest[name] == index[name]:
                    together = [name]
                    while (last := open_names.pop()) != name:
                        together.append(last)
                    closed.update(together)
                    yield together
