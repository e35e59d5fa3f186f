"""The terminal's clipboard, also over SSH: the control sequence OSC 52 of xterm ("Manipulate Selection Data")."""

import base64
import sys

from quengine.errors import EngineError


def copy(text: str) -> None:
    """Ask the terminal to take `text` into its clipboard. Raises EngineError off a terminal."""
    if not sys.stdout.isatty():
        raise EngineError("/copy needs a terminal, whose clipboard takes the answer")
    data = base64.b64encode(text.encode(errors="replace")).decode()
    sys.stdout.write(f"\x1b]52;c;{data}\x07")
    sys.stdout.flush()
