"""Errors in the form of the dialect whose route they answer.

Source: Anthropic's API reference, "Errors". `param`, `code` and the numbers of a limit are this server's own and stand
beside `type` and `message`.
"""

from typing import Any

from quengine.serve.schemas.errors import ApiError

_ANTHROPIC = "/v1/messages"
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


class AnthropicError(ApiError):
    """{"type": "error", "error": {type, message, ...}}; a full queue and a server that is not ready are status 529."""

    def __init__(self, error: ApiError) -> None:
        long = error.code == "context_length_exceeded"
        super().__init__(
            _STATUSES.get(error.status, error.status),
            _TOO_LONG + error.message if long else error.message,
            param=error.param,
            code=error.code,
            retry_after=error.retry_after,
            details=error.details,
        )

    @property
    def body(self) -> dict[str, Any]:
        other = "invalid_request_error" if self.status < 500 else "api_error"
        return {
            "type": "error",
            "error": {**super().body["error"], "type": _TYPES.get(self.status, other)},
        }


def in_dialect(error: ApiError, path: str) -> ApiError:
    """The error as clients of this path read it."""
    anthropic = path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")
    return AnthropicError(error) if anthropic else error
