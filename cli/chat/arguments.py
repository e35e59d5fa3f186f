"""What is typed behind a slash command, read as a shell would."""

import shlex
from pathlib import Path

from quengine.errors import EngineError


def words(command: str, text: str) -> list[str]:
    """The words of `text`, which quotes hold together. Raises EngineError for a quote without its end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise EngineError(f"/{command} {text}: {error}") from None


def one_word(command: str, text: str) -> str:
    """The one file name, or name of a session, in `text`. Raises EngineError for none and for several."""
    given = words(command, text)
    if len(given) != 1:
        raise EngineError(f"/{command} needs one file name (quote one with spaces)")
    return given[0]


def file_name(command: str, text: str) -> Path:
    """The one path in `text`, ~ replaced. Raises EngineError for none and for several."""
    try:
        return Path(one_word(command, text)).expanduser()
    except RuntimeError as error:  # ~ of an unknown user, or without a home folder
        raise EngineError(f"/{command} {text}: {error}") from None
