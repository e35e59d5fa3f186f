"""Responses that later requests may refer to, in memory: `previous_response_id`, references to items, GET and DELETE.

An entry is the JSON of a response and of its conversation. All entries together are bounded in bytes; the oldest are
dropped for a new one.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quengine.serve.http import to_json
from quengine.serve.schemas.errors import ApiError

Item = dict[str, Any]


@dataclass(frozen=True)
class _Entry:
    """A stored response. conversation: the items of all earlier inputs and outputs, of the input, and of the output."""

    response: bytes
    conversation: bytes
    item_ids: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.response) + len(self.conversation)


class ResponseStore:
    """Stores at most `most` bytes; 0 stores nothing."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._response_of: dict[str, str] = {}  # id of an output item -> id of its response

    @property
    def size(self) -> int:
        """The number of stored bytes."""
        return self._size

    def keeps(self, wanted: bool) -> bool:
        """Whether a response is stored if its request has `store` = `wanted`."""
        return wanted and self._most > 0

    def put(
        self, response_id: str, item_ids: Sequence[str], response: Any, conversation: Sequence[Any]
    ) -> None:
        """Stores a complete response, with the ids of its output items. A response that alone exceeds the limit is not
        stored."""
        ids = tuple(item_ids)
        entry = _Entry(to_json(response), to_json(conversation), ids)
        if entry.size > self._most:
            return
        while self._size + entry.size > self._most:
            self.delete(next(iter(self._entries)))
        self._entries[response_id] = entry
        self._response_of.update(dict.fromkeys(ids, response_id))
        self._size += entry.size

    def response(self, response_id: str) -> bytes:
        """The JSON of a response. Raises ApiError (404)."""
        return self._entry(response_id, None).response

    def input_items(self, response_id: str) -> list[Item]:
        """The items that a response was made of, as the API lists them, oldest first. Raises ApiError (404)."""
        entry = self._entry(response_id, None)
        conversation: list[Item] = json.loads(entry.conversation)
        given = conversation[: len(conversation) - len(entry.item_ids)]
        return [_listed(item, f"item_{response_id}_{number}") for number, item in enumerate(given)]

    def conversation(self, response_id: str | None) -> list[Item]:
        """The items up to the end of a response; none for an id of None. Raises ApiError (404)."""
        if response_id is None:
            return []
        items: list[Item] = json.loads(self._entry(response_id, "previous_response_id").conversation)
        return items

    def item(self, item_id: str, name: str) -> Item:
        """An item of a stored response's output. `name`: the field that refers to it. Raises ApiError (404)."""
        response = self._response_of.get(item_id)
        if response is None:
            raise self._absent(
                f"{name} = {item_id[:80]!r}: no item of this id is stored", name, "item_not_found"
            )
        output: list[Item] = json.loads(self._entries[response].response)["output"]
        return next(item for item in output if item["id"] == item_id)

    def delete(self, response_id: str) -> None:
        """Removes a response. Raises ApiError (404)."""
        entry = self._entry(response_id, None)
        del self._entries[response_id]
        for item_id in entry.item_ids:
            del self._response_of[item_id]
        self._size -= entry.size

    def _entry(self, response_id: str, name: str | None) -> _Entry:
        entry = self._entries.get(response_id)
        if entry is None:
            given = repr(response_id[:80]) if name is None else f"{name} = {response_id[:80]!r}"
            code = "response_not_found" if name is None else "previous_response_not_found"
            raise self._absent(f"{given}: no response of this id is stored", name, code)
        return entry

    def _absent(self, what: str, name: str | None, code: str) -> ApiError:
        why = f"the newest are kept, in at most {self._most} bytes (--max-stored), until the server ends"
        return ApiError(404, f"{what}; {why}", param=name, code=code)


def _listed(item: Item, new_id: str) -> Item:
    """An item with an id and a type, and with a message's text as a part. Items of requests may lack these."""
    listed = {
        "id": new_id,
        "type": "message",
        **{key: part for key, part in item.items() if part is not None},
    }
    if listed["type"] == "message" and isinstance(listed.get("content"), str):
        kind = "output_text" if listed.get("role") == "assistant" else "input_text"
        listed |= {"content": [{"type": kind, "text": listed["content"]}]}
    return listed if "status" in listed or listed["type"] != "message" else {**listed, "status": "completed"}
