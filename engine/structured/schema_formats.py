"""`format` in a JSON schema: the formats that are enforced, and schemas without the others.

A format that a validator has no grammar for is an annotation (JSON Schema 2020-12, Validation, section 7.2.1), and
programs write many of their own: `password`, `path`, `binary` (pydantic), `int32`, `double` (OpenAPI).
"""

from typing import Any

ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Those that llguidance has a grammar for."""

_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are no schemas."""
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are schemas by name."""


def without_annotated_formats(schema: Any) -> Any:
    """A copy of a schema, or of a list of schemas, without formats that are not enforced.

    Raises:
        RecursionError: it has too many levels.
    """
    if isinstance(schema, list | tuple):
        return [without_annotated_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: value if keyword in _VALUES else _kept(keyword, value)
        for keyword, value in schema.items()
        if keyword != "format" or not isinstance(value, str) or value in ENFORCED_FORMATS
    }


def _kept(keyword: str, value: Any) -> Any:
    if keyword in _NAMED and isinstance(value, dict):
        return {name: without_annotated_formats(each) for name, each in value.items()}
    return without_annotated_formats(value)
