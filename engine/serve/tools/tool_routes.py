"""GET and POST /tools, as llama-server has them: the tools that a model can be given, and a call of one.

The answer to a call is the tool's, even if it failed ("error"): a model is told either. With `stream` it is
server-sent events, {"chunk": "..."} and at the end {"done": true}. The header X-Tool-Cwd names the folder that
relative paths start from, within --tools-dir.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.http import EVENTS, EventStream, json_response, unless_gone
from quengine.serve.models.registry import Models
from quengine.serve.routes.route import READS_ALONE, OfServer
from quengine.serve.routes.streaming import data
from quengine.serve.schemas.errors import ApiError, bad_request
from quengine.serve.tool_options import ToolsOptions
from quengine.serve.tools.tool import ListedTool, ServerTool, ToolError, ToolEvent, ToolInput, ToolRequest
from quengine.serve.tools.toolset import Toolset

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TARGET = re.compile(r"[A-Za-z0-9._@][A-Za-z0-9._@-]*")


class ToolRoom:
    """The tools beside a server's models, and their routes.

    Raises:
        EngineError: as `Toolset`.
    """

    def __init__(self, options: ToolsOptions, say: Callable[[str], None]) -> None:
        self.toolset = Toolset(options, say)
        errors = (*READS_ALONE, 404, 500, 501)
        self.routes = (
            OfServer("GET /tools", self.list_tools),
            OfServer("POST /tools", self.call_tool, dict[str, Any], errors=errors, event=ToolEvent),
        )
        self.start, self.end = self.toolset.start, self.toolset.end

    async def list_tools(self, models: Models, request: Request) -> list[ListedTool]:
        """The tools that may be called here.

        What a model may be given, with llama-server's names. Raises ApiError (403) where there are none.
        """
        del models
        check_page(request)
        return [tool.listing for tool in (await self.toolset.tools()).values()]

    async def call_tool(self, models: Models, request: Request, body: ToolRequest) -> Response:
        """Call a tool.

        Raises ApiError for one that is not here, and for a runtime other than this machine.
        """
        del models
        check_page(request)
        tools = await self.toolset.tools(body.tool)
        _check_runtime(request.headers.get("x-tool-runtime", ""))
        tool = tools.get(body.tool)
        if tool is None:
            raise ApiError(
                404, f"no tool {body.tool[:80]!r} here; there: {', '.join(tools)[:1000]}", param="tool"
            )
        if body.stream and not tool.streams:
            raise ApiError(404, f"the tool {tool.name} has no stream", param="stream")
        try:
            folder = self.toolset.folder(unquote(request.headers.get("x-tool-cwd", "")))
        except ToolError as error:
            raise bad_request(str(error), "x-tool-cwd", "invalid_value") from None
        arguments = {key: value for key, value in body.params.items() if key != "cwd" or tool.kind == "mcp"}
        if body.stream:
            chunks = _streamed(self.toolset, tool, partial(ToolInput, arguments, folder))
            return EventStream(await anext(chunks), chunks, EVENTS)
        work = self.toolset.call(tool, ToolInput(arguments, folder))
        return json_response(await unless_gone(request.receive, work))


async def _streamed(
    tools: Toolset, tool: ServerTool, call: "partial[ToolInput]"
) -> AsyncGenerator[bytes, None]:
    parts: asyncio.Queue[str | None] = asyncio.Queue()
    task = asyncio.create_task(tools.call(tool, call(write=parts.put_nowait)))
    task.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        yield b": begun\n\n"
        while (part := await parts.get()) is not None:
            yield data(ToolEvent(chunk=part))
        error = task.result().get("error")
        yield data(ToolEvent(done=True, error=UNSET if error is None else error))
    finally:
        task.cancel()


def check_page(request: Request) -> None:
    """Raises ApiError for what a browser sends for another site's page without its Origin: an image, a link, a form."""
    if (
        "origin" not in request.headers
        and request.headers.get("sec-fetch-site", "same-origin") != "same-origin"
    ):
        raise ApiError(403, "pages of other sites may not use this (Sec-Fetch-Site)")


def _check_runtime(runtime: str) -> None:
    """Raises ApiError for a runtime other than this machine: requests cannot send tools to a container or elsewhere."""
    scheme, _, target = runtime.partition(":")
    if not runtime:
        return
    if scheme not in ("ssh", "docker-container", "podman-container"):
        raise ApiError(500, f"unknown tool runtime {runtime[:80]!r}")
    if not (_TARGET if scheme == "ssh" else _NAME).fullmatch(target):
        raise ApiError(500, f"invalid {'ssh target' if scheme == 'ssh' else 'container id'} {target[:80]!r}")
    raise ApiError(501, "tools run on this machine alone: X-Tool-Runtime names another", code="unsupported")
