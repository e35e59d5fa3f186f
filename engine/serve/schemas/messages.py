"""Messages of a conversation as structs; read as the bodies are (`reading`).

Other fields of a message are the template's.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class TextPart(msgspec.Struct, frozen=True):
    type: Annotated[
        Literal["text", "input_text", "output_text"],
        Meta(extra={"rule": "must be text, input_text or output_text: this model reads text only"}),
    ]
    text: str


class ImageUrl(msgspec.Struct, frozen=True):
    url: str


class ContentPart(msgspec.Struct, frozen=True):
    """Text, or an image as a data: URL, or the file: URL of one below --media-path."""

    type: Annotated[
        Literal["text", "input_text", "output_text", "image_url", "input_image"],
        Meta(
            extra={
                "rule": "must be text, input_text, output_text, image_url or input_image: audio, video and files "
                "are not read"
            }
        ),
    ]
    text: str | None = None
    image_url: str | ImageUrl | None = None

    def __post_init__(self) -> None:
        if self.is_image and self.image_url is None:
            raise ValueError("image_url is missing")
        if not self.is_image and self.text is None:
            raise ValueError("text is missing")

    @property
    def is_image(self) -> bool:
        return self.type in ("image_url", "input_image")

    @property
    def url(self) -> str:
        """The address of an image."""
        given = self.image_url
        return given.url if isinstance(given, ImageUrl) else given or ""


TextContent = str | list[TextPart]
Content = str | list[ContentPart]


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] = ""


class Call(msgspec.Struct, frozen=True):
    function: CalledFunction


class _OfText(msgspec.Struct, frozen=True, tag_field="role"):
    content: Content
    tool_calls: Annotated[
        None, Meta(extra={"rule": "must be an array of calls, in a message of the assistant's"})
    ] = None


class SystemMessage(_OfText, frozen=True, tag="system"): ...


class DeveloperMessage(_OfText, frozen=True, tag="developer"): ...


class UserMessage(_OfText, frozen=True, tag="user"): ...


class ToolMessage(_OfText, frozen=True, tag="tool"): ...


class FunctionMessage(_OfText, frozen=True, tag="function"):
    """The result of a function, as OpenAI's API had it before tools; the template sees the role as it is."""


class AssistantMessage(msgspec.Struct, frozen=True, tag_field="role", tag="assistant"):
    """Text, calls, or both."""

    content: Content | None = None
    tool_calls: list[Call] | None = None

    def __post_init__(self) -> None:
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is missing")


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
