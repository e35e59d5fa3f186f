"""Model text on its way to standard output: as it is into a pipe, without control characters on a terminal.

A model may generate escape sequences, and a terminal obeys them (move the cursor, set the title, paste). On a
terminal each control character but newline and tab is therefore shown as its code, such as \\x1b. Reports, which are
for people wherever they go, have names from model files shown so in any case (`write_line`).
"""

import json
import sys
from typing import Any

from quengine.errors import visible

# What JSON leaves as it is and a terminal may obey, or no output can encode.
_IN_JSON = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *range(0xD800, 0xE000))}


def write_text(text: str) -> None:
    """Write a piece of generated text to standard output now."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_line(line: str) -> None:
    """Write one line of a report to standard output; names in it may come from a model's file."""
    sys.stdout.write(visible(line).replace("\n", "\\n") + "\n")


def json_line(value: Any) -> str:
    """`value` as one line of JSON, readable text but for control characters and lone surrogates."""
    return json.dumps(value, ensure_ascii=False).translate(_IN_JSON)
