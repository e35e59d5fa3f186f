"""Simpler schemas in place of one that the grammar's compiler refuses. Each allows all that the one before allows.

The compiler refuses a pattern with look-ahead, overlapping patterns of keys, and joined schemas with too many
combinations. The grammar then enforces what remains, and the check of the finished text (`schema_check`) the rest.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from quengine.structured.schema_dialect import Schema, with_parts, without
from quengine.structured.schema_rules import plain_grammar

_INLINE = re.compile(r"%json ")
_STRUCTURE = frozenset(
    {
        "type",
        "const",
        "enum",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "$ref",
    }
    | {"anyOf", "$defs", "x-guidance"}
)
_VALUES = ("const", "enum")
_LEFT_OUT = ("patterns that are no regular expressions here", "all but the structure", "all but the type")


def simpler_grammars(lark: str) -> Iterator[tuple[str, str]]:
    """Lark grammars with simpler and simpler schemas, each with a description of what it leaves out."""
    last = plain_grammar(lark)
    if last != lark:
        yield last, "large numbers"
    parts = _parts(last)
    if len(parts) == 1:
        return
    for simplify, left_out in zip((_with_known_patterns, _structure, _type_alone), _LEFT_OUT, strict=True):
        made = "".join(
            part if isinstance(part, str) else f"%json {json.dumps(simplify(part))}" for part in parts
        )
        if made != last:
            last = made
            yield made, left_out


def _parts(lark: str) -> list[str | dict[str, Any]]:
    """A grammar's text, and the schemas in it."""
    parts: list[str | dict[str, Any]] = []
    at, decoder = 0, json.JSONDecoder()
    while found := _INLINE.search(lark, at):
        schema, end = decoder.raw_decode(lark, found.end())
        parts += [lark[at : found.start()], schema]
        at = end
    return [*parts, lark[at:]]


def _with_known_patterns(schema: Any) -> Any:
    def kept(part: dict[str, Any]) -> dict[str, Any]:
        made = part
        if "pattern" in part and not _compiles(part["pattern"]):
            made = without(made, "pattern")
        keys = part.get("patternProperties", {})
        if len(keys) > 1 or not all(map(_compiles, keys)):
            made = {**without(made, "patternProperties"), "additionalProperties": True}
        return made

    return _each(schema, kept)


def _structure(schema: Any) -> Any:
    def kept(part: dict[str, Any]) -> dict[str, Any]:
        made = {keyword: value for keyword, value in part.items() if keyword in _STRUCTURE}
        if "patternProperties" in part:
            made["additionalProperties"] = True
        if "allOf" in part and not {"properties", "$ref", "anyOf", *_VALUES} & made.keys():
            first = part["allOf"][0]
            made |= kept(first) if isinstance(first, dict) else {}
        return made

    return _each(schema, kept)


def _type_alone(schema: dict[str, Any]) -> dict[str, Any]:
    return {keyword: schema[keyword] for keyword in ("type", "x-guidance") if keyword in schema}


def _each(schema: Any, change: Any) -> Any:
    """Applies `change` to a schema, and then to each of its subschemas."""
    if not isinstance(schema, dict):
        return schema
    return with_parts(change(schema), lambda part: _each(part, change))


@lru_cache(maxsize=1000)
def _compiles(pattern: str) -> bool:
    from llguidance import LLMatcher

    schema: Schema = {"type": "string", "pattern": pattern}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
