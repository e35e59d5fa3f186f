"""Reads a request's JSON object field by field: what is wrong or not known to anybody is a 400 that names it.

A field that is null counts as not given, as OpenAI's clients send it. A `Scalar` says both how a field is read and
what the OpenAPI document tells of it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quengine.platform import strict_json
from quengine.request.sampling_params import Range
from quengine.serve.schemas.errors import ApiError, bad_request


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError."""
    try:
        value = strict_json.loads(raw.decode(json.detect_encoding(raw)))
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not JSON: it is not {error.encoding} at byte {error.start}") from None
    except strict_json.StrictJSONError as error:
        name = error.place[:80] if error.place else None
        raise bad_request(f"the body is not JSON: {error}", name, "invalid_value") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {json_type(value)}")
    return value


def json_type(value: object) -> str:
    """What JSON calls the type of a value."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object")


ANY_NUMBER = Range()


@dataclass(frozen=True)
class Scalar:
    """A field of one number or truth value: its type and range."""

    kind: Literal["number", "integer", "boolean"]
    range: Range = ANY_NUMBER
    about: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """The field as JSON schema has it."""
        limits = {
            "minimum": self.range.low,
            "maximum": self.range.high,
            "exclusiveMinimum": self.range.above,
        }
        given = {key: value for key, value in limits.items() if value is not None}
        return {"type": self.kind, **given, **({"description": self.about} if self.about else {})}


class Fields:
    """An object's fields. `finish` refuses those that nothing has read.

    `path` is how errors call the object, "" for the body itself.
    """

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._known: set[str] = set()

    def name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def given(self, key: str) -> bool:
        return self._values.get(key) is not None

    def any(self, key: str) -> Any:
        """The value as it is, None if not given."""
        self._known.add(key)
        return self._values.get(key)

    def text(self, key: str) -> str | None:
        value: str | None = self._typed(key, str, "a string")
        return value

    def flag(self, key: str) -> bool | None:
        value: bool | None = self._typed(key, bool, "true or false")
        return value

    def array(self, key: str) -> list[Any] | None:
        value: list[Any] | None = self._typed(key, list, "an array")
        return value

    def object(self, key: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self._typed(key, dict, "an object")
        return value

    def integer(self, key: str, allowed: Range) -> int | None:
        """A whole number in its range, which may be written 1.0."""
        value = self.any(key)
        if value is None:
            return None
        number = whole_number(value)
        if number is None:
            raise self.wrong(key, f"must be a whole number {allowed}")
        if not allowed.holds(number):
            raise self.wrong(key, f"must be {allowed}")
        return number

    def number(self, key: str, allowed: Range) -> float | None:
        value = self.any(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"must be a number {allowed}")
        if not allowed.holds(value):
            raise self.wrong(key, f"must be {allowed}")
        return float(value)

    def scalar(self, key: str, field: Scalar) -> Any:
        """A field that is read as its table says."""
        if field.kind == "boolean":
            return self.flag(key)
        return self.integer(key, field.range) if field.kind == "integer" else self.number(key, field.range)

    def ignore(self, *keys: str) -> None:
        """Fields that change nothing here."""
        self._known.update(keys)

    def neutral(self, key: str, *values: Any) -> None:
        """A field whose effect is not supported: only values that ask for none of it pass."""
        value = self.any(key)
        # 0 is equal to False in Python, and not in JSON.
        same = [v for v in values if v == value and isinstance(v, bool) == isinstance(value, bool)]
        if value is not None and not same:
            allowed = f"; only {' or '.join(json.dumps(v) for v in values)} is accepted" if values else ""
            raise bad_request(f"{self.name(key)} is not supported{allowed}", self.name(key), "unsupported")

    def wrong(self, key: str, rule: str) -> ApiError:
        return bad_request(
            f"{self.name(key)} = {shown(self._values.get(key))}: {rule}", self.name(key), "invalid_value"
        )

    def finish(self) -> None:
        """Raises ApiError for the first field that is given and that nothing has asked for."""
        unknown = [key for key, value in self._values.items() if key not in self._known and value is not None]
        if unknown:
            name = self.name(unknown[0])
            raise bad_request(f"unknown parameter: {name[:80]}", name[:80], "unknown_parameter")

    def _typed(self, key: str, kind: Callable[..., Any], rule: str) -> Any:
        value = self.any(key)
        if value is not None and type(value) is not kind:
            raise self.wrong(key, f"must be {rule}")
        return value


def shown(value: Any, most: int = 60) -> str:
    """A JSON value as an error tells it, in at most so many characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 3] + "..."


def token_ids(values: Sequence[Any], name: str, vocab_size: int) -> list[int]:
    """`values` as token ids of a vocabulary. Raises ApiError."""
    ids = [whole_number(value) for value in values]
    for position, token in enumerate(ids):
        if token is None or not 0 <= token < vocab_size:
            value = shown(values[position], 40)
            rule = f"must be a token id from 0 to {vocab_size - 1}"
            raise bad_request(f"{name}[{position}] = {value}: {rule}", name, "invalid_value")
    return [token for token in ids if token is not None]


def whole_number(value: object) -> int | None:
    """A JSON number without a fraction, which may be written 1.0; None for anything else."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
