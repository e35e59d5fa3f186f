"""The messages of a chat request, checked and put into the form that templates read: role and content as text."""

from collections.abc import Mapping
from typing import Any

from quengine.serve.schemas.errors import ApiError, bad_request

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")


def read_messages(values: Any, param: str = "messages") -> list[dict[str, Any]]:
    """The messages, parts of a content joined by line breaks. Raises ApiError for what no template is given."""
    if not isinstance(values, list) or not values:
        raise bad_request(f"{param} must be an array of at least one message", param)
    return [read_message(value, f"{param}[{i}]") for i, value in enumerate(values)]


def read_message(value: Any, param: str) -> dict[str, Any]:
    """One message; `param` is how errors call it. Raises ApiError."""
    if not isinstance(value, dict):
        raise bad_request(f"{param} must be an object with role and content", param)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{param}.role = {str(role)[:40]!r}: must be one of {', '.join(ROLES)}", param)
    message = {key: part for key, part in value.items() if part is not None}
    message["role"] = ROLES[role]
    calls = "tool_calls" in message
    if calls:
        _check_calls(message, f"{param}.tool_calls")
    if "content" in message:
        message["content"] = content_text(message["content"], f"{param}.content")
    elif calls:
        message["content"] = ""
    else:
        raise bad_request(f"{param}.content is missing", f"{param}.content")
    return message


def _check_calls(message: Mapping[str, Any], param: str) -> None:
    """Raises ApiError for calls that are none, or not the assistant's."""
    calls = message["tool_calls"]
    if message["role"] != "assistant" or not isinstance(calls, list):
        raise bad_request(f"{param} must be an array, of a message of the assistant's", param)
    for i, call in enumerate(calls):
        given = call.get("function") if isinstance(call, Mapping) else None
        function = given if isinstance(given, Mapping) else {}
        if not isinstance(function.get("name"), str) or not isinstance(
            function.get("arguments", ""), str | dict
        ):
            raise bad_request(f"{param}[{i}] must have a function with a name, and arguments as JSON", param)


def content_text(content: Any, param: str) -> str:
    """A content, which is text or an array of text parts, as text. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{param} must be a string or an array of text parts", param)
    return "\n".join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, param: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        raise ApiError(
            400,
            f"{param} is of type {str(kind)[:40]!r}: this model reads text only",
            param=param,
            code="unsupported",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_request(f"{param}.text must be a string", param)
    return text
