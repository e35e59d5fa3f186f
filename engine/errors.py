"""Errors meant for the user: one line that says what is wrong, with the values, and what to do.

Every layer may import this module; it imports nothing. The command line prints the message and
exits with `exit_code`; a library caller catches `EngineError`.
"""


class EngineError(Exception):
    """Something the user gave is wrong: a file, a flag, a prompt that does not fit."""

    exit_code = 1


class CannotRunError(EngineError):
    """The request is right but this machine cannot do it: no such device, too little memory."""

    exit_code = 2


def shown(value: object, most: int = 80) -> str:
    """A value as an error tells it, in at most so many characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[:most] if isinstance(value, str) else value)
    return text if len(text) <= most else text[: most - 3] + "..."
