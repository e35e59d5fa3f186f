"""Message contents that are lists of parts (text and images), as one text in which a character stands for each image.

Code that orders and joins messages reads only such texts; `ChatFormat` turns them into parts again for a template.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from quengine.errors import EngineError
from quengine.platform.input_files import read_bytes

IMAGE = "\ufdd0"
"""Stands for an image in the text of a message: a code point that Unicode keeps for a program's own use."""

NO_PROJECTOR = (
    "this model has no projector, so it reads no images: put its mmproj-*.gguf beside the model, or name it "
    "with --mmproj"
)

NOT_READ = "images are not read"
"""The beginning of the note about a model whose projector is not implemented."""

_REPLACED = "\ufffd"
_TEXT = ("text", "input_text", "output_text")


def why_text_alone(notes: Sequence[str]) -> str:
    """Why a model with these notes reads no images."""
    return next((note for note in notes if note.startswith(NOT_READ)), NO_PROJECTOR)


def spelled(text: str) -> str:
    """A user's text without the character IMAGE, which would be read as an image."""
    return text.replace(IMAGE, _REPLACED)


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has a part that is an image."""
    return any(_is_image(part) for message in messages for part in _parts(message))


def flattened(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with contents that are text: parts of text are joined by line breaks, images are IMAGE.

    Raises EngineError for a part of another kind.
    """
    return [
        {**message, "content": joined_parts(message["content"], f"message {number}")}
        if isinstance(message.get("content"), list | tuple)
        else _with_spelled(message)
        for number, message in enumerate(messages)
    ]


def _with_spelled(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": spelled(content)} if isinstance(content, str) else message


def joined_parts(parts: Sequence[Any], where: str) -> str:
    """The parts of a content as one text."""
    text = ""
    for part in parts:
        if _is_image(part):
            text += IMAGE
        elif isinstance(part, Mapping) and part.get("type") in _TEXT and isinstance(part.get("text"), str):
            between = "\n" if text and not text.endswith(IMAGE) else ""
            text += between + spelled(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise EngineError(f"{where}: a part of a content is text or an image, not {str(kind)[:40]!r}")
    return text


def with_image_parts(messages: Sequence[Mapping[str, Any]], every: bool) -> list[Mapping[str, Any]]:
    """The messages with parts for contents that have images, or for `every` content that is text."""
    return [
        {**message, "content": split_parts(content)}
        if isinstance(content := message.get("content"), str) and (every or IMAGE in content)
        else message
        for message in messages
    ]


def split_parts(content: str) -> list[dict[str, str]]:
    """The parts of a text that `joined_parts` made, as chat templates read them."""
    parts = list[dict[str, str]]()
    for number, text in enumerate(content.split(IMAGE)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a content, without its images."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") in _TEXT)


def image_paths(content: str | Sequence[Mapping[str, Any]]) -> list[Path]:
    """The files of a content's images."""
    return [] if isinstance(content, str) else [Path(part["image"]) for part in content if "image" in part]


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """The bytes of every image, in order: of parts `{"type": "image", "image": bytes or a file's path}` and
    `{"type": "image_url", "image_url": {"url": "data:..."}}`.

    Raises:
        EngineError: a file cannot be read, or an address is no data: URL.
    """
    return [_bytes_of(part) for message in messages for part in _parts(message) if _is_image(part)]


def read_image(path: Path) -> bytes:
    """The bytes of an image's file, or of a pipe. Raises EngineError where it cannot be read, or is too large."""
    return read_bytes(path, "cannot read the image")


def data_url(url: str) -> bytes:
    """The bytes of a data: URL (RFC 2397). Raises EngineError where it is none."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise EngineError(f"the image's address {url[:40]!r} is no data: URL")
    if not head.endswith(";base64"):
        return unquote_to_bytes(data)
    return base64_bytes(data)


def base64_bytes(data: str) -> bytes:
    """The bytes that a base64 text stands for. Raises EngineError where it is none."""
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"the image's data are no base64: {error}") from None


def _parts(message: Mapping[str, Any]) -> Iterator[Any]:
    content = message.get("content")
    yield from content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _bytes_of(part: Mapping[str, Any]) -> bytes:
    if part["type"] == "image_url":
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        return data_url(str(url))
    image = part.get("image")
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, str | Path):
        return read_image(Path(image))
    raise EngineError(f"an image is bytes or the path of a file, not {type(image).__name__}")


def places_of(ids: Sequence[int], marker: Sequence[int]) -> list[int]:
    """Where a marker's tokens begin in a prompt, from its beginning on, without overlaps."""
    found, at, size = list[int](), 0, len(marker)
    while at <= len(ids) - size:
        if list(ids[at : at + size]) == list(marker):
            found.append(at)
            at += size
        else:
            at += 1
    return found
