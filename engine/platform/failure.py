"""The last message of a process that has failed: why, for the process that has started it."""

from typing import Literal

import msgspec

from quengine.errors import CannotRunError, EngineError
from quengine.platform.out_of_memory import out_of_memory


class Failure(msgspec.Struct, tag=True, frozen=True):
    """`kind`: one of this project's exceptions, or "failed" for all others."""

    kind: Literal["EngineError", "CannotRunError", "failed"]
    message: str


def failure_of(error: Exception) -> Failure:
    """The message for an error that has ended what a process does."""
    error = out_of_memory(error) or error
    if isinstance(error, EngineError):
        return Failure("CannotRunError" if isinstance(error, CannotRunError) else "EngineError", str(error))
    return Failure("failed", f"{type(error).__name__}: {error}")
