"""Formats of a JSON schema: enforced where there is a grammar, annotations else."""

import re
from typing import Any

import pytest
from llguidance import LLMatcher
from pydantic import TypeAdapter

from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.schema_formats import CHECKED_FORMATS, ENFORCED_FORMATS, FORMAT_PATTERNS

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


@pytest.mark.parametrize("name", sorted(ENFORCED_FORMATS | FORMAT_PATTERNS.keys()))
def test_a_format_with_a_grammar_is_enforced(name: str) -> None:
    spec = ConstraintSpec.json_schema({"type": "string", "format": name})
    assert not LLMatcher.validate_grammar(spec.lark) and not spec.dropped
    assert "format" in spec.lark or "pattern" in spec.lark


@pytest.mark.parametrize("name", OTHERS)
def test_a_format_without_one_is_an_annotation(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert "Unknown format" in LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    assert not error(schema)
    assert ConstraintSpec.json_schema(schema).dropped == (
        (f"format {name}",) if name in CHECKED_FORMATS else ()
    )


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "time",
            ["00:00:00Z", "23:59:59.25+05:30"],
            ["24:00:00Z", "12:00", "12:00:60Z", "12:00:00", "12:00:00+24:00"],
        ),
        (
            "date",
            ["2024-02-29", "2000-02-29", "0001-01-01"],
            ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01"],
        ),
        (
            "date-time",
            ["2024-02-29T12:00:00Z"],
            ["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z", "2024-02-29"],
        ),
        (
            "email",
            ["a.b+c@example.org", "a" * 64 + "@x"],
            ["a" * 65 + "@x", "a..b@x", "a@-x", "a@" + "x" * 64, "@x"],
        ),
    ],
)
def test_formats_mean_what_programs_can_read(name: str, right: list[str], wrong: list[str]) -> None:
    pattern = re.compile(FORMAT_PATTERNS[name])
    assert all(map(pattern.search, right)) and not any(map(pattern.search, wrong))


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
