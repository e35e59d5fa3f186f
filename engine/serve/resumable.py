"""Streams that outlive their connection: a client names its conversation, and can read the stream again from any byte.

A request with the header X-Conversation-Id is answered by a task of its own, whose output is kept. The request's
connection only reads this output, and so does GET /v1/stream. The newest MAX_BYTES of a stream are kept until
KEPT_SECONDS after its end.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quengine.serve.connections import DIRECT
from quengine.serve.http import read_raw, unless_gone
from quengine.serve.schemas.errors import bad_request
from quengine.serve.settings import Limits

MAX_BYTES = 4 << 20
MAX_STREAMS = 64
KEPT_SECONDS = 300.0
_MAX_ID = 512


class KeptStream:
    """The output of a request so far. head: its http.response.start message, None until that is there."""

    def __init__(self, conversation: str) -> None:
        self.conversation = conversation
        self.head: Message | None = None
        self.began, self.ended_at = time.time(), 0.0
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False
        self.dropped = 0
        """Bytes before those that are kept."""
        self._kept = bytearray()
        self._changed = asyncio.Event()

    @property
    def total(self) -> int:
        return self.dropped + len(self._kept)

    @property
    def done(self) -> bool:
        return self.task is not None and self.task.done()

    def cancel(self) -> None:
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Has the request answered. Its errors reach only a connection that is still there."""
        try:
            await app({**scope, DIRECT: None}, self._never, self._keep)
        finally:
            self.ended_at = time.time()
            self._notify()

    async def _never(self) -> Message:
        """The request's `receive`: its body has been read, and its client does not leave."""
        await asyncio.Event().wait()
        raise AssertionError

    async def _keep(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.head = message
        else:
            self._kept += message.get("body", b"")
            if (excess := len(self._kept) - MAX_BYTES) > 0:
                del self._kept[:excess]
                self.dropped += excess
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def parts(self, at: int) -> AsyncIterator[bytes]:
        """The bytes from `at` on, until the end. Ends early if the next bytes of a slow reader are no longer kept."""
        while at >= self.dropped:
            changed, over = self._changed, self.ended_at > 0
            if part := bytes(self._kept[at - self.dropped :]):
                at += len(part)
                yield part
            elif over:
                return
            else:
                await changed.wait()

    async def pass_on(self, send: Send) -> None:
        """The whole answer to the request's own connection. Raises what the request raised before its answer began."""
        while self.head is None and not self.ended_at:
            await self._changed.wait()
        if self.head is None:
            if self.cancelled:
                raise bad_request("the request was cancelled (DELETE /v1/stream)", code="cancelled")
            assert self.task is not None
            await self.task
            return
        await send(self.head)
        async for part in self.parts(0):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class StreamStore:
    """The streams of a server by conversation; only the newest of each conversation is kept."""

    def __init__(self) -> None:
        self._streams: dict[str, KeptStream] = {}

    def add(self, stream: KeptStream) -> None:
        """Adds a stream. Cancels the conversation's previous one and, if there are too many, the oldest, ended ones
        first."""
        self.remove(stream.conversation)
        self._expire()
        while len(self._streams) >= MAX_STREAMS:
            self.remove(
                min(self._streams.values(), key=lambda each: (not each.done, each.began)).conversation
            )
        self._streams[stream.conversation] = stream

    def get(self, conversation: str) -> KeptStream | None:
        self._expire()
        return self._streams.get(conversation)

    def remove(self, conversation: str) -> None:
        """Drop a stream, and end it where it runs."""
        if (stream := self._streams.pop(conversation, None)) is not None:
            stream.cancel()

    def found(self, conversations: list[str]) -> list[KeptStream]:
        """The streams of these conversations, also those under an id followed by ::MODEL."""
        self._expire()
        return [
            stream
            for wanted in dict.fromkeys(conversations)
            for name, stream in self._streams.items()
            if name == wanted or name.startswith(f"{wanted}::")
        ]

    def _expire(self) -> None:
        now = time.time()
        for stream in [*self._streams.values()]:
            if stream.done and stream.ended_at + KEPT_SECONDS < now:
                del self._streams[stream.conversation]


class _Streamed(msgspec.Struct):
    stream: object = False


class Resumable:
    """The ASGI application of a path whose streams are kept if a request names its conversation."""

    def __init__(self, app: ASGIApp, store: StreamStore, limits: Limits) -> None:
        self.app = app
        self.store = store
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        conversation = Headers(scope=scope).get("x-conversation-id", "")
        if not conversation or not await self._streams(Request(scope, receive)):
            await self.app(scope, receive, send)
            return
        if len(conversation) > _MAX_ID:
            raise bad_request(f"X-Conversation-Id has more than {_MAX_ID} characters", "x-conversation-id")
        stream = KeptStream(conversation)
        self.store.add(stream)
        stream.task = asyncio.create_task(stream.run(self.app, scope))
        stream.task.add_done_callback(lambda _: self._ended(stream))
        await unless_gone(receive, stream.pass_on(send))

    def _ended(self, stream: KeptStream) -> None:
        """Removes a stream that failed before its answer began."""
        assert stream.task is not None
        failed = stream.task.cancelled() or stream.task.exception() is not None
        if failed and stream.head is None and self.store.get(stream.conversation) is stream:
            self.store.remove(stream.conversation)

    async def _streams(self, request: Request) -> bool:
        """Whether a request wants a stream; its body is read again by the route. Raises ApiError."""
        try:
            body = msgspec.json.decode(await read_raw(request, self.limits), type=_Streamed)
        except (msgspec.DecodeError, RecursionError):  # which the route explains
            return False
        return body.stream is True
