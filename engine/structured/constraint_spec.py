"""What a generated text has to be: a JSON schema, a regular expression or a grammar, as the user wrote it.

    ConstraintSpec.json_schema({"type": "object", ...})   OpenAI's response_format json_schema, --json-schema
    ConstraintSpec.json_object()                          OpenAI's response_format json_object
    ConstraintSpec.regex(r"[0-9]{4}-[0-9]{2}")
    ConstraintSpec.grammar(text)                          GBNF or Lark; --grammar, llama-server's `grammar`

A specification is a value: it can be compared, hashed and kept in SamplingParams. Sizes and the syntax of JSON are
checked here, grammars by `constraint.ConstraintCompiler`, which has the vocabulary. See docs/constrained.md.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from quengine.errors import EngineError, shown
from quengine.platform import strict_json
from quengine.structured.schema_dialect import standard_schema
from quengine.structured.schema_grammar import grammar_schema
from quengine.structured.schema_rules import lark_expression

if TYPE_CHECKING:
    from quengine.models.tokenizer import Tokenizer


def control_ids(tokenizer: "Tokenizer", names: Sequence[str]) -> dict[str, int]:
    """Those of `names` that are control tokens of the vocabulary, with their ids."""
    return {text: token for text in names if (token := tokenizer.control_id(text)) is not None}


def marker(controls: Mapping[str, int], text: str) -> str:
    """The expression of a marker in a grammar: the control token if it is one, else its letters."""
    token = controls.get(text)
    return literal(text) if token is None else f"<[{token}]>"


def literal(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text)


MAX_CHARACTERS = 128 * 1024
"""Compiling takes time that grows with the square of a schema's properties: about 5 s at this size."""

_LARK_START = re.compile(r"^\s*(start\s*(\[[^\]\n]*\])?\s*:|%llguidance\b)", re.MULTILINE)
_INLINE_SCHEMA = re.compile(r"%json\s*")
_IGNORED_OPTIONS = re.compile(r"^[^/#\n\"]*\[[^\]\n]*\b(temperature|stop)\b", re.MULTILINE)


@dataclass(frozen=True)
class ReasoningBudget:
    """The most tokens of reasoning; `closing` is the text that ends a section whose tokens are spent.

    `begin` and `end` are the tags of the section; `begin` is "" where the prompt has opened it.
    """

    tokens: int
    begin: str
    end: str
    closing: str


@dataclass(frozen=True)
class ConstraintSpec:
    """The form that a text must have, for `SamplingParams.constraint`; made by the class methods.

    Attributes:
        kind: its origin, for errors.
        lark: the whole specification as a Lark grammar of llguidance.
        budget: the bound on the reasoning; it may stand without a grammar.
        from_schemas: whether the schemas in the grammar are of `JsonExpression`, so that simpler ones may replace them.
        schema: the JSON schema that a finished text is checked with; "" for none.
        dropped: its keywords that the grammar does not enforce, or not wholly.

    Raises:
        EngineError: it is empty or longer than MAX_CHARACTERS, or a schema in a grammar has a number of at most -2^63.
    """

    kind: Literal["JSON schema", "regex", "grammar", "reasoning budget"]
    lark: str
    budget: ReasoningBudget | None = None
    from_schemas: bool = False
    schema: str = ""
    dropped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.lark.strip() and self.budget is None:
            raise EngineError(f"{self.kind}: it is empty")
        if len(self.lark) > MAX_CHARACTERS:
            raise EngineError(
                f"{self.kind}: {len(self.lark)} characters are more than the {MAX_CHARACTERS} that are accepted"
            )
        if self.kind == "grammar":
            for schema in _INLINE_SCHEMA.finditer(self.lark):
                _check_numbers(self.kind, self.lark[schema.end() :])

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "ConstraintSpec":
        """JSON that is valid under a schema (draft 2020-12, or as `schema_dialect` reads it), a value or JSON text.

        Objects with `properties` have no others unless the schema says so. What no grammar can enforce (`uniqueItems`,
        ...) is left to the check of the finished text, and named in `dropped`.

        Raises:
            EngineError: the text is no JSON, or no schema; the message has the path within it.
        """
        value = _parsed(schema) if isinstance(schema, str) else schema
        expression = JsonExpression.of(value)
        lark = f"start: {expression.lark}"
        return cls("JSON schema", lark, None, True, expression.standard, expression.dropped)

    @classmethod
    def json_object(cls) -> "ConstraintSpec":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def from_response_format(cls, value: Any) -> "ConstraintSpec | None":
        """OpenAI's `response_format`: {"type": "text"}, "json_object", or "json_schema" with {"schema": ...}.

        None, and "text", ask for nothing. The schema holds whether it is `strict` or not. "json_object" may have a
        `schema` beside it, as llama-server takes it: the text is then valid under that.

        Raises:
            EngineError: it is none of these.
        """
        kind = value.get("type") if isinstance(value, Mapping) else None
        if value is None or kind == "text":
            return None
        if kind == "json_object":
            schema = value.get("schema")  # llama-server's; an empty one is any object there too
            return cls.json_object() if schema is None or schema == {} else cls.json_schema(schema)
        if kind != "json_schema":
            raise EngineError(
                f"response_format {shown(value)}: its type must be text, json_object or json_schema"
            )
        inner = value.get("json_schema", value)  # the Responses API has the schema beside the type
        if not isinstance(inner, Mapping) or "schema" not in inner:
            raise EngineError(
                'response_format json_schema: must have {"json_schema": {"name": ..., "schema": ...}}'
            )
        return cls.json_schema(inner["schema"])

    @classmethod
    def regex(cls, pattern: str) -> "ConstraintSpec":
        """Text that a regular expression matches as a whole (Rust's syntax: no look-around, no back-references).

        Raises:
            EngineError: it is no text, or empty.
        """
        if not isinstance(pattern, str) or not pattern:
            raise EngineError(f"regex {shown(pattern)}: must be text of at least one character")
        return cls("regex", f"start: /{_slashes_escaped(pattern)}/")

    @classmethod
    def grammar(cls, text: str) -> "ConstraintSpec":
        """A grammar in llama.cpp's GBNF (rules with `::=`, beginning at `root`) or in llguidance's Lark (at `start`).

        Raises:
            EngineError: it is no text, GBNF with a mistake (with its line), or Lark with an option that could only
                be ignored.
        """
        if not isinstance(text, str):
            raise EngineError(f"grammar {shown(text)}: must be text")
        if len(text) > MAX_CHARACTERS:
            return cls("grammar", text)  # refused for its size, before anything reads it
        from quengine.structured.constraint_gbnf import (
            is_gbnf,
            lark_of_gbnf,
        )  # late: every command imports this file

        if is_gbnf(text):
            return cls("grammar", lark_of_gbnf(text))
        if option := _IGNORED_OPTIONS.search(text):
            line = text.count("\n", 0, option.start(1)) + 1
            raise EngineError(f"grammar, line {line}: the option {option[1]} is not supported; leave it out")
        return cls("grammar", text)


def is_grammar(text: str) -> bool:
    """Whether a text is a grammar itself (it has a rule that one begins with), and not the name of a file."""
    from quengine.structured.constraint_gbnf import is_gbnf

    return is_gbnf(text) or _LARK_START.search(text) is not None


@dataclass(frozen=True)
class JsonExpression:
    """A schema within a Lark grammar.

    Attributes:
        lark: the expression, of the nearest schema that can be held to token by token (`schema_grammar`).
        standard: the schema as JSON text of draft 2020-12, by which a finished text is checked.
        dropped: keywords that `lark` does not enforce, or not wholly.
    """

    lark: str
    standard: str
    dropped: tuple[str, ...]

    @classmethod
    def of(cls, given: Any, name: str = "JSON schema") -> "JsonExpression":
        """
        Raises:
            EngineError: `given` is no schema, or nothing is valid under it. The message begins with `name`, and the
                path within the schema where that is known.
        """
        try:
            standard = standard_schema(given)
            nearest = grammar_schema(standard.schema)
        except EngineError as error:
            raise EngineError(f"{name}: {error}") from None
        except RecursionError:
            raise EngineError(f"{name}: it has too many levels") from None
        if nearest.schema is False:
            raise EngineError(f"{name}: no text can be what it asks for")
        expression = lark_expression(nearest.schema)
        dropped = standard.dropped + nearest.dropped + (() if expression.complete else ("large numbers",))
        return cls(expression.text, json.dumps(standard.schema), dropped)


def _check_numbers(kind: str, text: str) -> None:
    """Raises EngineError if the schema at the beginning of `text` has a number of at most -2^63.

    llguidance negates bounds as 64-bit integers. The negated -2^63 is -2^63 again, so a range of it alone is split
    without end, until the stack is full and the process dies.
    """

    def check(digits: str) -> float:
        if float(digits) <= -(2.0**63):
            raise EngineError(
                f"{kind}: {digits[:40]} is too small a number for a schema; the least is above -2^63"
            )
        return 0.0

    decoder = json.JSONDecoder(parse_int=check, parse_float=check)
    try:
        decoder.raw_decode(text)
    except ValueError:
        return  # the compiler says what is wrong
    except RecursionError:
        raise EngineError(f"{kind}: a schema has too many levels") from None


def _parsed(text: str) -> Any:
    if len(text) > MAX_CHARACTERS:
        raise EngineError(
            f"JSON schema: {len(text)} characters are more than the {MAX_CHARACTERS} that are accepted"
        )
    try:
        return strict_json.loads(text)
    except strict_json.StrictJSONError as error:
        raise EngineError(f"JSON schema: it is no JSON: {error}") from None


def _slashes_escaped(pattern: str) -> str:
    """A regex between Lark's slashes: `/` and line ends escaped, what is escaped already left alone."""
    escaped = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    return re.sub(
        r"\\(.)|[/\n\r]",
        lambda found: escaped.get(found[1] or found[0], found[0]),
        pattern,
        flags=re.DOTALL,
    )
