"""Reads the text and JSON files of a Hugging Face folder, which anybody may have written.

What comes back is plain: numbers are finite, text can be encoded, and the memory it takes is bounded.
"""

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from quengine.errors import EngineError

MAX_JSON_BYTES = 64 << 20
MAX_TEXT_BYTES = 4 << 20
# A JSON text of nothing but brackets takes 20 times its bytes when parsed. The largest tokenizers in use have half a
# million merges, each a list of two.
MAX_CONTAINERS = 1 << 21
MAX_VALUES = 1 << 22
MAX_DIGITS = 100
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in `path`.

    Raises EngineError: there is no such file, it is too large or no JSON object, or has a number that is not finite
    or text that is not Unicode.
    """
    value = _parsed(path)
    if not isinstance(value, dict):
        raise EngineError(f"{path}: must hold a JSON object")
    return value


def read_json_array(path: Path) -> Sequence[Any]:
    """The JSON array in `path`. Raises EngineError as `read_json` does."""
    value = _parsed(path)
    if not isinstance(value, list):
        raise EngineError(f"{path}: must hold a JSON array")
    return value


def _parsed(path: Path) -> Any:
    raw = _read(path, MAX_JSON_BYTES)
    containers, values = raw.count(b"[") + raw.count(b"{"), raw.count(b",")
    if containers > MAX_CONTAINERS or values > MAX_VALUES:
        raise EngineError(f"{path}: too many values for a file of its kind: {containers + values}")
    try:
        value = json.loads(
            raw.decode("utf-8"), parse_int=_integer, parse_float=_float, parse_constant=_refuse_constant
        )
        if _SURROGATE.search(raw):  # most are halves of pairs, which are fine
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise EngineError(f"{path}: has half of a surrogate pair, which is no Unicode text") from None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path}: {error}") from None
    return value


def read_lenient_text(path: Path) -> str:
    """The text in `path`, with U+FFFD for bytes that are no UTF-8. Raises EngineError: it is missing, or too large."""
    return _read(path, MAX_TEXT_BYTES).decode("utf-8", "replace")


def _read(path: Path, limit: int) -> bytes:
    try:
        # A named pipe would make an ordinary open wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise EngineError(f"{path}: not a regular file")
            raw = file.read(limit + 1)
    except FileNotFoundError:
        raise EngineError(f"{path}: no such file") from None
    except OSError as error:
        raise EngineError(f"{path}: {error.strerror or error}") from None
    if len(raw) > limit:
        raise EngineError(f"{path}: {path.stat().st_size} bytes, over the limit of {limit}")
    return raw


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"{digits[:20]}... is a number of {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise ValueError(f"{digits[:40]} is too large for a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
