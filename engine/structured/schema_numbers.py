"""Numbers of a schema that the grammar's compiler cannot read, as regular expressions.

    exact = exact_numbers({"type": "integer", "minimum": 0, "maximum": 2**64 - 1})
    {"type": "integer", EXACT: "..."}      integers whose JSON text the regular expression matches as a whole

llguidance reads the numbers of a schema as doubles, and bounds of integers as 64-bit integers: it turns 2^53 + 1 into
2^53, and -2^63 ends the process. `schema_rules` writes a node with EXACT into the grammar.
"""

import json
import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

EXACT = "x-exact"
"""The keyword with the regular expression of a node's number. Such a node has no other keyword than `type`."""

_MOST = 2**53
_TOO_LONG: int = 10**60
"""Larger bounds are left to the check of the finished text, since a range has a part for each digit."""
_MAX_MULTIPLES = 500
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
NUMERIC = _BOUNDS | {"multipleOf"}


def is_large(value: Any) -> bool:
    """Whether a value contains a number that the compiler cannot read exactly: above 2^53, or below 1e-9."""
    if isinstance(value, dict):
        return any(map(is_large, value.values()))
    if isinstance(value, list):
        return any(map(is_large, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) > _MOST or (value != 0 and abs(value) < 1e-9)


def exact_value(value: Any) -> dict[str, Any]:
    """The schema of one value that contains large numbers."""
    if not is_large(value):
        return {"const": value}
    if isinstance(value, dict):
        parts = {name: exact_value(part) for name, part in value.items()}
        closed = {"required": list(parts), "additionalProperties": False}
        return {"type": "object", "properties": parts, **closed}
    if isinstance(value, list):
        count = {"minItems": len(value), "maxItems": len(value)}
        return {
            "type": "array",
            "prefixItems": [exact_value(part) for part in value],
            "items": False,
            **count,
        }
    return {"type": "number", EXACT: "|".join(_spellings(value))}


def exact_values(values: Iterable[Any]) -> list[dict[str, Any]]:
    """Schemas of values that contain large numbers: one schema for all that are numbers, and one for each other."""
    given = list(values)
    numbers = [each for each in given if isinstance(each, int | float)]
    written = dict.fromkeys(text for each in numbers for text in _spellings(each))
    made = [{"type": "number", EXACT: "|".join(written)}] if numbers else []
    return made + [exact_value(each) for each in given if not isinstance(each, int | float)]


def exact_numbers(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """A node for the numbers of `type` within the bounds; None where their regular expression would be too large.

    `schema` has one of the types "integer" and "number", and keywords of NUMERIC.
    """
    low, high = _integers(schema) if schema["type"] == "integer" else (None, None)
    multiple = schema.get("multipleOf")
    if schema["type"] == "integer" and multiple not in (None, 1):
        return _multiples(low, high, multiple)
    if multiple not in (None, 1) or any(abs(schema[key]) >= _TOO_LONG for key in _BOUNDS & schema.keys()):
        return None
    if schema["type"] == "integer":
        return {"type": "integer", EXACT: _integer_range(low, high)}
    regex = _number_range(schema)
    return None if regex is None else {"type": "number", EXACT: regex}


_NOTHING = "[^\\s\\S]"
"""A regular expression that matches no text."""


def is_nothing(exact: Mapping[str, str]) -> bool:
    """Whether no number is valid under a node of `exact_numbers`."""
    return exact[EXACT] == _NOTHING


def _spellings(value: float) -> list[str]:
    """The ways in which programs write a number, as regular expressions (only `.` and `+` are escaped)."""
    plain = format(Decimal(repr(value)), "f").removesuffix(".0")
    written = [plain, json.dumps(value)] if len(plain) <= 400 else [json.dumps(value)]
    return [each.replace(".", "\\.").replace("+", "\\+") for each in dict.fromkeys(written)]


def _integers(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The least and the greatest integer within the bounds; None without one."""
    least = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    least += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    most = [math.floor(schema["maximum"])] if "maximum" in schema else []
    most += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return max(least, default=None), min(most, default=None)


def _multiples(low: int | None, high: int | None, multiple: float) -> dict[str, Any] | None:
    """The multiples between two bounds, if they are few. Without bounds the automaton has a state for each
    remainder."""
    if low is None or high is None or multiple != int(multiple):
        return None
    step = int(multiple)
    first, last = -(-low // step), high // step
    if last - first >= _MAX_MULTIPLES:
        return None
    values = [str(step * n) for n in range(first, last + 1)]
    return {"type": "integer", EXACT: "|".join(values) or _NOTHING}


def _integer_range(low: int | None, high: int | None) -> str:
    """The regular expression of integers between two bounds."""
    if low is not None and high is not None and low > high:
        return _NOTHING
    parts: list[str] = []
    if high is None or high >= 0:
        parts.append(f"(?:{_naturals(max(low or 0, 0), high)})")
    if low is None or low < 0:
        highest = None if low is None else -low
        parts.append(f"-(?:{_naturals(max(-(high if high is not None else -1), 1), highest)})")
    return "|".join(parts)


def _naturals(low: int, high: int | None) -> str:
    """Integers of at least `low` >= 0, without leading zeros."""
    if high is None:
        digits = len(str(low))
        longer = f"[1-9][0-9]{{{digits},}}"
        return f"{_naturals(low, 10**digits - 1)}|{longer}"
    parts: list[str] = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        least, most = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
        if max(low, least) <= min(high, most):
            parts.append(_of_length(str(max(low, least)), str(min(high, most))))
    return "|".join(parts) or _NOTHING


def _of_length(low: str, high: str) -> str:
    """Numbers between two numbers with the same number of digits."""
    rest = len(low) - 1
    if rest == 0:
        return f"[{low}-{high}]"
    if low == "0" * (rest + 1) and high == "9" * (rest + 1):
        return f"[0-9]{{{rest + 1}}}"
    first, last = int(low[0]), int(high[0])
    if first == last:
        return f"{first}(?:{_of_length(low[1:], high[1:])})"
    parts: list[str] = []
    if low[1:] != "0" * rest:
        parts.append(f"{first}(?:{_of_length(low[1:], '9' * rest)})")
        first += 1
    ending = high[1:] != "9" * rest
    if first <= last - ending:
        parts.append(f"[{first}-{last - ending}][0-9]{{{rest}}}")
    if ending:
        parts.append(f"{last}(?:{_of_length('0' * rest, high[1:])})")
    return "|".join(parts)


def _number_range(schema: Mapping[str, Any]) -> str | None:
    """Numbers without exponents between two whole bounds; None where a bound is not whole."""
    if any(schema[key] != int(schema[key]) for key in _BOUNDS & schema.keys()):
        return None
    below = {key: int(schema[key]) for key in _BOUNDS & schema.keys()}
    low, open_low = _strictest(below.get("minimum"), below.get("exclusiveMinimum"), max)
    high, open_high = _strictest(below.get("maximum"), below.get("exclusiveMaximum"), min)
    parts = [_magnitudes(max(low or 0, 0), open_low and (low or 0) >= 0 and low is not None, high, open_high)]
    if low is None or low < 0:
        least = 0 if high is None or high > 0 else -high
        most = None if low is None else -low
        closed = high is not None and high <= 0 and open_high
        parts += [f"-(?:{each})" for each in [_magnitudes(least, closed, most, open_low)] if each]
    return "|".join(each for each in parts if each) or _NOTHING


def _strictest(closed: int | None, opened: int | None, choose: Any) -> tuple[int | None, bool]:
    """The stricter of two bounds, and whether it excludes the bound itself."""
    if opened is None or closed is None:
        return (closed, False) if opened is None else (opened, True)
    chosen = choose(closed, opened)
    return chosen, chosen == opened


def _magnitudes(low: int, open_low: bool, high: int | None, open_high: bool) -> str:
    """Numbers from `low` >= 0 to `high`, without sign; "" where there are none."""
    if high is not None and (high < low or (high == low and (open_low or open_high))):
        return ""
    if high == low:
        return _with_fraction(low, low, "0")
    parts = [f"{low}\\.[0-9]*[1-9][0-9]*"] if open_low and low < _MOST else []
    first, last = low + open_low, None if high is None else high - 1
    if last is None or first <= last:
        parts.append(_with_fraction(first, last, "0-9"))
    if high is not None and not open_high:
        parts.append(_with_fraction(high, high, "0"))
    return "|".join(parts)


def _with_fraction(low: int, high: int | None, digits: str) -> str:
    """Integers between two bounds, below 2^53 with or without a fraction of some digits: above it no double has one."""
    parts: list[str] = []
    if low < _MOST:
        below = _MOST - 1 if high is None else min(high, _MOST - 1)
        parts.append(f"(?:{_naturals(low, below)})(?:\\.[{digits}]+)?")
    if high is None or high >= _MOST:
        parts.append(_naturals(max(low, _MOST), high))
    return "|".join(parts)


def any_of(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One of several schemas."""
    made = list(parts)
    return made[0] if len(made) == 1 else {"anyOf": made}
