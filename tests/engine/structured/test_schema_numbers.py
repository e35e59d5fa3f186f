"""Numbers beyond those that a double has: the grammar holds them as they are written in the schema."""

import json
import random
import re
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.tokenizer import Tokenizer
from quengine.structured.constraint import Constraint, ConstraintCompiler
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.schema_numbers import EXACT, exact_numbers, is_large, is_nothing
from quengine.structured.schema_rules import plain_grammar
from tests.engine.structured.random_schemas import (
    allows,
    bytes_by_id,
    is_valid,
    random_document,
    random_schema,
    random_text,
    violation,
)

MOST = 2**64 - 1
U64 = {"type": "integer", "minimum": 0, "maximum": MOST}
I64 = {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1, "format": "int64"}
NODE = {"type": "object", "properties": {"v": {"const": MOST}, "next": {"$ref": "#/$defs/n"}}}

HELD: list[tuple[Any, list[Any], list[Any]]] = [
    ({"enum": [2**63]}, [2**63], [8, 2**63 + 1, -(2**63)]),
    ({"const": -(2**63)}, [-(2**63)], [-(2**63) - 1, 8]),
    ({"type": "integer", "enum": [2**53 + 1, 3, "x"]}, [2**53 + 1, 3], [2**53, 2**53 + 2, "x"]),
    ({"enum": [1e20, 1.5e-12, 10**30]}, [1e20, 10**20, 1.5e-12, 10**30], [1, 1.5]),
    ({"enum": [{"a": [2**60 + 1, True]}, 5]}, [{"a": [2**60 + 1, True]}, 5], [{"a": [2**60, True]}, {}, 6]),
    ({"enum": [2**70, 2**71], "maximum": 2**70}, [2**70], [2**71]),
    (U64, [0, 17, 2**63, MOST], [-1, MOST + 1, 10**20]),
    (I64, [None, -(2**63), 2**63 - 1, 0], [-(2**63) - 1, 2**63, "x"]),
    ({"type": "number", "minimum": -MOST, "exclusiveMaximum": MOST}, [-MOST, -0.5, 0, MOST - 1], [MOST]),
    ({"minimum": 2**70}, ["x", None, [1], {"a": 1}, 2**70], [5, 2**70 - 1]),
    (
        {"type": "integer", "multipleOf": 2**64, "minimum": 1, "maximum": 2**66},
        [2**64, 2**66],
        [0, 8, 2**65 + 1],
    ),
    ({"type": "array", "items": U64, "minItems": 1, "maxItems": 2}, [[1], [1, MOST]], [[], [-1], [1, 2, 3]]),
    (
        {"type": "array", "prefixItems": [U64, {"const": 1}], "items": False},
        [[], [MOST, 1]],
        [[-1], [1, 1, 1]],
    ),
    ({"properties": {"a": U64, "%json {": U64}}, [{}, {"%json {": 1}, {"a": 1, "%json {": 2}], [{"a": -1}]),
    ({"type": "object", "additionalProperties": U64}, [{}, {'é\n"q': 1, "b": MOST}], [{"a": -1}, {"a": "x"}]),
    (
        {"properties": {"a": {}, "b": U64}, "required": ["b", "c"]},
        [{"b": 1, "c": "any"}, {"a": 0, "b": 1, "c": 2}],
        [{"b": 1}, {"c": 1}],
    ),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
        [{}, {"next": {"v": MOST}}],
        [{"v": 8}, {"next": {"v": 1}}],
    ),
    ({"anyOf": [U64, {"type": "string"}]}, ["x", MOST], [-1, None]),
    ({"allOf": [{"type": "integer", "minimum": 2**60 + 1}]}, [2**60 + 1], [2**60]),
]


def takes(compiler: ConstraintCompiler, schema: Any, value: Any) -> bool:
    constraint = compiler.compile(ConstraintSpec.json_schema(schema))
    return allows(constraint, bytes_by_id(compiler._tokenizer), json.dumps(value, ensure_ascii=False)) is None


@pytest.mark.parametrize(("schema", "valid", "invalid"), HELD, ids=lambda _: None)
def test_large_numbers_are_held_token_by_token(
    compiler: ConstraintCompiler, schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    assert not ConstraintSpec.json_schema(schema).dropped
    assert [each for each in valid if not takes(compiler, schema, each)] == []
    assert [each for each in invalid if takes(compiler, schema, each)] == []


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer", "multipleOf": 2**64}, 2**70),
        ({"type": "number", "minimum": 0.5, "maximum": 2**64}, 1.5),
        ({"type": "integer", "minimum": 10**80}, 10**81),
        ({"allOf": [U64, {"type": "integer", "minimum": 5}]}, 2**63),
        ({"type": "object", "patternProperties": {"^a": U64}}, {"a": 2**63}),
    ],
)
def test_numbers_that_no_grammar_of_moderate_size_has_are_said_to_be_checked(
    compiler: ConstraintCompiler, schema: Any, value: Any
) -> None:
    assert ConstraintSpec.json_schema(schema).dropped
    assert takes(compiler, schema, value)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, {"a": 8}),  # nothing is valid under it
        ({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}, {"a": 8, "b": "a1"}),
        ({"type": "array", "maxItems": 10**12, "items": U64}, {"a": 8, "b": [1]}),
        ({"enum": [2**60 + n for n in range(9000)]}, {"a": 8, "b": 2**60}),
    ],
    ids=["nothing", "look-ahead", "many items", "long"],
)
def test_what_cannot_be_compiled_beside_large_numbers_costs_no_error(
    compiler: ConstraintCompiler, part: Any, value: Any
) -> None:
    assert takes(compiler, {"type": "object", "properties": {"a": U64, "b": part}}, value)


def test_a_number_above_2_53_has_no_fraction_as_no_double_has_one(compiler: ConstraintCompiler) -> None:
    schema = {"type": "number", "minimum": 0, "maximum": 2**64}
    assert takes(compiler, schema, 2**52 - 0.5) and takes(compiler, schema, 2**53 + 1)
    constraint = compiler.compile(ConstraintSpec.json_schema(schema))
    assert allows(constraint, bytes_by_id(compiler._tokenizer), f"{2**53 + 1}.5") is not None


def test_a_range_without_a_number_is_no_schema_of_a_text() -> None:
    with pytest.raises(EngineError, match="no text can be"):
        ConstraintSpec.json_schema({"type": "integer", "minimum": 2**64 + 1, "maximum": 2**64})


def test_the_white_space_is_that_of_other_schemas(compiler: ConstraintCompiler) -> None:
    spec = ConstraintSpec.json_schema({"properties": {"a": U64, "b": {}}})
    ids = bytes_by_id(compiler._tokenizer)
    for text in ('{"a":1,"b":2}', '{ "a" : 1 , "b" :\n\t{ "c": [ ] }\n}'):
        assert allows(compiler.compile(spec), ids, text) is None
    for text in ('{"a":  1}', '{"a": 1  }', '{"a": 1 } '):
        assert allows(compiler.compile(spec), ids, text) is not None


def schemas_in(lark: str) -> list[Any]:
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(lark, found.end())[0] for found in re.finditer("%json ", lark)]


@pytest.mark.parametrize("least", [-(2**63), -(2**70), 2**70])
def test_no_number_reaches_the_compiler_that_it_cannot_read(least: int) -> None:
    """Of -2^63 it takes a range apart without end, and the process is lost."""
    condition = {"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["a"]}}
    for schema in (
        {"properties": {"k": {"enum": [1, least, 2]}, "a": {}}, **condition},
        {"type": "integer", "minimum": least, "multipleOf": 7},
        {"allOf": [{"minimum": least}, {"enum": [least, {"a": [least]}]}], "not": {"const": least}},
        {"patternProperties": {"a": {"const": least}}, "propertyNames": {"enum": ["a", "ab"]}},
    ):
        lark = ConstraintSpec.json_schema(schema).lark
        for text in (lark, plain_grammar(lark)):
            assert schemas_in(text) and not any(map(is_large, schemas_in(text)))


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_ranges_have_the_numbers_between_their_bounds(kind: str) -> None:
    rng = random.Random(5)
    for _ in range(300):
        low = rng.choice([0, 1, -1, 10, 99, rng.randrange(-200, 200)])
        high = low + rng.choice([0, 1, 9, 10, 90, 101, rng.randrange(200)])
        bounds = {rng.choice(["minimum", "exclusiveMinimum"]): low} if rng.random() < 0.8 else {}
        bounds |= {rng.choice(["maximum", "exclusiveMaximum"]): high} if rng.random() < 0.8 else {}
        node = exact_numbers({"type": kind, **bounds})
        assert node is not None
        regex = re.compile(node[EXACT])
        numbers = [*range(-450, 450)]
        numbers += [n + 0.5 for n in numbers] if kind == "number" else []
        within = [n for n in numbers if _within(n, bounds)]
        assert [n for n in numbers if regex.fullmatch(str(n))] == within, bounds
        assert is_nothing(node) is (not within), bounds
        assert not any(map(regex.fullmatch, ("007", "1.", "-", "", "--1", "-007")))


def _within(number: float, bounds: dict[str, int]) -> bool:
    return (
        number >= bounds.get("minimum", -1000)
        and number > bounds.get("exclusiveMinimum", -1000)
        and number <= bounds.get("maximum", 1000)
        and number < bounds.get("exclusiveMaximum", 1000)
    )


SHIFT = 2**64
SHIFTED = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum")


def shifted(value: Any) -> Any:
    """A value whose numbers are above 2^63."""
    if isinstance(value, dict):
        return {key: shifted(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shifted(part) for part in value]
    return int(value) + SHIFT if isinstance(value, int | float) and not isinstance(value, bool) else value


def shifted_schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [shifted_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: shifted(part) if key in SHIFTED and not isinstance(part, dict) else shifted_schema(part)
        for key, part in schema.items()
        if key != "multipleOf" or isinstance(part, dict)
    }


@pytest.mark.parametrize("seed", range(40))
def test_random_schemas_with_large_numbers_allow_valid_documents_and_no_others(
    compiler: ConstraintCompiler, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    rng = random.Random(7000 + seed)
    given = random_schema(rng)
    schema = shifted_schema(given)
    documents = {
        json.dumps(shifted(json.loads(random_document(rng, given))), ensure_ascii=False) for _ in range(15)
    }
    valid = {text for text in documents if is_valid(schema, text)}
    try:
        spec = ConstraintSpec.json_schema(schema)
        compiler.compile(spec)
    except EngineError as error:
        assert "no text can be" in str(error) and not valid
        return
    assert not any(map(is_large, schemas_in(spec.lark)))
    ids = bytes_by_id(tokenizer)
    for text in valid:
        assert (place := allows(compiler.compile(spec), ids, text)) is None, f"{text} stops after {place}"
    if caplog.records or "oneOf" in spec.schema:
        return  # the check has the rest
    for text in documents - valid:
        if violation(spec.schema, schema, text) is not None:
            assert allows(compiler.compile(spec), ids, text) is not None, text
    closing = [ids[mark] for mark in (b'"', b"}", b"]")]
    for _ in range(3):
        constraint = compiler.compile(spec)
        assert isinstance(constraint, Constraint)
        text = random_text(rng, constraint, tokenizer, closing, 150)
        assert text is None or violation(spec.schema, schema, text) is None, text
