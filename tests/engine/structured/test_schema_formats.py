"""Formats of a JSON schema: enforced where there is a grammar, annotations else."""

from typing import Any

import pytest
from llguidance import LLMatcher
from pydantic import TypeAdapter

from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.schema_formats import ENFORCED_FORMATS, without_annotated_formats

OTHERS = (
    "password",
    "path",
    "binary",
    "byte",
    "int32",
    "double",
    "uri-reference",
    "regex",
    "uuid4",
    "nope",
    "",
)


def error(schema: dict[str, Any]) -> str:
    return LLMatcher.validate_grammar(ConstraintSpec.json_schema(schema).lark)


@pytest.mark.parametrize("name", sorted(ENFORCED_FORMATS))
def test_a_format_with_a_grammar_is_enforced(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert without_annotated_formats(schema) == schema and not error(schema)
    assert "Unknown format" not in LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


@pytest.mark.parametrize("name", OTHERS)
def test_a_format_without_one_is_an_annotation(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert "Unknown format" in LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    assert not error(schema)


def test_formats_are_found_where_schemas_stand_and_nowhere_else() -> None:
    note = {"type": "string", "format": "path"}
    plain = {"type": "string"}
    value = {"format": "path"}
    given = {
        "type": "object",
        "properties": {
            "format": note,
            "properties": {"properties": {"enum": note}},
            "kept": {"const": value},
        },
        "$defs": {"format": {"anyOf": [note, {"format": "date"}]}},
        "items": {"prefixItems": [note], "additionalProperties": note},
        "default": value,
        "examples": [value],
        "format": 3,
    }
    assert without_annotated_formats(given) == {
        "type": "object",
        "properties": {
            "format": plain,
            "properties": {"properties": {"enum": plain}},
            "kept": {"const": value},
        },
        "$defs": {"format": {"anyOf": [plain, {"format": "date"}]}},
        "items": {"prefixItems": [plain], "additionalProperties": plain},
        "default": value,
        "examples": [value],
        "format": 3,
    }
    assert given["items"]["prefixItems"] == [note], "the schema that was given stays"


def test_schemas_of_pydantic_with_its_own_formats_compile() -> None:
    from datetime import timedelta
    from pathlib import Path
    from uuid import UUID

    from pydantic import BaseModel, SecretStr

    class Account(BaseModel):
        home: Path
        key: SecretStr
        id: UUID
        idle: timedelta
        data: bytes

    assert not error(TypeAdapter(Account).json_schema())
