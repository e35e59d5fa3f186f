"""`format` in a JSON schema: which are enforced token by token, which are checked, and which only describe.

A format that a validator has no grammar for is an annotation (JSON Schema 2020-12, Validation, section 7.2.1), and
programs write many of their own: `password`, `path`, `binary` (pydantic), `int32`, `double` (OpenAPI).
"""

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
"""Formats of which llguidance's grammars allow what is none, as the 29th of February in any year, or an email
address of any length."""

ENFORCED_FORMATS = frozenset({"duration", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Those that llguidance has a grammar for."""

CHECKED_FORMATS = frozenset(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"}
) | {"uri-reference", "uri-template"}
"""Those that only the check of the finished text knows."""
