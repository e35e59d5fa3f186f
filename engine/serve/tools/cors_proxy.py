"""GET and POST /cors-proxy?url=...: a request to another host, for pages that may not make it themselves.

A redirect is not followed. Of the request's headers those alone go out whose names begin with
`x-llama-server-proxy-header-`, without that; of the answer's those come in that can do nothing to the page's origin.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quengine.errors import EngineError
from quengine.platform.log_lines import one_line
from quengine.serve.http import read_raw, unless_gone
from quengine.serve.models.registry import Models
from quengine.serve.outbound import PrivateAddressError, Reach, network_backend, shown_address, web_address
from quengine.serve.schemas.errors import ApiError, bad_request
from quengine.serve.tools.tool_routes import check_page

if TYPE_CHECKING:
    import httpcore2

MAX_BYTES = 64 << 20
"""Of an answer; a longer one is cut off."""
CONNECT_SECONDS = 10.0
READ_SECONDS = 300.0
"""Without a byte."""
_PREFIX = "x-llama-server-proxy-header-"
_REFUSED = frozenset(
    ("host", "connection", "content-length", "transfer-encoding", "keep-alive", "te", "trailer", "upgrade")
)
_PASSED = frozenset(
    ("content-type", "content-encoding", "content-language", "etag", "last-modified", "retry-after")
)
PUBLIC, ANY = Reach(), Reach(lambda _: True)
_SAFE = (
    (b"content-security-policy", b"sandbox; default-src 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)
"""Headers under which an answer that is opened as a page can do nothing."""


async def cors_proxy(models: Models, request: Request) -> Response:
    """The answer of another host.

    Raises ApiError where it may not be asked, or has none.
    """
    import httpcore2

    options = models.settings.tools
    if not options.proxy:
        raise ApiError(403, "this server was started without --cors-proxy")
    check_page(request)
    try:
        url = web_address(request.query_params.get("url", ""))
    except EngineError as error:
        raise bad_request(str(error), "url", "invalid_value") from None
    headers = _headers(request)
    body = await read_raw(request, models.settings.limits) if request.method == "POST" else b""
    timeout = {"connect": CONNECT_SECONDS, "read": READ_SECONDS, "write": READ_SECONDS, "pool": 1.0}
    async with AsyncExitStack() as held:
        try:
            reach = ANY if options.proxy_private else PUBLIC
            pool = httpcore2.AsyncConnectionPool(network_backend=network_backend(reach), retries=0)
            await held.enter_async_context(pool)
            work = held.enter_async_context(
                pool.stream(
                    request.method, url, headers=headers, content=body, extensions={"timeout": timeout}
                )
            )
            answer = await unless_gone(request.receive, work)
        except PrivateAddressError as error:
            raise ApiError(403, f"{error}, not allowed here (--cors-proxy-private)") from None
        except httpcore2.TimeoutException:
            raise ApiError(504, f"{shown_address(url)} does not answer") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError) as error:
            raise ApiError(
                502, f"{shown_address(url)} cannot be reached: {one_line(str(error), 300)}"
            ) from None
        return _Answer(answer, held.pop_all())


def _headers(request: Request) -> list[tuple[str, str]]:
    given = [
        (name.removeprefix(_PREFIX), value)
        for name, value in request.headers.items()
        if name.startswith(_PREFIX) and name != _PREFIX
    ]
    for name, _ in given:
        if name in _REFUSED:
            raise bad_request(f"the header {name} cannot be set", name, "invalid_value")
    return given


class _Answer(Response):
    """Passes an answer on as it comes. `held` is closed at its end."""

    def __init__(self, answer: "httpcore2.Response", held: AsyncExitStack) -> None:
        super().__init__(status_code=answer.status)
        passed = [
            (name.lower(), value) for name, value in answer.headers if _passes(name.lower().decode("latin-1"))
        ]
        self.raw_headers = [*passed, *_SAFE]
        self._answer = answer
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        async with self._held:
            await unless_gone(receive, self._pass_on(send))

    async def _pass_on(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in _limited(self._answer.aiter_stream()):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _passes(name: str) -> bool:
    return name in _PASSED or name.startswith("mcp-")


async def _limited(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    size = 0
    async for part in parts:
        size += len(part)
        if size > MAX_BYTES:
            raise ConnectionError(f"an answer of more than {MAX_BYTES} bytes was cut off")
        yield part
