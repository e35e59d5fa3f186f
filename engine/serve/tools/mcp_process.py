"""The stdio transport of the Model Context Protocol: a server as a child process, one JSON-RPC message a line
(https://modelcontextprotocol.io/specification/2025-11-25/basic/transports).

The process leads its own process group, which ends with the transport: its standard input is closed, then it gets
SIGTERM and SIGKILL. When a server ends by itself, the SDK's own transport would leave the programs that it started
running.
"""

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from quengine.errors import EngineError
from quengine.platform.log_lines import one_line
from quengine.serve.tools.command import PASSED
from quengine.serve.tools.mcp_config import McpServer

logger = logging.getLogger("quengine.serve.mcp")

_MAX_LINE = 8 << 20
"""Bytes of a message."""
_GRACE_SECONDS = 0.5
"""After its input is closed, and again after SIGTERM."""
_POLL_SECONDS = 0.01


class McpProcess:
    """The process of a server. last_words: the newest lines of its standard error. ended: it sends nothing more."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self.ended = False
        self.last_words: deque[str] = deque(maxlen=5)

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[tuple[Any, Any]]:
        """The streams of messages that it sends and takes, until the block ends. Raises EngineError."""
        server = self._server
        environment = {name: os.environ[name] for name in PASSED if name in os.environ}
        try:
            process = await asyncio.create_subprocess_exec(
                *server.command,
                cwd=server.folder,
                env={**environment, **server.env},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_MAX_LINE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise EngineError(f"{server.command[0]} cannot be started: {reason}") from None
        given, received = anyio.create_memory_object_stream[Any](0)
        outgoing, sent = anyio.create_memory_object_stream[Any](0)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._receive, process, given)
                group.start_soon(_send, process, sent)
                group.start_soon(self._listen, process)
                try:
                    yield received, outgoing
                finally:
                    group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
            for stream in (given, received, outgoing, sent):
                stream.close()

    async def _receive(self, process: asyncio.subprocess.Process, given: Any) -> None:
        assert process.stdout is not None
        with given, suppress(anyio.BrokenResourceError):
            while True:
                try:
                    line = await process.stdout.readline()
                    if not line:
                        self.ended = True
                        return
                    message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                except ValueError:  # a line over the limit, which is dropped, or one that is no message
                    logger.debug("MCP server %s: a line of its output is no message", self._server.name)
                    continue
                await given.send(message)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while part := await process.stderr.read(1 << 16):
            for line in part.decode(errors="replace").splitlines():
                self.last_words.append(one_line(line, 300))
                logger.debug("MCP server %s: %s", self._server.name, self.last_words[-1])


async def _send(process: asyncio.subprocess.Process, sent: Any) -> None:
    assert process.stdin is not None
    with sent, suppress(ConnectionError):
        async for message in sent:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process, and what it has started."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        for _ in range(2):
            with anyio.move_on_after(_GRACE_SECONDS):
                while process.returncode is None:
                    await asyncio.sleep(_POLL_SECONDS)
            _signal(process, signal.SIGTERM)
    finally:
        _signal(process, signal.SIGKILL)
    while process.returncode is None:
        await asyncio.sleep(_POLL_SECONDS)


def _signal(process: asyncio.subprocess.Process, sign: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, sign)
