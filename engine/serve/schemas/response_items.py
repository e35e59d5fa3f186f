"""Items of a response's input as structs; read as the bodies are (`reading`). Other fields of an item are ignored.

Source: OpenAI's API reference, "responses", `input`.
"""

from typing import Any, Literal, get_args

import msgspec

from quengine.serve.schemas.messages import Content


class MessageItem(msgspec.Struct, frozen=True, tag="message"):
    """An item without a type is one."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content


class OutputPart(msgspec.Struct, frozen=True):
    """Part of what a tool gave; only text and images can be shown to the model."""

    type: str
    text: str = ""
    image_url: Any = None


class FunctionCallItem(msgspec.Struct, frozen=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(msgspec.Struct, frozen=True, tag="function_call_output"):
    call_id: str
    output: str | list[OutputPart]


class CustomToolCallItem(msgspec.Struct, frozen=True, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str


class CustomToolCallOutputItem(msgspec.Struct, frozen=True, tag="custom_tool_call_output"):
    call_id: str
    output: str | list[OutputPart]


class LocalShellCallItem(msgspec.Struct, frozen=True, tag="local_shell_call"):
    """`id` identifies the call where `call_id` is absent."""

    action: dict[str, Any]
    call_id: str | None = None
    id: str | None = None


class LocalShellCallOutputItem(msgspec.Struct, frozen=True, tag="local_shell_call_output"):
    output: str | list[OutputPart]
    call_id: str | None = None
    id: str | None = None


class ReasoningText(msgspec.Struct, frozen=True):
    type: Literal["reasoning_text", "text"]
    text: str


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text"):
    text: str


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning"):
    """What an earlier answer thought, before the message or the calls that follow it.

    `encrypted_content` holds it where a client keeps no `content`.
    """

    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: str | None = None


class ItemReference(msgspec.Struct, frozen=True, tag="item_reference"):
    """Stands for a stored item."""

    id: str


InputItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
    | LocalShellCallItem
    | LocalShellCallOutputItem
    | ItemReference
)
KINDS = frozenset(item.__struct_config__.tag for item in get_args(InputItem))
"""The types of these items."""
