"""Text for the user: model text on standard output, lines of reports, and notes on standard error.

A model may generate escape sequences, and a terminal obeys them (move the cursor, set the title, paste). On a
terminal each control character but newline and tab is therefore shown as its code, such as \\x1b. Reports, which are
for people wherever they go, have names from model files shown so in any case (`write_line`).
"""

import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from quengine.errors import EngineError, visible

if TYPE_CHECKING:
    from quengine.structured.tool_calls import Delta

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
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
                sys.stdout.write(f"{DIM}{visible(delta.text)}{PLAIN}")
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


def confirm_deletion(question: str, command: str) -> bool:
    """Ask whether to delete. Raises EngineError off a terminal, with the `command` that does not ask."""
    import typer

    if not sys.stdin.isatty():
        raise EngineError(f"deleting needs a yes: standard input is no terminal, so say so with: {command}")
    agreed = typer.confirm(question, err=True)
    if not agreed:
        typer.echo("nothing deleted", err=True)
    return agreed


def note(text: str) -> None:
    """Print one line to standard error; on a terminal words that do not fit it begin the next."""
    line = f"  {visible(text)}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        line = textwrap.fill(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    print(line, file=sys.stderr)
