"""Model text on its way to standard output: as it is into a pipe, without control characters on a terminal.

A model may generate escape sequences, and a terminal obeys them (move the cursor, set the title, paste). On a
terminal each control character but newline and tab is therefore shown as its code, such as \\x1b. Reports, which are
for people wherever they go, have names from model files shown so in any case (`write_line`).
"""

import json
import sys
from typing import TYPE_CHECKING, Any

from quengine.errors import visible

if TYPE_CHECKING:
    from quengine.structured.tool_calls import Delta

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# What JSON leaves as it is and a terminal may obey, or no output can encode.
_IN_JSON = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *range(0xD800, 0xE000))}


def write_text(text: str) -> None:
    """Write a piece of generated text to standard output now."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class AnswerPrinter:
    """Writes an answer's parts as they come: its text, and on a terminal, dimmed before it, what the model thinks."""

    def __init__(self) -> None:
        self._thinking = False

    def write(self, delta: "Delta") -> None:
        from quengine.structured.tool_calls import ReasoningDelta, TextDelta

        if isinstance(delta, ReasoningDelta):
            if sys.stdout.isatty():
                self._thinking = True
                sys.stdout.write(f"{_DIM}{visible(delta.text)}{_PLAIN}")
                sys.stdout.flush()
        elif isinstance(delta, TextDelta):
            write_text(f"\n\n{delta.text}" if self._thinking else delta.text)
            self._thinking = False

    def close(self) -> None:
        """Nothing is held back."""


def write_line(line: str) -> None:
    """Write one line of a report to standard output; names in it may come from a model's file."""
    sys.stdout.write(visible(line).replace("\n", "\\n") + "\n")


def json_line(value: Any) -> str:
    """`value` as one line of JSON, readable text but for control characters and lone surrogates."""
    return json.dumps(value, ensure_ascii=False).translate(_IN_JSON)
