"""Reads a request's JSON object field by field: what is wrong or not known to anybody is a 400 that names it.

A field that is null counts as not given, as OpenAI's clients send it. A `Scalar` says both how a field is read and
what the OpenAPI document tells of it.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from quengine.serve.errors import ApiError, bad_request


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError."""
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {json_type(value)}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def json_type(value: object) -> str:
    """What JSON calls the type of a value."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object")


@dataclass(frozen=True)
class Scalar:
    """A field of one number or truth value: its type and range. `above` is a limit that is itself excluded."""

    kind: Literal["number", "integer", "boolean"]
    low: float | None = None
    high: float | None = None
    above: float | None = None
    about: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """The field as JSON schema has it."""
        limits = {"minimum": self.low, "maximum": self.high, "exclusiveMinimum": self.above}
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

    def integer(self, key: str, low: int | None = None, high: int | None = None) -> int | None:
        value = self.any(key)
        if value is None:
            return None
        number = whole_number(value)
        if number is None:
            raise self.wrong(key, "must be a whole number")
        if (low is not None and number < low) or (high is not None and number > high):
            raise self.wrong(key, _range(low, high))
        return number

    def number(self, key: str) -> float | None:
        value = self.any(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise self.wrong(key, "must be a finite number")
        return float(value)

    def scalar(self, key: str, field: Scalar) -> Any:
        """A field that is read as its table says."""
        if field.kind == "boolean":
            return self.flag(key)
        value = self.integer(key) if field.kind == "integer" else self.number(key)
        if value is None:
            return None
        if field.above is not None and value <= field.above:
            raise self.wrong(key, f"must be above {field.above:g}")
        if (field.low is not None and value < field.low) or (field.high is not None and value > field.high):
            raise self.wrong(key, _range(field.low, field.high))
        return value

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
        shown = json.dumps(self._values.get(key), ensure_ascii=False)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return bad_request(f"{self.name(key)} = {shown}: {rule}", self.name(key), "invalid_value")

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


def token_ids(values: Sequence[Any], name: str, vocab_size: int) -> list[int]:
    """`values` as token ids of a vocabulary. Raises ApiError."""
    ids = [whole_number(value) for value in values]
    for position, token in enumerate(ids):
        if token is None or not 0 <= token < vocab_size:
            shown = json.dumps(values[position])[:40]
            raise bad_request(f"{name}[{position}] = {shown}: must be a token id below {vocab_size}", name)
    return [token for token in ids if token is not None]


def whole_number(value: object) -> int | None:
    """A JSON number without a fraction, which may be written 1.0; None for anything else."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def _range(low: float | None, high: float | None) -> str:
    if high is None:
        return f"must be at least {low}"
    return f"must be at most {high}" if low is None else f"must be from {low} to {high}"
