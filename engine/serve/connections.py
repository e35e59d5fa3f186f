"""Connections under uvicorn: how many there may be, and how long each may keep the server waiting.

A connection that sends no whole request is closed after a time limit, and before others if connections run out. One
whose reader does not read is aborted: closing it would wait for the reader to take what is left.
"""

import asyncio
import json
import logging
import re
from contextlib import suppress
from typing import Any, Literal

import h11
import msgspec
from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from quengine.platform.log_lines import Seldom
from quengine.serve.schemas.errors import ApiError
from quengine.serve.settings import Limits

logger = logging.getLogger("quengine.serve")

MAX_REFUSED = 16
"""Refused connections that get an answer at once; any more are closed without one."""
LINGER_SECONDS = 1.0
"""For a refused client to read why."""

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_REQUEST_LINE = re.compile(
    rb"%b{1,32}(?: [\x21-\x7e]*(?: (?:H|HT|HTT|HTTP|HTTP/[0-9.]{0,3})?\r?)?)?" % _TOKEN
)
_HEADER_LINE = re.compile(
    rb"(?:%b+(?::[^\x00-\x08\x0a-\x1f\x7f]*)?|[ \t][^\x00-\x08\x0a-\x1f\x7f]*)?\r?" % _TOKEN
)
_CHUNK_LINE = re.compile(rb"[0-9A-Fa-f]{0,20}[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\r?")
"""What the lines of a request begin with."""

ConnectionPhase = Literal["idle", "partial", "busy"]
"""Nothing received; a part of a request; a request that is being answered."""

DIRECT = "quengine.connection"
"""The key of a scope under which its `Connection` is, where parts of the body may be written to it directly."""
_open: "dict[tuple[str, int], Connection]" = {}


class Connections:
    """All connections of a server.

    Args:
        limits: times, in seconds.
        most: connections open at once. One more takes the place of the connection that has waited longest for a
            request; if all are being answered, it gets a 503.
    """

    def __init__(self, limits: Limits, most: int) -> None:
        self.limits = limits
        self.most = most
        self._admitted: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # the longest first
        self._refused: set[Connection] = set()
        self._full = Seldom(logger)

    def protocol(self, **given: Any) -> "Connection":
        """A new connection; uvicorn calls this for each."""
        return Connection(self, **given)

    def admit(self, connection: "Connection") -> bool:
        if len(self._admitted) >= self.most and not self.drop_waiting(1):
            self._refused.add(connection)
            self._full.warning(
                "a connection is refused: %d are open and being answered (--max-connections)", self.most
            )
            return False
        self._admitted.add(connection)
        return True

    @property
    def may_refuse_in_words(self) -> bool:
        return len(self._refused) <= MAX_REFUSED

    def drop_waiting(self, count: int) -> int:
        """Closes up to `count` connections without a request, the longest waiting first. Returns how many."""
        victims = list(self._waiting)[:count]
        for victim in victims:
            self.gone(victim)
            victim.drop()
        return len(victims)

    def enter(self, connection: "Connection", phase: ConnectionPhase) -> None:
        self._waiting.pop(connection, None)
        if phase != "busy" and connection in self._admitted:
            self._waiting[connection] = None

    def gone(self, connection: "Connection") -> None:
        self._admitted.discard(connection)
        self._refused.discard(connection)
        self._waiting.pop(connection, None)

    def __len__(self) -> int:
        return len(self._admitted)


class Connection(H11Protocol):
    """uvicorn's HTTP connection, with a time limit on each part of a request that it waits for.

    uvicorn limits the time between two requests only, and any byte ends that.
    """

    def __init__(self, all_of_them: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = all_of_them
        self._phase: ConnectionPhase | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            _open[self.client] = self
        logger.debug("connection from %s, %d open", self.address, len(self._all) + 1)
        if self._all.admit(self):
            self._enter("idle")
        else:
            self._refuse()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            if not self.transport.is_closing() and self._is_garbage():
                self._refuse_garbage()
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            _open.pop(self.client, None)
        self._stop_timer()
        self._all.gone(self)
        super().connection_lost(exc)

    @property
    def address(self) -> str:
        return f"{self.client[0]}:{self.client[1]}" if self.client else "an unknown address"

    @property
    def writable(self) -> bool:
        """Whether a part of the current answer can be written, its reader having taken all before it."""
        cycle = self.cycle
        return not (
            self.transport.get_write_buffer_size()
            or self.transport.is_closing()
            or cycle is None
            or cycle.disconnected
            or cycle.response_complete
        )

    def write_part(self, part: bytes) -> None:
        """Writes the next part of a body that has begun and has no set length, as ASGI's `send` does."""
        if (
            self.conn.their_http_version == b"1.1"
        ):  # in chunks; h11 would take longer for these bytes than all else here
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        else:
            self.transport.write(self.conn.send(h11.Data(data=part)))

    def drop(self) -> None:
        """Close now, in favour of another connection."""
        logger.debug("connection from %s is closed in favour of another", self.address)
        self._stop_timer()
        self._close(0)

    def _watch(self) -> None:
        """Wait for what comes next, for as long as that may take."""
        if self.transport.is_closing():
            self._stop_timer()
            self._close(self._all.limits.write_s)
        elif self.cycle is not None and not self.cycle.response_complete:
            self._enter("busy")
        # The rest of a body that was answered before it was complete counts as a request's beginning.
        elif self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._enter("partial")
        else:
            self._enter("idle")

    def _enter(self, phase: ConnectionPhase) -> None:
        if phase == self._phase == "partial":
            return  # further bytes do not extend the time
        if phase != self._phase:
            self._all.enter(self, phase)
        self._phase = phase
        self._stop_timer()
        limits = self._all.limits
        if phase == "idle":
            self._timer = self.loop.call_later(limits.idle_s, self._idle_too_long)
        elif phase == "partial":
            self._timer = self.loop.call_later(limits.header_s, self._headers_too_slow)

    def _is_garbage(self) -> bool:
        """Whether the bytes so far cannot become a request, whatever follows. h11 alone would wait for a whole one."""
        waiting = self.conn.trailing_data[0]
        if not waiting:
            return False
        if self.conn.their_state is h11.IDLE:
            first, *others = waiting.split(b"\n")
            ended = [each.removesuffix(b"\r") for each in others[:-1]]
            return (
                _REQUEST_LINE.fullmatch(first) is None
                or any(each and b":" not in each and each[:1] not in (b" ", b"\t") for each in ended)
                or any(_HEADER_LINE.fullmatch(each) is None for each in others)
            )
        if (
            self.conn.their_state is h11.SEND_BODY
        ):  # a part of a chunk's head or end, or of the fields after the last
            line = waiting.partition(b"\n")[0]
            return _CHUNK_LINE.fullmatch(line) is None and _HEADER_LINE.fullmatch(line) is None
        return False

    def _refuse_garbage(self) -> None:
        logger.debug("connection from %s is closed: what it sends is no HTTP", self.address)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_answer(ApiError(400, "this is no HTTP/1.1 request"), b"Bad Request"))
        self.transport.close()

    def _idle_too_long(self) -> None:
        logger.debug(
            "connection from %s is closed: nothing came for %g s", self.address, self._all.limits.idle_s
        )
        with suppress(h11.LocalProtocolError):
            self.conn.send(h11.ConnectionClosed())
        self._close(self._all.limits.write_s)

    def _headers_too_slow(self) -> None:
        seconds = self._all.limits.header_s
        logger.debug("connection from %s is closed: no whole request within %g s", self.address, seconds)
        if self.conn.our_state is h11.IDLE:
            message = f"the headers did not arrive within {seconds:g} s (--header-timeout)"
            self.transport.write(_answer(ApiError(408, message), b"Request Timeout"))
        self._close(self._all.limits.write_s)

    def _refuse(self) -> None:
        self._refused = True
        if not self._all.may_refuse_in_words:
            self.transport.abort()
            return
        error = ApiError(
            503,
            f"all {self._all.most} connections are in use (--max-connections)",
            code="too_many_connections",
            retry_after=1,
        )
        self.transport.write(_answer(error, b"Service Unavailable"))
        if self.transport.can_write_eof():
            self.transport.write_eof()  # closing with a request unread would take the answer away
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _close(self, seconds: float) -> None:
        """Close; what the reader has not taken within `seconds` is dropped."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _answer(error: ApiError, phrase: bytes) -> bytes:
    """An error as a whole HTTP answer, for a connection without a request."""
    body = json.dumps(msgspec.to_builtins(error.body)).encode()
    retry = b"" if error.retry_after is None else b"Retry-After: %d\r\n" % error.retry_after
    return (
        b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        % (error.status, phrase, len(body))
        + retry
        + b"Connection: close\r\n\r\n"
        + body
    )


class SlowReaderError(Exception):
    """A write was not taken in time; its connection has been cut."""


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request, which its scope has from then on (DIRECT)."""
    client = scope.get("client")
    scope[DIRECT] = connection = _open.get(tuple(client)) if client else None
    return connection


async def send_within(seconds: float, connection: Connection | None, send: Send, message: Message) -> None:
    """Sends a message. A connection that takes longer than `seconds` is aborted. Raises SlowReaderError."""
    transport = None if connection is None else connection.transport
    if transport is not None and not transport.get_write_buffer_size():
        await send(message)  # the reader has taken all that was written: this does not wait for it
        return
    try:
        async with asyncio.timeout(seconds):
            await send(message)
    except TimeoutError:
        if transport is not None:
            transport.abort()
            await asyncio.sleep(0)  # uvicorn learns of it before the application returns
        raise SlowReaderError(f"a write was not taken within {seconds:g} s") from None
