"""An MCP server for tests, made with the official SDK: a program over stdio, with the argument PORT over HTTP."""

import os
import subprocess
import sys
import time

from mcp.server import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("tests")


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool(structured_output=False)
def sleep(seconds: float) -> str:
    """Answer late."""
    time.sleep(seconds)
    return "awake"


@server.tool(structured_output=False)
def fail() -> str:
    """Always an error."""
    raise ValueError("no luck")


@server.tool(structured_output=False)
def die() -> str:
    """End without an answer."""
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool(structured_output=False)
def leave_a_child() -> str:
    """Start a process that holds all of this one's files open."""
    return str(subprocess.Popen(["sleep", "60"]).pid)


@server.tool(structured_output=False)
def environment() -> str:
    """The names of all environment variables."""
    return " ".join(sorted(os.environ))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
