"""Random JSON schemas, documents that may be valid under them, and texts of random choice under their constraints.

schema = random_schema(rng)                 every keyword that a schema has, in all dialects that are read
text = random_document(rng, schema)         JSON; its keys in the schema's order, no others
is_valid(schema, text)                      under the schema, its objects closed as the constraint closes them
allows(constraint, vocabulary, text)        whether the constraint lets the text through, byte by byte
random_text(rng, constraint, vocabulary)    what a model of no mind would write under the constraint
"""

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import numpy as np

from quengine.models.tokenizer import Tokenizer
from quengine.structured.constraint import Constraint
from quengine.structured.schema_check import schema_violation
from quengine.structured.schema_dialect import standard_schema
from quengine.structured.token_mask import BudgetConstraint

KEYS = ("a", "b", "name", "é", "日本", "🤖", 'q"t', "s/l", "t~x", "two words", "", "$ref", "properties", "\\")
TEXTS = ("", "a", "abc", "é🤖", 'q"\\', "x y", "2024-02-29", "12:30:00Z", "a@b.cd", "12")
PATTERNS = ("^[ab]{1,3}$", "[0-9]+", "^x?$", "^(?:ab|c)*$", "^\\w+$", "é", "^(?=a)a+$", "^[^\\n]{2,5}$")
FORMATS = (
    "time",
    "date",
    "date-time",
    "uuid",
    "ipv4",
    "ipv6",
    "email",
    "hostname",
    "uri",
    "duration",
    "int32",
)
SAMPLES = {
    "time": ("12:30:00Z", "23:59:59.5+01:00", "12:30"),
    "date": ("2024-02-29", "1999-12-31", "2023-02-29"),
    "date-time": ("2024-02-29T12:00:00Z", "2023-01-01t00:00:00-05:30", "2023-13-01T00:00:00Z"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000",),
    "ipv4": ("127.0.0.1", "255.0.10.9"),
    "ipv6": ("::1", "2001:db8:0:0:0:0:0:1", "2001:db8::8a2e:370:7334"),
    "email": ("a@b.cd", "first.last+x@example.org"),
    "hostname": ("localhost", "a-b.example.org"),
    "uri": ("https://example.org/a?b=c#d", "urn:x:y", "mailto:a@b.cd"),
    "duration": ("P1Y", "PT5M", "P1DT12H"),
}
_HUGE = re.compile(rb"[0-9][eE][+-]?[0-9]{3}|[0-9]{300}")  # numbers that no double is
FORMAT_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any] | bool:
    """A schema, with definitions that it refers to now and then."""
    schema = _schema(rng, depth, [])
    if isinstance(schema, dict) and rng.random() < 0.2:
        place = rng.choice(("$defs", "definitions"))
        name = rng.choice(("Node", "a/b", "ü", "x~y"))
        pointer = name.replace("~", "~0").replace("/", "~1")
        target = rng.choice((_object, _array))(rng, depth - 1, [f"#/{place}/{pointer}"])
        schema = {**schema, place: {name: target}}
        if schema.get("properties"):
            key = rng.choice(list(schema["properties"]))
            schema["properties"] = {**schema["properties"], key: {"$ref": f"#/{place}/{pointer}"}}
        else:
            schema["$ref"] = f"#/{place}/{pointer}"
    if isinstance(schema, dict) and rng.random() < 0.1:
        schema["$schema"] = rng.choice(
            ("http://json-schema.org/draft-07/schema#", "https://example.org/mine")
        )
    return schema


def _schema(rng: random.Random, depth: int, references: list[str]) -> dict[str, Any] | bool:
    kind = rng.choice(_KINDS if depth > 0 else _FLAT)
    if references and rng.random() < 0.15:
        return {"$ref": rng.choice(references)}
    made = kind(rng, depth, references)
    if isinstance(made, dict) and rng.random() < 0.1:
        made["description"] = "as it is"
    if isinstance(made, dict) and rng.random() < 0.05 and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def _text(rng: random.Random, depth: int, references: list[str]) -> dict[str, Any]:
    del depth, references
    made: dict[str, Any] = {"type": "string"}
    how = rng.random()
    if how < 0.3:
        made["pattern"] = rng.choice(PATTERNS)
    elif how < 0.6:
        made["format"] = rng.choice(FORMATS)
    elif how < 0.8:
        made["minLength"] = rng.randrange(3)
        made["maxLength"] = made["minLength"] + rng.randrange(4)
    return made


def _number(rng: random.Random, depth: int, references: list[str]) -> dict[str, Any]:
    del depth, references
    made: dict[str, Any] = {"type": rng.choice(("integer", "number"))}
    least = rng.randrange(-20, 20)
    if rng.random() < 0.5:
        made[rng.choice(("minimum", "exclusiveMinimum"))] = least
    if rng.random() < 0.5:
        made[rng.choice(("maximum", "exclusiveMaximum"))] = least + rng.randrange(2, 40)
    if rng.random() < 0.2:
        made["multipleOf"] = rng.choice((2, 3, 5, 0.5))
    return made


def _plain(rng: random.Random, depth: int, references: list[str]) -> dict[str, Any]:
    del depth, references
    return {"type": rng.choice(("boolean", "null", "string", "integer"))}


def _values(rng: random.Random, depth: int, references: list[str]) -> dict[str, Any]:
    del depth, references
    values = [_value(rng, 1) for _ in range(rng.randrange(1, 4))]
    return {"enum": values} if rng.random() < 0.7 else {"const": values[0]}


def _array(rng: random.Random, depth: int, references: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.4:
        made["prefixItems"] = [_schema(rng, depth - 1, references) for _ in range(rng.randrange(1, 4))]
    if rng.random() < 0.7 or "prefixItems" in made:
        made["items"] = (
            False if rng.random() < 0.3 and "prefixItems" in made else _schema(rng, depth - 1, references)
        )
    if rng.random() < 0.3:
        made["minItems"] = rng.randrange(3)
    if rng.random() < 0.3:
        made["maxItems"] = made.get("minItems", 0) + rng.randrange(3)
    if rng.random() < 0.15:
        made["uniqueItems"] = True
    if rng.random() < 0.1:
        made["contains"] = _schema(rng, 0, references)
    return made


def _object(rng: random.Random, depth: int, references: list[str]) -> dict[str, Any]:
    keys = rng.sample(KEYS, rng.randrange(0, 5))
    made: dict[str, Any] = {"type": "object"}
    if keys or rng.random() < 0.5:
        made["properties"] = {key: _schema(rng, depth - 1, references) for key in keys}
    made["required"] = [key for key in keys if rng.random() < 0.5]
    how = rng.random()
    if how < 0.2:
        made["additionalProperties"] = False
    elif how < 0.4:
        made["additionalProperties"] = _schema(rng, 0, references)
    elif how < 0.5:
        made["patternProperties"] = {"^x-": _schema(rng, 0, references)}
    if rng.random() < 0.1:
        made[rng.choice(("minProperties", "maxProperties"))] = rng.randrange(3)
    if keys and rng.random() < 0.1:
        made["dependentRequired"] = {keys[0]: [keys[-1]]}
    if rng.random() < 0.05:
        made["propertyNames"] = {"maxLength": 4}
    if keys and rng.random() < 0.1:
        condition = {"properties": {keys[0]: {"const": _value(rng, 0)}}, "required": [keys[0]]}
        made |= {"if": condition, "then": {"required": keys[-1:]}, "else": {"maxProperties": 3}}
    if rng.random() < 0.05:
        made["not"] = {"required": [rng.choice(KEYS)]}
    return made


def _combined(rng: random.Random, depth: int, references: list[str]) -> dict[str, Any]:
    keyword = rng.choice(("anyOf", "oneOf", "allOf", "anyOf"))
    kind = rng.choice((_object, _text, _number, _array)) if keyword == "allOf" else None
    parts = [
        kind(rng, depth - 1, references) if kind else _schema(rng, depth - 1, references)
        for _ in range(rng.randrange(1, 4))
    ]
    return {keyword: parts}


_FLAT = (_text, _number, _plain, _values)
_KINDS = (*_FLAT, _array, _object, _object, _object, _combined)


def _value(rng: random.Random, depth: int) -> Any:
    kinds = 6 if depth else 4
    kind = rng.randrange(kinds)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice((rng.randrange(-50, 50), rng.randrange(-50, 50), rng.randrange(-99, 99) + 0.25))
    if kind in (2, 3):
        return rng.choice(TEXTS)
    if kind == 4:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {key: _value(rng, depth - 1) for key in rng.sample(KEYS, rng.randrange(3))}


def random_document(rng: random.Random, schema: Any) -> str:
    """A document that is often valid under `schema`. Keys in the order of the schema, none that it does not open to."""
    return json.dumps(_document(rng, schema, schema, 6), ensure_ascii=False)


def _document(rng: random.Random, schema: Any, root: Any, depth: int) -> Any:
    if isinstance(schema, bool) or depth == 0:
        return _value(rng, 0)
    if "$ref" in schema:
        return _document(rng, _referred(root, schema["$ref"]), root, depth - 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return _document(rng, rng.choice(schema[keyword]), root, depth - 1)
    if "allOf" in schema:
        values = [_document(rng, part, root, depth - 1) for part in schema["allOf"]]
        if all(isinstance(value, dict) for value in values):
            return {key: value for each in values for key, value in each.items()}
        return values[-1]
    types = schema.get("type", rng.choice(("string", "integer", "object", "array")))
    kind = rng.choice(types) if isinstance(types, list) else types
    if kind == "object":
        return _object_document(rng, schema, root, depth)
    if kind == "array":
        least = schema.get("minItems", 0)
        prefix = schema.get("prefixItems", [])
        count = rng.randrange(least, schema.get("maxItems", least + 3) + 1)
        parts = [*prefix, *[schema.get("items", True)] * count][:count]
        return [_document(rng, part, root, depth - 1) for part in parts if part is not False]
    if kind == "string":
        if "format" in schema:
            return rng.choice(SAMPLES.get(schema["format"], TEXTS))
        return rng.choice([*TEXTS, *["a" * n for n in range(6)]])
    if kind in ("integer", "number"):
        value = rng.randrange(-40, 60)
        return value if kind == "integer" or rng.random() < 0.6 else value + 0.5
    return None if kind == "null" else rng.random() < 0.5


def _object_document(rng: random.Random, schema: Mapping[str, Any], root: Any, depth: int) -> dict[str, Any]:
    required = schema.get("required", ())
    made = {
        key: _document(rng, part, root, depth - 1)
        for key, part in schema.get("properties", {}).items()
        if key in required or rng.random() < 0.6
    }
    rest = schema.get(
        "additionalProperties", "properties" not in schema and "patternProperties" not in schema
    )
    if rest is not False and rng.random() < 0.4:
        made.setdefault("more", _document(rng, rest, root, depth - 1))
    if "patternProperties" in schema and rng.random() < 0.4:
        made["x-1"] = _document(rng, schema["patternProperties"]["^x-"], root, depth - 1)
    return made


def closed(schema: Any, root: Any = None, whole: bool = True) -> Any:
    """A schema under which objects have no keys but those that the schemas of the same value know.

    It closes more than the constraint, which leaves an alternative without `properties` open.
    whole: the schema is all that is said of a value, and no part of it.
    """
    root = schema if root is None else root
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for keyword in ("properties", "patternProperties"):
        if keyword in made:
            made[keyword] = {name: closed(part, root) for name, part in made[keyword].items()}
    for keyword in ("$defs", "definitions"):
        if keyword in made:
            made[keyword] = {name: closed(part, root, False) for name, part in made[keyword].items()}
    for keyword in ("additionalProperties", "items"):
        if keyword in made:
            made[keyword] = closed(made[keyword], root)
    if "prefixItems" in made:
        made["prefixItems"] = [closed(part, root) for part in made["prefixItems"]]
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in made:
            made[keyword] = [closed(part, root, False) for part in made[keyword]]
        if keyword in made and keyword != "allOf":
            made[keyword] = [_known_last(part) for part in made[keyword]]
    for keyword in ("if", "then", "else"):
        if keyword in made:
            made[keyword] = closed(made[keyword], root, False)
    if whole and _knows_keys(schema, root, set()):
        made.setdefault("unevaluatedProperties", False)
    return made


def _known_last(part: Any) -> Any:
    """An alternative whose other keys are the generator's own: those of another alternative may come too early."""
    if not isinstance(part, dict) or part.get("additionalProperties", False) is False:
        return part
    patterns = {**part.get("patternProperties", {}), "^more$": part["additionalProperties"]}
    return {**part, "patternProperties": patterns, "additionalProperties": False}


def _knows_keys(schema: Any, root: Any, seen: set[str]) -> bool:
    """Whether a schema or another of the same value names keys."""
    if not isinstance(schema, dict):
        return False
    if {"properties", "patternProperties"} & schema.keys():
        return True
    parts = [part for keyword in ("allOf", "anyOf", "oneOf") for part in schema.get(keyword, ())]
    parts += [schema[keyword] for keyword in ("if", "then", "else") if keyword in schema]
    if (name := schema.get("$ref", "")) and name not in seen:
        seen.add(name)
        parts.append(_referred(root, name))
    return any(_knows_keys(part, root, seen) for part in parts)


def _referred(root: Any, name: str) -> Any:
    found = root
    for step in name.split("/")[1:]:
        found = found[step.replace("~1", "/").replace("~0", "~")]
    return found


def is_valid(schema: Any, text: str) -> bool:
    """Whether a document is valid by the package jsonschema with closed objects, and by the check of finished texts."""
    validator = jsonschema.Draft202012Validator(closed(schema), format_checker=FORMAT_CHECKER)
    try:
        if not validator.is_valid(json.loads(text)):
            return False
    except RecursionError:  # a reference to itself, under which nothing is valid
        return False
    return schema_violation(json.dumps(standard_schema(schema).schema), text) is None


def bytes_by_id(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The ids of a vocabulary by their bytes."""
    return {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if not tokenizer.is_control(i)}


def allows(constraint: Constraint | BudgetConstraint, ids: Mapping[bytes, int], text: str) -> str | None:
    """None where the text is let through byte by byte to its end; else how far it came."""
    raw = text.encode()
    for n, byte in enumerate(raw):
        token = ids[bytes([byte])]
        if not constraint.allowed()[token]:
            return raw[:n].decode(errors="replace")
        constraint.advance(token)
    assert isinstance(constraint, Constraint)
    return None if constraint.accepting else text


def random_text(
    rng: random.Random, constraint: Constraint, tokenizer: Tokenizer, closing: list[int], limit: int = 400
) -> str | None:
    """A text of random tokens under a constraint; None where it does not end, or has a number beyond a double's.

    closing: tokens that are taken more often, so that it ends.
    """
    out = b""
    for _ in range(limit):
        if constraint.finished:
            break
        mask = constraint.allowed()
        likely = [token for token in closing if mask[token]]
        token = rng.choice(likely) if likely and rng.random() < 0.4 else int(rng.choice(np.flatnonzero(mask)))
        if token in tokenizer.eos_ids:
            break
        out += tokenizer.token_bytes(token)
        constraint.advance(token)
    else:
        return None
    return None if _HUGE.search(out) else out.decode()


def violation(standard: str, schema: Any, text: str) -> str | None:
    """What of a finished text is not valid: by jsonschema, and by the check of finished texts (`standard`)."""
    found = schema_violation(standard, text)
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMAT_CHECKER)
    other = next(validator.iter_errors(json.loads(text)), None)
    return found or (None if other is None else other.message)
