"""What a caller may give as a prompt: text, token ids, or tokens and images."""

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from operator import index
from typing import Any

from quengine.errors import EngineError
from quengine.request.prompt_images import ImagePrompt

Prompt = str | Seq[int] | ImagePrompt
Message = Mapping[str, Any]

# A high half that no low half follows, or a low half that follows no high one.
_LONE_SURROGATE = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")


def as_prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list. Raises EngineError for bytes."""
    if isinstance(prompts, str | ImagePrompt):
        return [prompts]
    _check_no_bytes(prompts)
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def as_ids(ids: Seq[int]) -> list[int]:
    """Token ids as plain integers. Raises EngineError for bytes, and for what is no sequence of integers."""
    _check_no_bytes(ids)
    try:
        items = list(ids)
    except TypeError:
        raise EngineError(f"a prompt is text or a list of token ids, not {_shown(ids)}") from None
    for position, token in enumerate(items):
        try:
            items[position] = index(token)
        except TypeError:
            raise EngineError(f"the token id at position {position} is {_shown(token)}, no integer") from None
    return items


def check_text(text: str, what: str) -> None:
    """Raises EngineError where `text` has a surrogate without its other half, which stands for no character.

    JSON's \\ud800 is one, and so is what Python makes of a command line's byte that is no UTF-8.
    """
    found = None if text.isascii() else _LONE_SURROGATE.search(text)
    if found is None:
        return
    code, at = ord(found[0]), f"at position {found.start()}"
    if 0xDC80 <= code <= 0xDCFF:  # how Python has a byte that it could not decode
        raise EngineError(f"{what} has the byte 0x{code - 0xDC00:02X} {at}, which is no UTF-8")
    raise EngineError(f"{what} has U+{code:04X} {at}, half of a surrogate pair, which is no character")


def check_messages(messages: Seq[Message]) -> None:
    """`check_text` for every string in a conversation; the error says in which message.

    Raises EngineError for a message that is no mapping too, such as a text in place of the conversation.
    """
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise EngineError(
                f'a conversation is a list of {{"role": ..., "content": ...}}; message {number} is {_shown(message)}'
            )
        for text in _strings(message):
            check_text(text, f"message {number}")


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for part in (*value.keys(), *value.values()) for text in _strings(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _strings(part)]
    return []


def _check_no_bytes(given: object) -> None:
    if isinstance(given, bytes | bytearray | memoryview):
        raise EngineError(
            f"a prompt is text or a list of token ids, not {type(given).__name__}: decode it first, b'...'.decode()"
        )


def _shown(value: object) -> str:
    return f"{repr(value)[:40]} ({type(value).__name__})"
