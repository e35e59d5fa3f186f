"""Errors meant for the user: one line that says what is wrong, with the values, and what to do about it.

Every layer may import this module; it imports no other. The command line prints the message and exits with
`exit_code`; library callers catch `EngineError`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# Control characters except newline and tab, and lone surrogates, which no encoding can represent.
_SPELLED = {code: f"\\x{code:02x}" for code in (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))}
_SPELLED |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}


def visible(text: str) -> str:
    r"""`text` with control characters, newline and tab excepted, and lone surrogates spelled as \x1b or \ud800.

    Names and messages out of model files are shown to people: a terminal would obey what is in them.
    """
    return text if text.isprintable() else text.translate(_SPELLED)


MAX_MESSAGE = 1500


class EngineError(Exception):
    """An error in what the user supplied: a file, a flag, a prompt that does not fit.

    The message may quote a file, so it is made safe to print: one line of at most MAX_MESSAGE characters plus "...",
    without control characters.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        line = " ".join(visible(message[:MAX_MESSAGE]).splitlines())
        super().__init__(line + "..." if len(message) > MAX_MESSAGE else line)


class CannotRunError(EngineError):
    """The request is valid, but this machine cannot run it: no such device, or too little memory."""

    exit_code = 2


def nearest(name: str, known: "Iterable[str]", prefix: str = "") -> str:
    """The end of an error message about an unknown name: a suggestion of the nearest known one, or ""."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def nearest_file(path: "Path") -> str:
    """The end of an error message about a missing file: a suggestion of the nearest name in its folder, or ""."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return ""
    prefix = "" if path.name == str(path) else f"{path.parent}/"
    return nearest(path.name, names, prefix)


def shown(value: object, most: int = 80) -> str:
    """A value as error messages show it, cut to at most `most` characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[:most] if isinstance(value, str) else value)
    return text if len(text) <= most else text[: most - 3] + "..."
