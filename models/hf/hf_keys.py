"""Typed access to the keys of a config.json, with errors that name them."""

from collections.abc import Mapping
from typing import Any

from quengine.errors import EngineError

# Far above any number in a configuration; products of a few are finite.
MAX_NUMBER = 1e30


def config_error(key: str, problem: str) -> EngineError:
    """The error about a key of config.json."""
    return EngineError(f"config.json: {key}: {problem}")


def integer(keys: Mapping[str, Any], key: str, low: int, high: int, default: int | None = None) -> int:
    """The integer at `key`, or `default` where it is absent or null. Raises EngineError."""
    value = keys.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise config_error(key, "missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise config_error(key, f"{value!r} is not an integer")
    if not low <= value <= high:
        raise config_error(key, f"{value} is not from {low} to {high}")
    return value


def number(keys: Mapping[str, Any], key: str, default: float) -> float:
    """The number at `key`, or `default` where it is absent or null. Raises EngineError."""
    value = keys.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise config_error(key, f"{value!r} is not a number")
    if not abs(value) <= MAX_NUMBER:
        raise config_error(key, f"{value:.6g} is not from -{MAX_NUMBER:g} to {MAX_NUMBER:g}")
    return float(value)


def flag(keys: Mapping[str, Any], key: str) -> bool:
    """The truth value at `key`. Raises EngineError."""
    value = keys.get(key)
    if not isinstance(value, bool):
        raise config_error(key, f"{value!r} is not true or false")
    return value
