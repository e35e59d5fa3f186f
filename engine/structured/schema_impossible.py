"""Removes the parts of a schema under which no value is valid.

    possible = without_impossible(nearest_schema)

llguidance leaves out an impossible alternative or optional property, unless it is a reference: an impossible definition
makes it refuse the whole schema.
"""

from collections.abc import Mapping, Set
from typing import Any

from quengine.structured.schema_dialect import Schema, with_parts, without
from quengine.structured.schema_rules import with_users

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def without_impossible(schema: Schema) -> Schema:
    """The schema, with `false` for a reference to an impossible definition; false where no value is valid."""
    if isinstance(schema, bool):
        return schema
    definitions: dict[str, Schema] = schema.get("$defs", {})
    impossible = _impossible(definitions)
    if not impossible:
        return schema
    root = _possible(without(schema, "$defs"), impossible)
    rest = {name: _possible(part, impossible) for name, part in definitions.items() if name not in impossible}
    return {**root, "$defs": rest} if isinstance(root, dict) and rest else root


def _impossible(definitions: Mapping[str, Schema]) -> set[str]:
    """The definitions under which no value is valid, by themselves or because of definitions that they refer to."""
    found = {name for name, part in definitions.items() if _possible(part, frozenset()) is False}
    return with_users(definitions, found, lambda user, found: _possible(definitions[user], found) is False)


def _possible(schema: Schema, impossible: Set[str]) -> Schema:
    """A schema without impossible parts; false where the schema is impossible itself."""
    if isinstance(schema, bool):
        return schema
    if str(schema.get("$ref", "")).rpartition("/")[2] in impossible:
        return False
    made = with_parts(schema, lambda part: _possible(part, impossible))
    if False in made.get("allOf", ()):
        return False
    if "anyOf" in made:
        made["anyOf"] = [part for part in made["anyOf"] if part is not False]
        if not made["anyOf"]:
            return False
    return _without_types(made)


def _without_types(schema: dict[str, Any]) -> Schema:
    """A schema without impossible types: objects that need an impossible key, and arrays that need such an item."""
    types: Any = schema.get("type", list(_TYPES))
    types = [types] if isinstance(types, str) else types
    lost = set[str]()
    if any(_of_key(schema, name) is False for name in schema.get("required", ())):
        lost.add("object")
    if False in schema.get("prefixItems", ())[: schema.get("minItems", 0)]:
        lost.add("array")
    rest = [each for each in types if each not in lost]
    if not rest:
        return False
    return schema if len(rest) == len(types) else {**schema, "type": rest}


def _of_key(schema: Mapping[str, Any], name: str) -> Schema:
    """The schema of a key's value, apart from patterns of keys."""
    if name in schema.get("properties", {}):
        part: Schema = schema["properties"][name]
        return part
    return (
        True if "patternProperties" in schema else bool(schema.get("additionalProperties", True) is not False)
    )
