"""JSON schemas: every legal one is taken, objects are closed, and what no grammar enforces is checked at the end.

Formats: enforced where there is a grammar, annotations else.
"""

import json
import logging
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher
from pydantic import TypeAdapter

from quengine.errors import EngineError
from quengine.models.tokenizer import Tokenizer
from quengine.structured import constraint as constraint_module
from quengine.structured.constraint import Constraint, ConstraintCompiler
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.schema_check import (
    CHECKED_FORMATS,
    ENFORCED_FORMATS,
    FORMAT_PATTERNS,
    schema_violation,
)
from quengine.structured.schema_grammar import grammar_schema
from tests.engine.structured.random_schemas import (
    allows,
    bytes_by_id,
    is_valid,
    random_document,
    random_schema,
    random_text,
    violation,
)


def takes(compiler: ConstraintCompiler, schema: Any, value: Any) -> bool:
    """Whether a value is let through as JSON, its keys in the order that it has."""
    constraint = compiler.compile(ConstraintSpec.json_schema(schema))
    ids = bytes_by_id(compiler._tokenizer)
    return allows(constraint, ids, json.dumps(value, ensure_ascii=False)) is None


def violated(schema: Any, value: Any) -> str | None:
    return schema_violation(ConstraintSpec.json_schema(schema).schema, json.dumps(value))


AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "valid", "invented"),
    [
        ({"type": "object", "properties": AB}, {"a": 1}, {"a": 1, "c": 2}),
        ({"type": "object", "properties": {}}, {}, {"c": 2}),
        ({"type": "object", "properties": None}, {}, {"c": 2}),
        ({"properties": AB, "required": ["a", "z"]}, {"a": 1, "z": "any"}, {"a": 1, "z": 2, "c": 2}),
        (
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            {"a": 1, "b": 1},
            {"a": 1, "b": 1, "c": 1},
        ),
        (
            {"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": {"properties": {"a": {}}}}},
            {"a": 1, "b": 2},
            {"a": 1, "b": 2, "c": 3},
        ),
        (
            {"properties": {"k": {}}, "anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            {"k": 1, "b": 1},
            {"k": 1, "a": 1, "b": 1},
        ),
        ({"properties": AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"b": 1}, {"a": 1, "c": 1}),
        ({"properties": {"o": {"properties": AB}}}, {"o": {"a": 1}}, {"o": {"c": 1}}),
        ({"patternProperties": {"^x-": {}}, "properties": AB}, {"a": 1, "x-1": 2}, {"a": 1, "c": 2}),
        ({"properties": AB, "unevaluatedProperties": False}, {"a": 1}, {"c": 1}),
    ],
)
def test_objects_are_closed_around_the_keys_of_all_that_applies_to_them(
    compiler: ConstraintCompiler, schema: dict[str, Any], valid: Any, invented: Any
) -> None:
    assert takes(compiler, schema, valid) and not takes(compiler, schema, invented)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": AB, "additionalProperties": True},
        {"type": "object", "properties": AB, "additionalProperties": {"type": "integer"}},
        {"allOf": [{"properties": AB}, {"additionalProperties": True}]},
        {"properties": AB, "unevaluatedProperties": {"type": "integer"}},
        {"properties": AB, "minProperties": 3},
        {},
        True,
    ],
)
def test_objects_are_open_where_the_schema_says_so(compiler: ConstraintCompiler, schema: Any) -> None:
    assert takes(compiler, schema, {"a": 1, "b": 2, "c": 3})


SENT: list[tuple[Any, Any, Any]] = [
    # schema, a valid value, a value that is none (by the grammar or by the check)
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, [1, 2], [1, 1]),
    ({"type": "array", "contains": {"const": 1}}, [0, 1], [0, 2]),
    ({"type": "array", "contains": {"const": 1}, "minContains": 2, "maxContains": 2}, [1, 1], [1, 1, 1]),
    ({"type": "string", "not": {"enum": ["a", "b"]}}, "c", "a"),
    ({"enum": ["a", "b"], "not": {"const": "a"}}, "b", "a"),
    ({"not": {"type": "string"}}, 1, "a"),
    ({"type": "object", "not": {"required": ["a"]}}, {"b": 1}, {"a": 1}),
    ({"properties": AB, "dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    ({"properties": AB, "dependencies": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
    ({"properties": AB, "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1, "b": 1}, {"a": 1}),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, {"x1": 1}, {"y": 1}),
    ({"type": "object", "propertyNames": {"enum": ["x", "y"]}}, {"y": 1}, {"z": 1}),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, 1, 7),
    ({"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}, {"a": "x"}, {"a": 1}),
    ({"type": "string", "nullable": True}, None, 1),
    ({"type": ["string", "null"]}, None, 1),
    ({"definitions": {"a/b": {"type": "integer"}}, "items": {"$ref": "#/definitions/a~1b"}}, [1], ["x"]),
    ({"$defs": {"é 1": {"type": "integer"}}, "$ref": "#/$defs/%C3%A9%201", "minimum": 3}, 3, 2),
    ({"$id": "https://a.b/c", "$defs": {"x": {"$anchor": "y", "type": "null"}}, "$ref": "#y"}, None, 1),
    ({"type": "object", "properties": {"next": {"$ref": "#"}}}, {"next": {"next": {}}}, {"next": 1}),
    ({"const": {"a": [1, None, True, "é"]}}, {"a": [1, None, True, "é"]}, {"a": []}),
    ({"enum": [[], {}, "", 0, False, None, 12345678901234567890]}, 12345678901234567890, 5),
    ({"type": "object", "minProperties": 1, "properties": AB}, {"b": 1}, {}),
    ({"type": "object", "maxProperties": 1, "properties": {**AB, "c": {}}}, {"b": 1}, {"a": 1, "b": 2}),
    ({"type": "string", "format": "json-pointer"}, "/a", "a"),
    ({"type": "string", "format": "made-up"}, "a", 1),
    ({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}, "a1", "ab"),
    ({"type": "string", "pattern": "^(a+)-\\1$"}, "aa-aa", "aa-a"),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, 4, 3),
    ({"$schema": "https://example.org/own", "type": "integer"}, 1, "a"),
    ({"items": [{"type": "integer"}], "additionalItems": False}, [1], ["a"]),
    ({"type": "integer", "multipleOf": 99999999}, 99999999, 5),
    ({"$ref": "https://example.org/other.json", "type": "integer"}, 5, "a"),
    ({"type": "integer", "minimum": -(2**70)}, -5, "a"),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), SENT)
def test_schemas_that_people_send_are_taken_and_hold(
    compiler: ConstraintCompiler, schema: Any, valid: Any, invalid: Any
) -> None:
    assert takes(compiler, schema, valid) and violated(schema, valid) is None
    assert not takes(compiler, schema, invalid) or violated(schema, invalid) is not None


def test_a_condition_on_a_key_with_few_values_is_enforced_token_by_token(
    compiler: ConstraintCompiler,
) -> None:
    condition = {
        "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
        "then": {"required": ["a"]},
        "else": {"required": ["b"]},
    }
    schema = {"properties": {"kind": {"enum": ["x", "y"]}, **AB}, "required": ["kind"], **condition}
    assert takes(compiler, schema, {"kind": "x", "a": 1}) and takes(compiler, schema, {"kind": "y", "b": 1})
    assert not takes(compiler, schema, {"kind": "x", "b": 1}) and not takes(
        compiler, schema, {"kind": "y", "a": 1}
    )
    assert not ConstraintSpec.json_schema(schema).dropped


def test_what_is_not_enforced_is_told_once(
    compiler: ConstraintCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    spec = ConstraintSpec.json_schema({"type": "array", "uniqueItems": True, "title": "told once"})
    assert spec.dropped == ("uniqueItems",)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            compiler.compile(
                ConstraintSpec.json_schema({"minItems": 1, "type": "array", "uniqueItems": True})
            )
    assert [record.getMessage() for record in caplog.records] == [
        "JSON schema: not enforced, but checked: uniqueItems"
    ]


MANY = {
    "allOf": [{"anyOf": [{"properties": {f"{n}{side}": {"const": n}}} for side in "ab"]} for n in range(20)]
}
BOMBS: dict[str, Any] = {
    "combinations": MANY,
    "joined patterns": {
        "allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(5, 25)]
    },
    "multiples": {"allOf": [{"type": "integer", "multipleOf": p} for p in (4999, 4993, 4987)]},
    "overlapping keys": {"patternProperties": {"(a|b)*a(a|b){9}": {}, "(a|b)*b(a|b){9}": {"type": "null"}}},
    "long text": {"type": "string", "minLength": 10**9},
    "long array": {"type": "array", "items": {"type": "null"}, "minItems": 10**9, "maxItems": 10**12},
    "nested conditions": None,  # below
    "doubling references": {
        "$ref": "#/$defs/40",
        "$defs": {"0": {}, **{str(n): {"allOf": [{"$ref": f"#/$defs/{n - 1}"}] * 2} for n in range(1, 41)}},
    },
    "numbers beyond numbers": {"type": "string", "minLength": 10**30, "pattern": "a{1,99999999999999}"},
}
_condition: Any = True
for _ in range(30):
    _key = {"k": {"enum": [1, 2]}}
    _if = {"properties": {"k": {"const": 1}}, "required": ["k"]}
    _condition = {"properties": _key, "if": _if, "then": {}, "else": _condition}
BOMBS["nested conditions"] = _condition


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_legal_schema_that_explodes_is_held_to_less(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(constraint_module, "PROBE_SECONDS", 1.5)
    constraint = compiler.compile(ConstraintSpec.json_schema(BOMBS[name]))
    assert constraint.allowed().any()


def test_joined_regexes_of_a_lark_grammar_that_have_no_end_are_refused(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_module, "PROBE_SECONDS", 1.5)
    joined = " & ".join(f"/(a|b)*a(a|b){{{n}}}/" for n in range(5, 25))
    with pytest.raises(EngineError, match=r"make it simpler|too|Unable|fuel") as caught:
        constraint = compiler.compile(ConstraintSpec.grammar(f"start: A\nA: {joined}"))
        for _ in range(40):
            constraint.advance(int(constraint.allowed().argmax()))
    assert "\n" not in str(caught.value)


def test_hostile_patterns_do_not_stop_the_check() -> None:
    for pattern in ("^(a+)+$", "^((a+)+)\\1$", "^(?=(a+)+b)", "(", "((a{1,200}){1,200}){1,200}"):
        violated({"type": "string", "pattern": pattern}, "a" * 5000 + "c")


def test_keys_of_joined_schemas_come_in_their_order(
    compiler: ConstraintCompiler, tokenizer: Tokenizer
) -> None:
    parts = [{"type": "object", "properties": {name: True}, "required": [name]} for name in ("z", "y", "a")]
    node = {"type": "object", "properties": {"z": True, "a": True}}
    ids = bytes_by_id(tokenizer)
    for schema, text in (
        ({"allOf": parts}, '{"z": 1, "y": 2, "a": 3}'),
        ({"type": "object", "properties": {}, "$defs": {"n": node}, "$ref": "#/$defs/n"}, '{"z": 1, "a": 2}'),
    ):
        assert allows(compiler.compile(ConstraintSpec.json_schema(schema)), ids, text) is None


IMPOSSIBLE = {"type": "object", "properties": {"a": False}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"type": ["object", "null"], "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]},
            None,
            {},
        ),
        ({"properties": {"a": {"$ref": "#/$defs/x"}, "b": True}}, {"b": 1}, {"a": 1}),
        ({"anyOf": [{"$ref": "#/$defs/y"}, {"type": "null"}]}, None, {}),
        ({"prefixItems": [{"type": "null"}, {"$ref": "#/$defs/y"}]}, [None], [None, {}]),
    ],
)
def test_a_definition_under_which_nothing_is_valid_costs_no_other_value(
    compiler: ConstraintCompiler, schema: dict[str, Any], valid: Any, invalid: Any
) -> None:
    schema = {**schema, "$defs": {"x": IMPOSSIBLE, "y": {"allOf": [{"$ref": "#/$defs/x"}]}}}
    assert takes(compiler, schema, valid) and not takes(compiler, schema, invalid)


def test_more_required_keys_than_there_may_be_are_no_object(compiler: ConstraintCompiler) -> None:
    schema = {"properties": {"a": True}, "required": ["a"], "maxProperties": 0}
    with pytest.raises(EngineError, match="no text can be"):
        compiler.compile(ConstraintSpec.json_schema({"type": "object", **schema}))
    nearest = grammar_schema({"type": ["object", "null"], **schema}).schema
    assert isinstance(nearest, dict) and nearest["type"] == ["null"]


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"^x-": True}},
        {"properties": {"a": True}, "minProperties": 2},
        {"properties": {}, "allOf": [{"properties": {"name": True}}]},
    ],
    ids=lambda schema: ", ".join(schema),
)
def test_names_that_the_grammar_does_not_hold_are_said_to_be_dropped(schema: dict[str, Any]) -> None:
    names = {"type": "object", "propertyNames": {"maxLength": 3}}
    assert "propertyNames" in grammar_schema(schema | names).dropped


def test_names_are_held_beside_a_key_that_may_not_be(
    compiler: ConstraintCompiler, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "propertyNames": {"maxLength": 4}, "not": {"required": ["b"]}}
    compiled = compiler.compile(ConstraintSpec.json_schema(schema))
    assert allows(compiled, bytes_by_id(tokenizer), '{"longer": 1}') is not None


def test_a_least_number_of_open_keys_is_said_to_be_checked() -> None:
    """The compiler counts a key that comes twice as two."""
    assert grammar_schema({"type": "object", "minProperties": 2}).dropped == ("minProperties",)
    assert not grammar_schema({"type": "object", "minProperties": 1}).dropped


@pytest.mark.parametrize("seed", range(60))
def test_random_schemas_allow_valid_documents_and_no_others(
    compiler: ConstraintCompiler, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """`benchmarks/checks/random_json_schemas.py` is the long form."""
    rng = random.Random(1000 + seed)
    schema = random_schema(rng)
    documents = {text for _ in range(15) if is_valid(schema, text := random_document(rng, schema))}
    try:
        spec = ConstraintSpec.json_schema(schema)
        compiler.compile(spec)
    except EngineError as error:
        assert "no text can be" in str(error) and not documents
        return
    ids = bytes_by_id(tokenizer)
    for text in documents:
        assert (place := allows(compiler.compile(spec), ids, text)) is None, f"{text} stops behind {place}"
    if caplog.records or "oneOf" in spec.schema:
        return  # the check has the rest
    closing = [ids[mark] for mark in (b'"', b"}", b"]")]
    for _ in range(3):
        constraint = compiler.compile(spec)
        assert isinstance(constraint, Constraint)
        text = random_text(rng, constraint, tokenizer, closing, 150)
        assert text is None or violation(spec.schema, schema, text) is None, text


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
