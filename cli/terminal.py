"""Model text on its way to standard output: as it is into a pipe, without control characters on a terminal.

A model may generate escape sequences, and a terminal obeys them (move the cursor, set the title, paste). On a
terminal each control character but newline and tab is therefore shown as its code, such as \\x1b.
"""

import re
import sys

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write_text(text: str) -> None:
    """Write a piece of generated text to standard output now."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def visible(text: str) -> str:
    """`text` with control characters, newline and tab excepted, spelled as \\x1b and the like."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
