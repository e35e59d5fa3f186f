"""All tools of a server: the built-in ones that its flags name, and those of its MCP servers."""

import asyncio
import logging
import platform
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from quengine.serve.schemas.errors import ApiError
from quengine.serve.tool_options import BUILT_IN, COMMANDS, ToolsOptions
from quengine.serve.tools.command import check_confinement, command_tool
from quengine.serve.tools.file_tools import file_tools
from quengine.serve.tools.mcp_config import mcp_servers
from quengine.serve.tools.mcp_session import McpSession, check_installed
from quengine.serve.tools.search import search_tools
from quengine.serve.tools.tool import Answer, ServerTool, ToolError, ToolInput, schema_of
from quengine.serve.tools.workspace import Workspace

logger = logging.getLogger("quengine.serve")

MOST_CALLS = 16
"""Calls that run at a time; others wait."""


class NoArguments(Struct):
    pass


class Toolset:
    """The tools of a server. say: called with lines for the terminal.

    Raises:
        EngineError: the MCP servers' configuration is wrong, the SDK is not there, or commands cannot be confined.
    """

    def __init__(self, options: ToolsOptions, say: Callable[[str], None]) -> None:
        self.options = options
        self._say = say
        self._workspace = None if options.folder is None else Workspace(options.folder)
        if COMMANDS in options.names and options.confined:
            check_confinement(options.as_root)
        built_in = {} if self._workspace is None else _built_in(self._workspace, options.confined)
        self._own = {name: built_in[name] for name in options.names}
        self._sessions = [McpSession(server) for server in mcp_servers(options)]
        if self._sessions:
            check_installed()
        self._found: dict[str, list[ServerTool]] = {}
        self._problems: dict[str, str] = {}
        self._finding: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Answer]] = set()
        self._room = asyncio.Semaphore(MOST_CALLS)
        self._end: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Say what clients may do, and look at the MCP servers."""
        if self._own and self._workspace is not None:
            warning = f"warning: clients may call {', '.join(self._own)} in {self._workspace.root}"
            if COMMANDS in self._own:
                confined = "write there alone, read system folders and reach the network"
                unconfined = "do whatever you may do, elsewhere too"
                warning += f"; commands may {confined if self.options.confined else unconfined}"
            self._say(warning)
        if self._sessions:
            names = ", ".join(session.server.name for session in self._sessions)
            self._say(f"warning: clients may call the tools of MCP servers: {names}")
            self._finding = asyncio.create_task(self._find())

    async def _find(self) -> None:
        """List the tools of each MCP server that has not been listed yet."""

        async def ask(session: McpSession) -> None:
            name = session.server.name
            try:
                self._found[name] = await session.tools()
                count = len(self._found[name])
                self._say(f"MCP server {name}: {count} tool{'s' * (count != 1)}")
            except ToolError as error:
                if self._problems.get(name) != str(error):
                    self._say(f"warning: {error}")
                self._problems[name] = str(error)

        missing = [each for each in self._sessions if each.server.name not in self._found]
        await asyncio.gather(*map(ask, missing))

    async def tools(self, wanted: str = "") -> dict[str, ServerTool]:
        """The tools by name; of several with one name, the first. Waits for MCP servers that have not been listed yet,
        unless the tool `wanted` is there. Raises ApiError (403) where there are no tools."""
        if not self._own and not self._sessions:
            raise ApiError(403, "this server was started without --tools and --mcp-servers-config")
        if wanted in (tools := self._listed()):
            return tools
        if len(self._found) < len(self._sessions) and self._end is None:
            if self._finding is None or self._finding.done():
                self._finding = asyncio.create_task(self._find())
            await asyncio.shield(self._finding)
        return self._listed()

    def _listed(self) -> dict[str, ServerTool]:
        tools = dict(self._own)
        for session in self._sessions:
            for tool in self._found.get(session.server.name, ()):
                tools.setdefault(tool.name, tool)
        return tools

    def folder(self, path: str) -> Path | None:
        """The folder that relative paths of a call start from. Raises ToolError where it is not in --tools-dir."""
        return self._workspace.folder(path) if self._workspace is not None and path else None

    async def call(self, tool: ServerTool, call: ToolInput) -> Answer:
        """A tool's answer, {"error": ...} where it fails. The tool is ended if the caller is cancelled."""
        task = asyncio.create_task(self._run(tool, call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
        return {"error": "the server is shutting down"} if task.cancelled() else task.result()

    async def _run(self, tool: ServerTool, call: ToolInput) -> Answer:
        if self._end is not None:
            raise asyncio.CancelledError
        try:
            async with self._room:
                return await tool.run(call)
        except ToolError as error:
            return {"error": str(error)}

    def end(self) -> "asyncio.Task[None]":
        """End all calls, with an error, and all MCP servers; no call begins any more."""
        if self._end is None:
            self._end = asyncio.create_task(self._stop())
        return self._end

    async def _stop(self) -> None:
        tasks = [*self._calls, *filter(None, (self._finding,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(session.close() for session in self._sessions))


def _built_in(workspace: Workspace, confined: bool) -> dict[str, ServerTool]:
    async def get_info(call: ToolInput) -> Answer:
        return {"os": f"{platform.system()} {platform.release()}", "cwd": str(call.folder or workspace.root)}

    about = "The operating system, and the folder that relative paths start from."
    tools = [
        *file_tools(workspace),
        *search_tools(workspace),
        command_tool(workspace, confined),
        ServerTool("get_info", "About this machine", about, schema_of(NoArguments), get_info),
    ]
    assert {tool.name for tool in tools} == set(BUILT_IN)
    return {tool.name: tool for tool in tools}
