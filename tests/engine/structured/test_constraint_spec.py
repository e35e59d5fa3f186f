"""Specifications of constraints: what is taken, what is refused in one line, and GBNF as Lark."""

import pytest

from quengine.errors import EngineError
from quengine.structured.constraint_spec import MAX_CHARACTERS, ConstraintSpec


def test_a_schema_is_the_same_as_a_value_and_as_text() -> None:
    assert ConstraintSpec.json_schema({"type": "null"}) == ConstraintSpec.json_schema('{"type": "null"}')
    assert hash(ConstraintSpec.json_schema({"type": "null"})) != hash(ConstraintSpec.json_object())


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type"', "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", r"JSON schema: \[\] must be a schema: an object"),
        ("3", "JSON schema: 3 must be a schema: an object"),
        (False, "no text can be"),
        ({"not": {}}, "no text can be"),
        ({"type": 5}, "JSON schema: type: 5 must be string"),
        (
            {"properties": {"size": {"anyOf": [{"type": "strng"}]}}},
            r"properties\.size\.anyOf\[0\]\.type: 'strng'",
        ),
        ({"$defs": {"A": {"items": 3}}, "$ref": "#/$defs/A"}, r"\$defs\.A\.items: 3 must be a schema"),
        ({"items": {"$ref": "#/$defs/B"}}, r"items\.\$ref: '#/\$defs/B' is no part of the schema"),
        ({"minLength": -1}, "minLength: -1 must be a whole number"),
        ({"enum": "ab"}, "enum: 'ab' must be an array"),
        ({"properties": [1]}, r"properties: \[1\] must be an object"),
        ({"multipleOf": 0}, "multipleOf: 0 must be above 0"),
        ({"const": float("nan")}, "no JSON value"),
        ({"const": object()}, "no JSON value"),
        ({"const": "x" * MAX_CHARACTERS}, "characters are more than the"),
        ('"' + "x" * MAX_CHARACTERS, "characters are more than the"),
    ],
)
def test_what_is_no_schema_is_refused_in_one_line(schema: object, message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        ConstraintSpec.json_schema(schema)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("pattern", ["", None, 3])
def test_a_regex_must_be_text(pattern: object) -> None:
    with pytest.raises(EngineError, match="regex"):
        ConstraintSpec.regex(pattern)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "empty"),
        (7, "must be text"),
        ("x" * (MAX_CHARACTERS + 1), "characters are more than the"),
        ("start: a\na[temperature=0.5]: /x+/", "line 2: the option temperature"),
        ('start: a\na[lazy, stop="q"]: /x+/', "line 2: the option stop"),
        ('root ::= "a" b\nb ::= c', "line 2: there is no rule 'c'"),
        ('rot ::= "a"', "no rule 'root'"),
        ('root ::= "a\n"', "line 1: the line ends"),
        ("root ::= [a-", "line 1: the line ends"),
        ("root ::= [z-a]", "range 'z' to 'a' is empty"),
        ("root ::= []", "at least one character"),
        ('root ::= "\\q"', r"\\q is no escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "a" )', "a rule's name must begin here"),
        ('root ::= ("a"', r"a \) is missing"),
        ('root ::= "a" !', "'!' means nothing here"),
        ('root ::= "a"{3,2}', "repeats less often"),
        ('root ::= "a"{,2}', "a repetition is written"),
        ('root ::= "a"{9999999}', "counts to"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule root is defined twice"),
        ("root ::= " + "(" * 1000, "nested more than"),
    ],
)
def test_a_grammar_with_a_mistake_is_refused_with_its_line(grammar: object, message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        ConstraintSpec.grammar(grammar)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_lark_grammar_is_taken_as_it_is() -> None:
    text = 'start: "::=" b[capture]\nb: /x+/ // stop'
    assert ConstraintSpec.grammar(text).lark == text


def test_gbnf_is_written_out_character_by_character() -> None:
    text = 'root ::= one-Two{2,} "a/" | [^"\\]\\x41-C-] .? # comment\none-Two ::= (\n  "\\u00e9"\n | <[3]> )*'
    assert ConstraintSpec.grammar(text).lark.splitlines() == [
        "start: r0",
        r"r0: r1{2,} (/a/ /\x{2F}/) | /[^\x{22}\x{5D}A-C\x{2D}]/ /(?s:.)/?",
        r"r1: (/\x{E9}/ | <[3]>)*",
    ]


def test_a_response_format_is_openais() -> None:
    schema = {"type": "null"}
    given = {"name": "n", "strict": True, "schema": schema}
    read = ConstraintSpec.from_response_format
    assert read(None) is None and read({"type": "text"}) is None
    assert read({"type": "json_object"}) == ConstraintSpec.json_object()
    assert read({"type": "json_schema", "json_schema": given}) == ConstraintSpec.json_schema(schema)
    assert read({"type": "json_schema", **given}) == ConstraintSpec.json_schema(schema)


@pytest.mark.parametrize(
    "wrong", ["json", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 3}]
)
def test_another_response_format_is_one_line(wrong: object) -> None:
    with pytest.raises(EngineError, match="response_format"):
        ConstraintSpec.from_response_format(wrong)


def test_a_schema_of_too_many_parts_is_refused_before_a_grammar_is_made() -> None:
    schema = {"properties": {str(n): {"properties": {"a": {}}} for n in range(15_000)}}
    with pytest.raises(EngineError, match=r"^JSON schema: more than the 20000 schemas within it"):
        ConstraintSpec.json_schema(schema)
