"""Answers as structs: their fields are written in their order, and `/openapi.json` says what they are."""

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quengine.serve.schemas.fields import REF, Schema

Count = Annotated[int, Meta(ge=0)]
Vector = Annotated[Any, Meta(extra_json_schema={"type": "array", "items": {"type": "number"}})]
"""Numbers, of which lists may be JSON already (`msgspec.Raw`)."""


class Written(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer, or a part of one. A field that is UNSET is left out."""


def written_schemas(kinds: Iterable[Any]) -> tuple[list[Schema], dict[str, Schema]]:
    """The schema of each of these types, and the components that they refer to."""
    made, components = msgspec.json.schema_components(kinds, ref_template=REF)
    return [_tidied(schema) for schema in made], {name: _tidied(each) for name, each in components.items()}


def _tidied(schema: Any) -> Any:
    """A schema from msgspec without titles and defaults. A field with a default is always written, except for UNSET,
    which schemas do not show as a default."""
    if isinstance(schema, list):
        return [_tidied(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if len(schema.get("enum", ())) == 1:
        return {"const": schema["enum"][0]}
    tidied = {
        key: _tidied(value)
        for key, value in schema.items()
        if key not in ("title", "default", "discriminator", "properties", "required")
    }
    if "properties" in schema:
        given = schema["properties"]
        written = {*schema.get("required", ()), *(name for name, each in given.items() if "default" in each)}
        tidied["required"] = [name for name in given if name in written]
        tidied["properties"] = {name: _tidied(each) for name, each in given.items()}
    return tidied
