"""What goes wrong with an HTTP request, in the shape that OpenAI's clients read."""

from typing import Any

CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code of the error of a prompt that does not fit."""


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
    def body(self) -> dict[str, Any]:
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES_OF_CODES.get(self.code or "") or _TYPES.get(self.status, other)
        error = {"message": self.message, "type": kind}
        return {"error": error | {"param": self.param, "code": self.code} | self.details}


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


def switched_off(flag: str) -> ApiError:
    """A 501: the server was started without this route."""
    return ApiError(501, f"this server was started with {flag}", code="unsupported")
