"""Errors in the form of the dialect whose route they answer.

Sources: Anthropic's API reference, "Errors"; Ollama's docs/api.md.
"""

from typing import Any

from quengine.serve.schemas.errors import CONTEXT_EXCEEDED, ApiError

_ANTHROPIC, _OLLAMA = "/v1/messages", "/api/"
_OVERLOADED = 529
_STATUSES = {429: _OVERLOADED, 503: _OVERLOADED}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    _OVERLOADED: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "
"""How the message of a prompt that does not fit begins: clients that shorten it look for this."""


class DialectError(ApiError):
    """An error, for a body of another shape."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(
            error.status,
            error.message,
            param=error.param,
            code=error.code,
            retry_after=error.retry_after,
            details=error.details,
        )


class AnthropicError(DialectError):
    """{"type": "error", "error": {type, message, ...}}; a full queue and a server that is not ready are status 529.

    `param`, `code` and the numbers of a limit are this server's own and stand beside `type` and `message`.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__(error)
        self.status = _STATUSES.get(error.status, error.status)
        if error.code == CONTEXT_EXCEEDED:
            self.message = _TOO_LONG + error.message

    @property
    def body(self) -> dict[str, Any]:
        other = "invalid_request_error" if self.status < 500 else "api_error"
        return {
            "type": "error",
            "error": {**super().body["error"], "type": _TYPES.get(self.status, other)},
        }


class OllamaError(DialectError):
    """{"error": message}."""

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.message}


def _form(path: str) -> type[DialectError] | None:
    if path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/"):
        return AnthropicError
    return OllamaError if path.startswith(_OLLAMA) else None


def in_dialect(error: ApiError, path: str) -> ApiError:
    """The error as clients of this path read it."""
    form = _form(path)
    return error if form is None else form(error)


def error_schema_of(path: str) -> str:
    """The schema of the errors of a path."""
    form = _form(path)
    return "Error" if form is None else form.__name__
