"""Reading bodies, writing JSON and event streams, and cancelling the work of clients that leave."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quengine.errors import EngineError
from quengine.platform import collector
from quengine.platform.log_lines import one_line
from quengine.serve import access_log
from quengine.serve.connections import DIRECT, Connection, SlowReaderError, connection_of, send_within
from quengine.serve.schemas.errors import ApiError, bad_request, in_dialect
from quengine.serve.schemas.fields import Body
from quengine.serve.schemas.reading import parsed, read_body
from quengine.serve.settings import Limits

logger = logging.getLogger("quengine.serve")

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
"""Media types of streams."""
_NAMED_FIELDS = 20
"""Fields that a line of the log names."""
_NAMED_LENGTH = 500
BODY_KEY = "quengine.body"
"""The key of a scope under which its body is, once it has been read."""
_encode = msgspec.json.Encoder().encode
B = TypeVar("B", bound=Body)
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection before the answer was complete."""


def to_json(value: Any) -> bytes:
    """`value` as compact JSON in UTF-8. A lone surrogate, as in names of the command line, becomes a question mark."""
    try:
        return _encode(value)
    except (OverflowError, UnicodeError):  # or a number beyond 64 bits, which a client gave
        return json.dumps(
            value, ensure_ascii=False, separators=(",", ":"), default=msgspec.to_builtins
        ).encode(errors="replace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


def error_response(error: ApiError, path: str) -> Response:
    """The answer to a request of `path`, in the form of its dialect."""
    status, body = in_dialect(error, path)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 505:
        headers["Connection"] = "close"  # what follows is no HTTP/1.1 either
    return json_response(body, status, headers)


async def read_request(request: Request, kind: type[B], limits: Limits) -> B:
    """The body of a request. Raises ApiError for one too large, too slow, or not of its route's form."""
    body = await read_raw(request, limits)
    record = access_log.current()
    with collector.paused():  # a million small objects need no collections between them
        read = read_body(kind, body, record.ignored)
    if record.ignored and logger.isEnabledFor(logging.DEBUG):
        names = one_line(", ".join(record.ignored[:_NAMED_FIELDS]), _NAMED_LENGTH)
        logger.debug("%s: unknown fields ignored (%d): %s", request.url.path, len(record.ignored), names)
    return read


async def read_array(request: Request, limits: Limits) -> list[Any]:
    """The body of a request that is an array. Raises ApiError as `read_request`."""
    return parsed(await read_raw(request, limits), list)


async def read_raw(request: Request, limits: Limits) -> bytes:
    """The bytes of a body, which may be asked for twice. Raises ApiError for one too large or too slow."""
    read: bytes | None = request.scope.get(BODY_KEY)
    if read is not None:
        return read
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(415, f"Content-Encoding {coding[:80]!r} is not supported: send the body as it is")
    declared = request.headers.get("content-length", "")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.read_s):
            if declared.isdecimal() and int(declared) > limits.body:
                raise await _too_large(request, limits)
            async for part in request.stream():
                body += part
                if len(body) > limits.body:
                    raise await _too_large(request, limits)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.read_s:g} s (--read-timeout)") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    request.scope[BODY_KEY] = read = bytes(body)
    return read


async def _too_large(request: Request, limits: Limits) -> ApiError:
    """The error. If the connection is to be closed, the rest of the body is read first, for up to `header_s`: closing
    with unread data would lose the answer."""
    if "close" in request.headers.get("connection", "").lower():
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.header_s):
                async for _ in request.stream():
                    pass
    return ApiError(413, f"the body is over {limits.body} bytes (--max-body)", code="over_limit")


async def off_loop(function: Callable[[], T], field: str | None = None, code: str | None = None) -> T:
    """The result of `function`, computed in a thread. Its EngineError is raised as an ApiError of the request's
    `field`."""
    try:
        return await asyncio.to_thread(function)
    except EngineError as error:
        raise bad_request(str(error), field, code) from None


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled, and ClientGoneError raised, when the client leaves first.

    The work begins at once, in the caller's task: if many requests come together, the first is on its way to the engine
    before the others are read.
    """
    task, left, over = asyncio.current_task(), False, False
    assert task is not None

    def seen(watcher: asyncio.Future[None]) -> None:
        nonlocal left
        if not watcher.cancelled():
            watcher.exception()  # of a connection that has failed
        if not over:
            left = True
            task.cancel()

    watcher = asyncio.ensure_future(_gone(receive))
    watcher.add_done_callback(seen)
    try:
        return await work
    except asyncio.CancelledError:
        if left and task.cancelling() == 1:
            raise ClientGoneError from None
        raise
    finally:
        over = True
        watcher.cancel()
        if left:
            task.uncancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Events of `media_type`. `chunks` are whole events; closing the generator frees what it holds.

    began: called with the connection once the first part has been sent. From then on parts may also be written to it
        directly, while the next of `chunks` is waited for.
    """

    def __init__(
        self,
        first: bytes,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        began: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._began = began

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._write(send, scope.get(DIRECT)))
        finally:
            await self._chunks.aclose()

    async def _write(self, send: Send, connection: Connection | None) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        if connection is not None:
            self._began(connection)
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Catch:
    """The outermost middleware: every failure becomes an answer and a line in the log, and ends with its request.

    Slashes at the end of a path are ignored.

    `done` is called with path and status of every answer. A connection that takes longer than `write_s` for a write is
    aborted.
    """

    def __init__(self, app: ASGIApp, done: Callable[[str, int], None], write_s: float) -> None:
        self.app = app
        self.done = done
        self.write_s = write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["path"] = scope["path"].rstrip("/") or "/"
        status, record, connection = 0, access_log.begin(scope), connection_of(scope)

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Header names are case-insensitive, but scripts look for them as llama-server writes them.
                named = [(name.title(), value) for name, value in message["headers"]]
                message = {**message, "headers": named}
            await send_within(self.write_s, connection, send, message)

        try:
            await self.app(scope, receive, noting_send)
        except (ClientGoneError, ClientDisconnect):
            status, record.error = access_log.CLIENT_GONE, "the client has gone"
        except SlowReaderError as error:
            logger.warning("%s %s: %s", scope["method"], scope["path"], error)
            status, record.error = access_log.CLIENT_GONE, str(error)
        except Exception as error:
            answer = error if isinstance(error, ApiError) else _internal(error, scope)
            record.error = answer.message
            if not status:  # else it is too late for an answer: uvicorn closes what has no end
                await error_response(answer, scope["path"])(scope, receive, noting_send)
        finally:
            record.write(status)
            self.done(scope["path"], status)
            # Reference cycles keep the scope until they are collected; a body may be large.
            scope.pop(BODY_KEY, None)
            scope.pop(DIRECT, None)


def _internal(error: Exception, scope: Scope) -> ApiError:
    """The answer to a fault of this program. The log has its causes and, with `-v`, its traceback."""
    logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}")
