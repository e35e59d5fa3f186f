"""Whether a finished text is valid under its schema, which a grammar enforces as far as it can (`schema_grammar`).

Some values of `format` are enforced token by token, some are checked at the end, and others only describe: a format
that is unknown to a validator is an annotation (JSON Schema 2020-12, Validation, section 7.2.1), and programs write
many of their own: `password`, `path`, `binary` (pydantic), `int32`, `double` (OpenAPI).
"""

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quengine.platform import strict_json

if TYPE_CHECKING:
    from jsonschema_rs import Draft202012Validator

_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_LONG_MONTHS = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTHS = r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = rf"(?:{_LONG_MONTHS}|{_SHORT_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]"
_LOCAL = "|".join(
    rf"{_ATOM}{{1,{most}}}(?:\.{_ATOM}{{1,{most}}}){{{dots}}}"
    for most, dots in ((64, 0), (31, 1), (20, 2), (15, 3), (12, 4))
)
"""At most 64 characters between dots and with them."""

FORMAT_PATTERNS = {
    "time": f"^{_TIME}$",
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "email": f"^(?:{_LOCAL})@{_LABEL}(?:\\.{_LABEL}){{0,3}}$",
}
"""Formats for which llguidance's grammars allow too much, such as the 29th of February in any year, or an email address
of any length."""

ENFORCED_FORMATS = frozenset({"duration", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats for which llguidance has a grammar."""

CHECKED_FORMATS = frozenset(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"}
) | {"uri-reference", "uri-template"}
"""Formats that only the check of the finished text enforces."""


_STEPS = 100_000
"""The most backtracking steps of a pattern. A hostile one is stopped there, and counts as not matched."""
_MOST = 300


def schema_violation(schema: str, text: str) -> str | None:
    """The first violation of a schema (`ConstraintSpec.schema`) in `text`, in one line; None: the text is valid.

    Formats are checked too. An empty schema allows every text.
    """
    if not schema:
        return None
    try:
        value = strict_json.loads(text)
    except strict_json.StrictJSONError as error:
        return f"it is no JSON: {error}"[:_MOST]
    return value_violation(schema, value)


def value_violation(schema: str, value: Any) -> str | None:
    """As `schema_violation`, for a value."""
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
