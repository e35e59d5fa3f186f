"""Images that a request names by http and https addresses (--image-urls), from public hosts alone.

Redirects are few, and each leads to a host that is checked as the first was. The content type that a server gives is
ignored: the bytes are decoded as those of any image file.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urldefrag, urljoin

from quengine.errors import EngineError
from quengine.platform.log_lines import one_line
from quengine.serve.outbound import PrivateAddressError, Reach, network_backend, shown_address, web_address

if TYPE_CHECKING:
    import httpcore2

SECONDS = 20.0
"""For all images of a request, redirects included."""
MAX_BYTES = 32 << 20
"""Of all images of a request."""
MOST_REDIRECTS = 3
MOST_AT_ONCE = 8
MOST_IMAGES = 64
"""Of a request."""
REACH = Reach()
_CONNECT_SECONDS = 5.0
_HEADERS = (
    ("User-Agent", "quengine"),
    ("Accept", "image/jpeg, image/png, image/webp, image/gif"),
    ("Accept-Encoding", "identity"),
)
_MOVED = (301, 302, 303, 307, 308)


@dataclass
class _Room:
    """The number of bytes that further images of a request may have."""

    left: int

    def take(self, count: int) -> None:
        """Raises EngineError where there is no room."""
        self.left -= count
        if self.left < 0:
            raise EngineError(f"its images have more than {MAX_BYTES} bytes together")


async def fetch_images(urls: Sequence[str]) -> dict[str, bytes]:
    """The contents of images by their addresses, each fetched once.

    Raises EngineError for an address that is not allowed or not there, which the message names by its host, and for
    images that are too many or take too much time or too many bytes.
    """
    room, turns = _Room(MAX_BYTES), asyncio.Semaphore(MOST_AT_ONCE)

    async def fetch(url: str) -> bytes:
        async with turns:
            return await _fetch(url, room)

    names = list(dict.fromkeys(urls))
    if len(names) > MOST_IMAGES:
        raise EngineError(f"{len(names)} images are to be fetched, over the limit of {MOST_IMAGES}")
    try:
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            tasks = [group.create_task(fetch(name)) for name in names]
    except TimeoutError:
        raise EngineError(f"its images are not here after {SECONDS:g} seconds") from None
    except BaseExceptionGroup as problems:
        first = problems.exceptions[0]
        raise (EngineError(str(first)) if isinstance(first, EngineError) else first) from None
    return dict(zip(names, (task.result() for task in tasks), strict=True))


async def _fetch(url: str, room: _Room) -> bytes:
    import httpcore2

    for _ in range(MOST_REDIRECTS + 1):
        url = web_address(_as_sent(url), "the image's address")
        shown = shown_address(url)
        try:
            found = await _request(url, room)
        except PrivateAddressError as error:
            raise EngineError(f"{error}, where images are not fetched from") from None
        except httpcore2.TimeoutException:
            raise EngineError(f"{shown} does not answer") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError) as error:
            raise EngineError(f"{shown} cannot be reached: {one_line(str(error), 200)}") from None
        if isinstance(found, bytes):
            return found
        url = found
    raise EngineError(f"{shown}: more than {MOST_REDIRECTS} redirects")


def _as_sent(url: str) -> str:
    """An address as it is requested: without a fragment, and percent-encoded where it is not ASCII."""
    return quote(urldefrag(url).url, safe="%/:=&?~+!$,;'@()*[]")


async def _request(url: str, room: _Room) -> bytes | str:
    """The bytes at an address, or the address that it redirects to."""
    import httpcore2

    timeout = {"connect": _CONNECT_SECONDS, "read": SECONDS, "write": SECONDS, "pool": SECONDS}
    async with (
        httpcore2.AsyncConnectionPool(network_backend=network_backend(REACH), retries=0) as pool,
        pool.stream("GET", url, headers=list(_HEADERS), extensions={"timeout": timeout}) as answer,
    ):
        if answer.status in _MOVED:
            return urljoin(url, _header(answer, b"location"))
        if answer.status != 200:
            raise EngineError(f"{shown_address(url)} answers with status {answer.status}")
        length = _header(answer, b"content-length")
        if length.isdecimal() and int(length) > room.left:
            room.take(int(length))
        parts = list[bytes]()
        async for part in answer.aiter_stream():
            room.take(len(part))
            parts.append(part)
        return b"".join(parts)


def _header(answer: "httpcore2.Response", name: bytes) -> str:
    return next((value for key, value in answer.headers if key.lower() == name), b"").decode("latin-1")
