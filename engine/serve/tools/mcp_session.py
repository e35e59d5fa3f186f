"""A session with an MCP server: it begins at the first use, begins again if the server has ended, and ends when it has
been idle for long. The SDK (the package `mcp`, an optional requirement) speaks the protocol; the first use imports it.

https://modelcontextprotocol.io/specification
"""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import Any

from quengine.errors import CannotRunError, EngineError
from quengine.platform.log_lines import one_line
from quengine.serve.tools.mcp_config import McpServer
from quengine.serve.tools.tool import Answer, ServerTool, ToolError, ToolInput

logger = logging.getLogger("quengine.serve.mcp")

_CONNECT_SECONDS = 30.0
"""For a start and the handshake, before which the SDK waits for 10 s where a server ignores requests that it does not
know, as `server/discover` is to those of before 2026."""
_END_SECONDS = 5.0
_IDLE_SECONDS = 300.0
_COOLDOWN_SECONDS = 5.0
"""After a failed start, for which calls fail at once."""
_MAX_TEXT = 256 << 10
"""Characters of a result."""
_MAX_TOOLS = 1000


def check_installed() -> None:
    """Raises CannotRunError where the SDK is not installed."""
    if find_spec("mcp") is None:
        raise CannotRunError("MCP servers need the package mcp: pip install 'quengine[mcp]'")


class McpSession:
    """See the module docstring. All of it runs in the event loop."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self._lock = asyncio.Lock()
        self._client: Any = None
        self._mode = "auto"
        self._process: Any = None
        self._owner: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._failed: tuple[float, str] = (0.0, "")
        self._calls = 0
        self._used_at = 0.0

    async def tools(self) -> list[ServerTool]:
        """Its tools, each called SERVER_TOOL. Raises ToolError."""
        client = await self._connected()
        listed: list[Any] = []
        cursor = None
        while len(listed) < _MAX_TOOLS:
            page = await self._asked(client.list_tools(cursor=cursor))
            listed += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return [self._tool(each) for each in listed]

    def _tool(self, listed: Any) -> ServerTool:
        """The tool for an entry of the server's list. It counts as changing things unless declared read-only."""

        async def run(call: ToolInput) -> Answer:
            return await self.call(listed.name, call.arguments)

        only_reads = listed.annotations is not None and listed.annotations.read_only_hint is True
        name = f"{self.server.prefix}_{listed.name}"
        parameters = {"type": "object", "properties": {}, **(listed.input_schema or {})}
        title = listed.title or name
        return ServerTool(
            name, title, listed.description or "", parameters, run, kind="mcp", changes=not only_reads
        )

    async def call(self, name: str, arguments: dict[str, Any]) -> Answer:
        """The answer to a call of a tool. Raises ToolError where there is none."""
        client = await self._connected()
        result = await self._asked(
            client.call_tool(name, arguments, read_timeout_seconds=self.server.seconds)
        )
        text = "\n".join(map(_text_of, result.content))
        if not result.content and result.structured_content is not None:
            return dict(result.structured_content)
        if len(text) > _MAX_TEXT:
            text = text[:_MAX_TEXT] + "\n[output truncated]"
        return {"error": text or "the tool failed"} if result.is_error else {"plain_text_response": text}

    async def _asked(self, work: Any) -> Any:
        """The server's answer to `work`. Raises ToolError where there is none, or it is an error."""
        self._calls += 1
        try:
            async with asyncio.timeout(
                self.server.seconds + 1
            ):  # that of the SDK comes first, and tells the server
                return await work
        except TimeoutError:
            raise ToolError(f"{self._named} did not answer within {self.server.seconds:g} s") from None
        except Exception as error:  # the SDK's, and those of its transports
            if self.server.url and self._calls == 1:
                self._leave.set()  # a server that was started again has no such session
            if self._process is not None and self._process.ended:
                raise ToolError(f"{self._named} has ended{self._why()}") from None
            raise ToolError(f"{self._named}: {_reason(error)}") from None
        finally:
            self._calls -= 1
            self._used_at = time.monotonic()

    async def _connected(self) -> Any:
        """The client of a session that goes on, or of a new one. Raises ToolError."""
        async with self._lock:
            over = self._leave.is_set() or (self._process is not None and self._process.ended)
            if self._owner is not None and (over or self._owner.done()):
                await self.close()
            if self._owner is None:
                since, problem = self._failed
                if time.monotonic() < since + _COOLDOWN_SECONDS and problem:
                    raise ToolError(problem)
                await self._begin()
            self._used_at = time.monotonic()
            return self._client

    async def _begin(self) -> None:
        self._leave = asyncio.Event()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready))
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                self._client = await asyncio.shield(ready)
        except BaseException as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else _reason(error)
            problem = f"{self._named} cannot be used: {why}{self._why()}"
            await self.close()
            if not isinstance(error, Exception):
                raise
            self._mode = "auto"
            self._failed = (time.monotonic(), problem)
            raise ToolError(problem) from None

    async def _own(self, ready: "asyncio.Future[Any]") -> None:
        """The task that a session lives in, from its beginning to its end."""
        from mcp import Client
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

        try:
            async with AsyncExitStack() as held:
                transport = await self._transport(held)
                client = Client(transport, mode=self._mode, read_timeout_seconds=self.server.seconds)
                async with client:
                    if client.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS:
                        self._mode = "legacy"  # started again, it is not probed again
                    self._used_at = time.monotonic()
                    ready.set_result(client)
                    await self._idle_or_left()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(
                    error if isinstance(error, Exception) else ConnectionError("it was ended")
                )
                ready.exception()  # where nobody waits for it any more
            elif isinstance(error, Exception):
                logger.debug("%s: the session ended: %s", self._named, _reason(error))
            if not isinstance(error, Exception):
                raise

    async def _transport(self, held: AsyncExitStack) -> Any:
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs tracebacks of what the server sends
        logging.getLogger("client").setLevel(logging.CRITICAL)  # the name of its session's logger
        if self.server.command:
            from quengine.serve.tools.mcp_process import McpProcess

            self._process = McpProcess(self.server)
            return self._process.transport()
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(self.server.seconds, connect=_CONNECT_SECONDS)
        http = await held.enter_async_context(
            httpx2.AsyncClient(headers=dict(self.server.headers), timeout=timeout, follow_redirects=False)
        )  # a redirect would take the headers, which may hold a key, to another address
        return streamable_http_client(self.server.url, http_client=http)

    async def _idle_or_left(self) -> None:
        """Waits until `close`, or until nobody has called for a while."""
        while self._calls or time.monotonic() < self._used_at + _IDLE_SECONDS:
            try:
                async with asyncio.timeout(_IDLE_SECONDS / 10):
                    await self._leave.wait()
                return
            except TimeoutError:
                pass
        self._leave.set()

    async def close(self) -> None:
        """End the session, and the server's process."""
        owner, client = self._owner, self._client
        self._owner = self._client = None
        if owner is None:
            return
        self._leave.set()
        if client is None:  # it has not begun, and does not look at that
            owner.cancel()
        await asyncio.wait((owner,), timeout=_END_SECONDS)
        if not owner.done():
            owner.cancel()
            await asyncio.wait((owner,))

    @property
    def _named(self) -> str:
        return f"the MCP server {self.server.name}"

    def _why(self) -> str:
        words = self._process.last_words if self._process is not None else ()
        return f" ({words[-1]})" if words else ""


def _text_of(part: Any) -> str:
    """The text of a part of an answer; for other parts, only their kind."""
    text = getattr(part, "text", None)
    return text if isinstance(text, str) else f"[{part.type}]"


def _reason(error: BaseException) -> str:
    """The first error of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error) if isinstance(error, EngineError) or str(error) else type(error).__name__
    return one_line(text, 500)
