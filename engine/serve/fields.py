"""Reads a request's JSON object field by field: what is wrong or not known to anybody is a 400 that names it.

A field that is null counts as not given, as OpenAI's clients send it.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

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
        whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        if isinstance(value, bool) or not (isinstance(value, int) or whole):
            raise self.wrong(key, "must be a whole number")
        number = int(value)
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

    def ignore(self, *keys: str) -> None:
        """Fields that change nothing here."""
        self._known.update(keys)

    def neutral(self, key: str, *values: Any) -> None:
        """A field whose effect is not supported: only values that ask for none of it pass."""
        value = self.any(key)
        if value is not None and value not in values:
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
    for position, token in enumerate(values):
        if type(token) is not int or not 0 <= token < vocab_size:
            shown = json.dumps(token)[:40]
            raise bad_request(f"{name}[{position}] = {shown}: must be a token id below {vocab_size}", name)
    return list(values)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def _range(low: int | None, high: int | None) -> str:
    if high is None:
        return f"must be at least {low}"
    return f"must be at most {high}" if low is None else f"must be from {low} to {high}"
