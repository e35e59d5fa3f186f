"""Connections under uvicorn: found again by their client's address, so that one whose reader sleeps can be cut.

Closing such a connection would wait for the reader to take what is left; cutting it does not.
"""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_open: dict[tuple[str, int], asyncio.Transport] = {}


class Connection(H11Protocol):
    """uvicorn's HTTP connection, entered in the list while it is open."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            _open[self.client] = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            _open.pop(self.client, None)
        super().connection_lost(exc)


class SlowReaderError(Exception):
    """A write was not taken in time; its connection has been cut."""


class WriteDeadline:
    """ASGI middleware: cuts a connection that takes longer than `seconds` for one write."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self.app = app
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def timed_send(message: Message) -> None:
            try:
                async with asyncio.timeout(self.seconds):
                    await send(message)
            except TimeoutError:
                await _cut(scope.get("client"))
                raise SlowReaderError(f"a write was not taken within {self.seconds:g} s") from None

        await self.app(scope, receive, timed_send)


async def _cut(client: Any) -> None:
    transport = _open.get(tuple(client)) if client else None
    if transport is not None:
        transport.abort()
        await asyncio.sleep(0)  # uvicorn learns of it before the application returns
