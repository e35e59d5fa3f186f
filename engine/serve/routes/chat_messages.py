"""The messages of a conversation, checked and put into the form that templates read: role and content as text."""

from collections.abc import Sequence
from typing import Any

from quengine.serve.schemas.reading import read_part
from quengine.serve.schemas.requests import Content, Message


def read_messages(values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the field `messages`. Raises ApiError for what no template is given."""
    return [
        template_message(value, message.content)
        for value, message in zip(values, read_part(list[Message], values, "messages"), strict=True)
    ]


def template_message(value: dict[str, Any], content: Content | None) -> dict[str, Any]:
    """A message as templates read it, with all else that it has; parts of its content are joined by line breaks."""
    role = "system" if value["role"] == "developer" else value["role"]
    given = {key: part for key, part in value.items() if part is not None}
    return {**given, "role": role, "content": content_text(content)}


def content_text(content: Content | None) -> str:
    return "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
