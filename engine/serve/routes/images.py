"""Reads the images of requests: URLs in messages, and data beside prompts, become the contents of files.

A message keeps the URLs of its images under IMAGES while it is reordered and shortened; its text has a character
(`content_parts.IMAGE`) for each. Only `image_fetch` reads from the network, and only with --image-urls.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from quengine.errors import EngineError
from quengine.request.content_parts import IMAGE, base64_bytes, data_url, read_image, why_text_alone
from quengine.serve.http import off_loop
from quengine.serve.image_fetch import fetch_images
from quengine.serve.models.model_host import ModelHost
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.messages import ContentPart, TextPart

IMAGES = "_images"
MEDIA_MARKER = "<__media__>"
"""The marker of an image in a raw prompt, as in llama-server's."""

Part = TextPart | ContentPart


def parts_text(parts: Sequence[Part], between: str = "\n") -> str:
    """The parts of a content as one text: texts are joined by `between`, and an image becomes IMAGE."""
    text = ""
    for part in parts:
        if isinstance(part, ContentPart) and part.is_image:
            text += IMAGE
        else:
            text += (between if text and not text.endswith(IMAGE) else "") + (part.text or "")
    return text


def image_urls(parts: Sequence[Part]) -> list[str]:
    return [part.url for part in parts if isinstance(part, ContentPart) and part.is_image]


def without_urls(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The messages without IMAGES, as templates read them, and the URLs of their images, in order."""
    urls = [url for message in messages for url in message.get(IMAGES, ())]
    return [{key: value for key, value in message.items() if key != IMAGES} for message in messages], urls


async def read_urls(
    host: ModelHost, urls: Sequence[str], param: str, fetched: dict[str, bytes] | None = None
) -> tuple[bytes, ...]:
    """The contents of images. Raises ApiError where the model reads no images, or a URL may not be read.

    fetched: contents of this request that came over the network, by URL; new ones are added.
    """
    if not urls:
        return ()
    if not host.model.marker:
        raise bad_request(f"{param}: {why_text_alone(host.model.notes)}", param, "unsupported")
    fetched = {} if fetched is None else fetched
    far = [url for url in urls if _is_far(url) and url not in fetched] if host.settings.image_urls else []
    try:
        fetched |= await fetch_images(far)
        return await asyncio.to_thread(
            lambda: tuple(fetched[url] if url in fetched else _read(host, url) for url in urls)
        )
    except (EngineError, ValueError) as error:
        raise bad_request(f"{param}: {error}", param, "invalid_value") from None


def read_data(host: ModelHost, given: Any, key: str) -> tuple[bytes, ...]:
    """llama-server's `multimodal_data`: base64 texts. Raises ApiError."""
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise bad_request(f"{key}.multimodal_data: must be an array of base64 texts", key, "invalid_value")
    if not host.model.marker:
        raise bad_request(f"{key}.multimodal_data: {why_text_alone(host.model.notes)}", key, "unsupported")
    try:
        return tuple(base64_bytes(each) for each in given)
    except EngineError as error:
        raise bad_request(f"{key}.multimodal_data: {error}", key, "invalid_value") from None


def _is_far(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def _read(host: ModelHost, url: str) -> bytes:
    """The contents of a data: or file: URL. Raises EngineError for another."""
    if url.startswith("data:"):
        return data_url(url)
    if url.startswith("file:"):
        return read_image(_media_file(host, url))
    raise EngineError(
        f"image_url {url[:40]!r}: images are taken from data: URLs, with --media-path from file: URLs below it, and "
        "with --image-urls from http: and https: URLs"
    )


def _media_file(host: ModelHost, url: str) -> Path:
    """The file of a file: URL. Raises EngineError for one that is not below --media-path."""
    folder = host.settings.media_path
    if folder is None:
        raise EngineError("file: URLs are read with --media-path DIR alone")
    path = Path(unquote(urlsplit(url).path))
    found = (folder / path.relative_to("/") if not path.is_relative_to(folder) else path).resolve()
    if not found.is_relative_to(folder.resolve()):
        raise EngineError(f"{url[:80]!r} is not below --media-path")
    if found.exists() and not found.is_file():
        raise EngineError(f"{url[:80]!r} is no regular file")
    return found


async def counted(host: ModelHost, ids: Sequence[int], images: Sequence[bytes], param: str) -> int:
    """The number of a prompt's tokens and image rows. Raises ApiError for the field `param` if one is no image."""
    model = host.model
    if not images:
        return len(ids)
    return len(ids) + await off_loop(lambda: sum(map(model.image_tokens, images)), param, "invalid_value")
