"""What goes wrong with an HTTP request, in the shape that OpenAI's clients read, and that of the other dialects.

Sources: Anthropic's API reference, "Errors"; Ollama's docs/api.md.
"""

from typing import Any, Literal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from quengine.serve.schemas.written import Count, Written

CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code of the error of a prompt that does not fit."""


class ErrorFields(Written, kw_only=True):
    """The numbers are those of a prompt that does not fit."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: Count | UnsetType = UNSET
    n_ctx: Count | UnsetType = UNSET


class Error(Written):
    error: ErrorFields


class AnthropicError(Written, kw_only=True):
    """`param`, `code` and the numbers of a limit are this server's own and stand beside `type` and `message`."""

    type: Literal["error"] = "error"
    error: ErrorFields


class OllamaError(Written):
    error: str


class ApiError(Exception):
    """An answer that is an error: {"error": {message, type, param, code}} with an HTTP status.

    `retry_after`: seconds after which asking again may help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.details = details or {}

    @property
    def body(self) -> Error:
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES_OF_CODES.get(self.code or "") or _TYPES.get(self.status, other)
        return Error(
            ErrorFields(message=self.message, type=kind, param=self.param, code=self.code, **self.details)
        )


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    505: "not_supported_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
_TYPES_OF_CODES = {CONTEXT_EXCEEDED: "exceed_context_size_error"}
"""llama-server's; the code is OpenAI's."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request is wrong, asking again will not help."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """A 503: no request is taken any more."""
    return ApiError(503, "the server is shutting down", code="draining", retry_after=5)


def switched_off(flag: str) -> ApiError:
    """A 501: the server was started without this route."""
    return ApiError(501, f"this server was started with {flag}", code="unsupported")


def error_type(path: str) -> type[Error | AnthropicError | OllamaError]:
    """The form of the errors of a path."""
    if path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/"):
        return AnthropicError
    return OllamaError if path.startswith(_OLLAMA) else Error


def in_dialect(error: ApiError, path: str) -> tuple[int, Error | AnthropicError | OllamaError]:
    """The status and the body of an error as clients of this path read them.

    Anthropic's of a full queue and a server that is not ready are status 529.
    """
    form = error_type(path)
    if form is AnthropicError:
        return anthropic_error(error)
    return error.status, (OllamaError(error.message) if form is OllamaError else error.body)


def anthropic_error(error: ApiError) -> tuple[int, AnthropicError]:
    status = _OVERLOADED if error.status in (429, 503) else error.status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = f"{_TOO_LONG if error.code == CONTEXT_EXCEEDED else ''}{error.message}"
    return status, AnthropicError(error=replace(error.body.error, message=message, type=kind))


_ANTHROPIC, _OLLAMA = "/v1/messages", "/api/"
_OVERLOADED = 529
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    _OVERLOADED: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "
"""How the message of a prompt that does not fit begins: clients that shorten it look for this."""
