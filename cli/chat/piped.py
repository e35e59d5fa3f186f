"""Messages and commands read from a pipe."""

import sys
from collections.abc import Iterator

from quengine.errors import EngineError


def piped_lines() -> Iterator[str]:
    """The lines of standard input. Raises EngineError where they cannot be read."""
    try:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.object[error.start]:#04x}"
        raise EngineError(f"cannot read standard input: not {error.encoding}, {wrong}") from None
    except OSError as error:
        raise EngineError(f"cannot read standard input: {error.strerror or error}") from None
