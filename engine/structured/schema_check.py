"""Whether a finished text is valid under its schema, which a grammar enforces as far as it can (`schema_grammar`)."""

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quengine.platform import strict_json

if TYPE_CHECKING:
    from jsonschema_rs import Draft202012Validator

_STEPS = 100_000
"""The most steps back that a pattern may take: a hostile one ends, and counts as not matched."""
_MOST = 300


def schema_violation(schema: str, text: str) -> str | None:
    """What of `text` is not valid under a schema (`ConstraintSpec.schema`), in one line; None where all is.

    Formats are checked too. An empty schema asks for nothing.
    """
    if not schema:
        return None
    try:
        value = strict_json.loads(text)
    except strict_json.StrictJSONError as error:
        return f"it is no JSON: {error}"[:_MOST]
    return value_violation(schema, value)


def value_violation(schema: str, value: Any) -> str | None:
    """The same for a value."""
    validator = _validator(schema)
    if validator is None:
        return None
    try:
        error = next(validator.iter_errors(value), None)
    except ValueError:  # a pattern that gave up
        return "a pattern needs too many steps"
    if error is None:
        return None
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
    return f"{place.lstrip('.')}: {error.message}".removeprefix(": ").replace("\n", " ")[:_MOST]


@lru_cache(maxsize=64)
def _validator(schema: str) -> "Draft202012Validator | None":
    from jsonschema_rs import Draft202012Validator, FancyRegexOptions

    options = FancyRegexOptions(backtrack_limit=_STEPS, size_limit=1 << 20, dfa_size_limit=1 << 20)
    given = json.loads(schema)
    try:
        return Draft202012Validator(given, validate_formats=True, offline=True, pattern_options=options)
    except ValueError:  # a pattern that is none of ECMA's
        return Draft202012Validator(_without_patterns(given), validate_formats=True, offline=True)


def _without_patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_patterns(value) for key, value in schema.items() if key != "pattern"}
