"""Errors in the form of the dialect whose route they answer.

Source: Ollama's docs/api.md.
"""

from typing import Any

from quengine.serve.schemas.errors import ApiError

_OLLAMA = "/api/"


class OllamaError(ApiError):
    """{"error": message}."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(
            error.status,
            error.message,
            param=error.param,
            code=error.code,
            retry_after=error.retry_after,
            details=error.details,
        )

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.message}


def in_dialect(error: ApiError, path: str) -> ApiError:
    """The error as clients of this path read it."""
    return OllamaError(error) if path.startswith(_OLLAMA) else error
