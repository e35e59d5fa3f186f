"""The MCP servers of --mcp-servers-config and --mcp-servers-json, in the form that Cursor and llama-server read:

{"mcpServers": {"files": {"command": "npx", "args": ["-y", "PACKAGE"], "env": {}, "cwd": ".", "timeout_ms": 30000},
                "remote": {"url": "https://host/mcp", "headers": {"Authorization": "Bearer KEY"}}}}
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from quengine.errors import EngineError
from quengine.platform.input_files import read_text
from quengine.serve.tool_options import ToolsOptions

_MAX_BYTES = 1 << 20


class _Entry(Struct):
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str = ""
    headers: dict[str, str] = {}
    timeout_ms: Annotated[int, Meta(ge=1)] = 30000
    disabled: bool = False


class _File(Struct):
    mcp_servers: dict[str, _Entry] = msgspec.field(name="mcpServers")


@dataclass(frozen=True)
class McpServer:
    """A server that is started (`command`, with `env` over a few variables of this process), or reached at `url` with
    `headers`. seconds: the time limit of a call."""

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 30.0

    @property
    def prefix(self) -> str:
        """The prefix of its tools' names, with only those characters that names of functions may have."""
        return re.sub(r"[^a-zA-Z0-9_-]", "_", self.name)


def mcp_servers(options: ToolsOptions) -> list[McpServer]:
    """The servers of the options. Raises EngineError for a file that cannot be read or is no list of servers."""
    texts = []
    if options.mcp_config is not None:
        flag = "--mcp-servers-config"
        text = read_text(options.mcp_config, f"{flag}: cannot read", _MAX_BYTES)
        texts.append((f"{flag} {options.mcp_config}", text))
    if options.mcp_json is not None:
        texts.append(("--mcp-servers-json", options.mcp_json))
    servers: dict[str, McpServer] = {}
    for where, text in texts:
        try:
            entries = msgspec.json.decode(text, type=_File).mcp_servers
        except msgspec.DecodeError as error:
            raise EngineError(f"{where}: {error}") from None
        for name, entry in entries.items():
            if name in servers:
                raise EngineError(f"{where}: {name}: there are two MCP servers of this name")
            if not entry.disabled:
                servers[name] = _server(name, entry, f"{where}: {name}")
    return list(servers.values())


def _server(name: str, entry: _Entry, where: str) -> McpServer:
    if not name or bool(entry.command) == bool(entry.url):
        raise EngineError(f'{where}: must have either a "command" or a "url"')
    if entry.url and (
        urlsplit(entry.url).scheme not in ("http", "https") or not urlsplit(entry.url).hostname
    ):
        raise EngineError(f"{where}: url {entry.url!r}: must be http://HOST/... or https://HOST/...")
    return McpServer(
        name,
        (entry.command, *entry.args) if entry.command else (),
        entry.env,
        entry.cwd,
        entry.url,
        entry.headers,
        entry.timeout_ms / 1000,
    )
