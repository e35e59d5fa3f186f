"""The items of an input as the messages of a conversation.

Items of other kinds (searches, images, compactions, ...) are history that a model without OpenAI's tools cannot read:
they are skipped with a note. Source: OpenAI's API reference, "responses", `input`.
"""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import Any

from quengine.serve.apis.openai.responses.tools import INPUT
from quengine.serve.response_store import ResponseStore
from quengine.serve.routes.prompts import spoken, template_message
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.messages import ContentPart
from quengine.serve.schemas.reading import read_part, shown
from quengine.serve.schemas.response_items import (
    KINDS,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    ItemReference,
    LocalShellCallItem,
    LocalShellCallOutputItem,
    MessageItem,
    OutputPart,
    ReasoningItem,
)

Item = dict[str, Any]
_SEAL = "quengine-reasoning:"
_TEXT = ("text", "input_text", "output_text")
_READS = {False: "text only", True: "text and images"}


def input_items(value: str | Sequence[Any], store: ResponseStore) -> list[Any]:
    """The items of the field `input`, with stored ones in place of references. Raises ApiError."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    items = list(value)
    for i, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            (reference,) = read_part(list[ItemReference], [item], f"input[{i}]")
            items[i] = store.item(reference.id, f"input[{i}].id")
    return items


def messages_of(
    items: Sequence[Any],
    earlier: Sequence[Item] = (),
    notes: list[str] | None = None,
    sees: bool = False,
) -> list[Item]:
    """The messages of a conversation: of `earlier` items, from a stored response, and of the request's items.

    Calls belong to the assistant's message before them, or make one; reasoning belongs to the message after it. Fields
    that items of an earlier answer have beside their content (id, status) are ignored. `notes` gets a line for each
    item that is skipped. sees: the model reads images, also those that tools gave. Raises ApiError for a wrong item.
    """
    conversation = _Conversation(sees)
    conversation.add(earlier, [])
    conversation.add(items, [] if notes is None else notes)
    return conversation.messages


def sealed(text: str) -> str:
    """Reasoning as `encrypted_content`, which clients give back as it is: encoded, not secret."""
    return _SEAL + urlsafe_b64encode(text.encode(errors="replace")).decode()


def _unsealed(content: str | None) -> str | None:
    """The reasoning in `encrypted_content`; None if there is no content, or another server made it."""
    if content is None or not content.startswith(_SEAL):
        return None
    try:
        return urlsafe_b64decode(content.removeprefix(_SEAL)).decode()
    except ValueError:
        return None


class _Conversation:
    """Messages as they grow. `_called`: the names of tools by the ids of their calls."""

    def __init__(self, sees: bool) -> None:
        self._sees = sees
        self.messages: list[Item] = []
        self._called: dict[str, str] = {}
        self._thought: Item = {}

    def add(self, values: Sequence[Any], notes: list[str]) -> None:
        known = [{"type": "message", **value} if isinstance(value, dict) else value for value in values]
        for i, value in enumerate(known):
            kind = value["type"] if isinstance(value, dict) else None
            if isinstance(kind, str) and kind not in KINDS:
                notes.append(f"input[{i}] skipped: {shown(kind, 40)}")
                # It keeps its place, so that errors name the right index of the others.
                known[i] = {"type": "item_reference", "id": ""}
        known = [spoken(each) if each.get("type") == "message" else each for each in known]
        for i, item in enumerate(read_part(list[InputItem], known, "input")):
            self._add(item, f"input[{i}]", notes)

    def _add(self, item: InputItem, at: str, notes: list[str]) -> None:
        match item:
            case MessageItem():
                more = self._thought if item.role == "assistant" else {}
                self.messages.append(template_message({"role": item.role, **more}, item.content))
            case FunctionCallItem():
                self._call(item.call_id, item.name, item.arguments)
            case CustomToolCallItem():
                self._call(item.call_id, item.name, json.dumps({INPUT: item.input}, ensure_ascii=False))
            case LocalShellCallItem():
                action = {
                    key: value for key, value in item.action.items() if value is not None and key != "type"
                }
                self._call(_call_id(item, at), "local_shell", json.dumps(action, ensure_ascii=False))
            case FunctionCallOutputItem() | CustomToolCallOutputItem():
                self._output(item.call_id, item.output, at, notes)
            case LocalShellCallOutputItem():
                self._output(_call_id(item, at), item.output, at, notes)
            case ReasoningItem():
                thought = _thought(item, at, notes)
                self._thought = {"reasoning_content": thought} if thought else {}
                return
            case ItemReference():
                return
        self._thought = {}

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        self._called[call_id] = name
        if self._thought or not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": "", **self._thought, "tool_calls": []})
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _output(self, call_id: str, output: str | list[OutputPart], at: str, notes: list[str]) -> None:
        if call_id not in self._called:
            problem = f"{call_id[:40]!r}: no call before it has this id"
            raise bad_request(f"{at}.call_id = {problem}", "input")
        parts = output if isinstance(output, str) else [self._part(part, at, notes) for part in output]
        result = {"role": "tool", "tool_call_id": call_id, "name": self._called[call_id]}
        result = template_message(result, parts)
        self.messages.append(result)

    def _part(self, part: OutputPart, at: str, notes: list[str]) -> ContentPart:
        """A part of a tool's output. The model may have asked for a part that it cannot read, so a text in its place
        says that it is left out."""
        if part.type in _TEXT:
            return ContentPart("text", part.text)
        if self._sees and part.type == "input_image" and isinstance(part.image_url, str):
            return ContentPart("input_image", image_url=part.image_url)
        notes.append(f"{at}.output: {shown(part.type, 40)} left out")
        return ContentPart("text", f"[{part.type[:40]} left out: this model reads {_READS[self._sees]}]")


def _call_id(item: LocalShellCallItem | LocalShellCallOutputItem, at: str) -> str:
    found = item.call_id or item.id
    if not found:
        raise bad_request(f"{at}: must have a call_id or an id", "input")
    return found


def _thought(item: ReasoningItem, at: str, notes: list[str]) -> str:
    """The reasoning of an item: its content, else what its `encrypted_content` holds, else the summary."""
    if item.content:
        return "\n\n".join(part.text for part in item.content)
    if (opened := _unsealed(item.encrypted_content)) is not None:
        return opened
    if item.encrypted_content:
        notes.append(f"{at}.encrypted_content skipped: another server made it")
    return "\n\n".join(part.text for part in item.summary or ())
