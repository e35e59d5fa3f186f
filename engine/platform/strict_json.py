"""JSON as others wrote it, read so that whatever is read can be handled, sent on and written again.

RFC 8259 leaves open what a reader does with numbers beyond its own, escapes that are half a character, and nesting
without end. Here each of them is an error.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec

MAX_DEPTH = 100
"""Arrays and objects inside each other; a recursive function over a value never comes near Python's own limit."""

_decode = msgspec.json.Decoder().decode
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class StrictJSONError(ValueError):
    """What `loads` refuses. `place` is the member that is to blame, as `stop[0]`, where that is known."""

    def __init__(self, message: str, place: str | None = None) -> None:
        super().__init__(message)
        self.place = place


def loads(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        StrictJSONError: it is not JSON, or holds NaN, an infinity, a number beyond a double (1e999) or of more than
            4300 digits, half of a surrogate pair, or more than MAX_DEPTH levels of arrays and objects.
    """
    try:
        value = _decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # json's errors say where
        value = _loads_with_place(text)
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _loads_with_place(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise StrictJSONError(_TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise StrictJSONError(str(error)) from None
    except StrictJSONError:
        raise
    except ValueError:  # the one other that Python has: its limit for the digits of an integer
        raise StrictJSONError("it holds an integer of more than 4300 digits") from None
    _check_depth(value)
    if _ESCAPED_SURROGATE.search(text) and (place := surrogate_at(value)) is not None:
        where = f"{place[:80]}: " if place else ""
        raise StrictJSONError(f"{where}half of a surrogate pair (\\ud800 to \\udfff) is not text", place)
    return value


def surrogate_at(value: Any, path: str = "") -> str | None:
    """Where in a JSON value a string or key is no Unicode text, as `messages[0].content`; None where all of it is."""
    if isinstance(value, str):
        return None if _is_unicode(value) else path
    for step, part in _parts(value):
        if isinstance(step, str) and not _is_unicode(step):
            return path
        inner = f"{path}[{step}]" if isinstance(step, int) else f"{path}.{step}" if path else step
        if (found := surrogate_at(part, inner)) is not None:
            return found
    return None


_TOO_DEEP = f"it has more than {MAX_DEPTH} levels of arrays and objects"


def _parts(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            part
            for holder in level
            for part in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(part, dict | list)
        ]
        if not level:
            return
    raise StrictJSONError(_TOO_DEEP)


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJSONError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise StrictJSONError(f"{digits[:40]} is beyond the numbers of 64 bits")
    return number
