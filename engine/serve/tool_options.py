"""The options of tools and MCP servers, and the conditions under which a server may have them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quengine.errors import EngineError, nearest
from quengine.options import Flag

BUILT_IN = (
    "read_file",
    "file_glob_search",
    "grep_search",
    "exec_shell_command",
    "write_file",
    "edit_file",
    "get_info",
)
"""llama-server's names."""
COMMANDS = "exec_shell_command"
_PANEL = "Tools (off by default)"


def _names(texts: Iterable[str]) -> tuple[str, ...]:
    """The tools that the texts of --tools name, in the order of BUILT_IN. Raises EngineError for another name."""
    given = [name for text in texts for part in text.split(",") if (name := part.strip())]
    for name in given:
        if name not in (*BUILT_IN, "all"):
            known = (*BUILT_IN, "all")
            raise EngineError(f"--tools {name}: there are {', '.join(known)}{nearest(name, known)}")
    return tuple(name for name in BUILT_IN if name in given or "all" in given)


@dataclass(frozen=True)
class ToolsOptions:
    """What clients may call; each flag says what it is.

    Raises:
        EngineError: tools without a folder, or a folder that is none.
    """

    names: Annotated[
        tuple[str, ...],
        Flag(
            "--tools",
            "Built-in tools that clients may call: a,b or all. They need --tools-dir.",
            _PANEL,
            "NAMES",
            read=_names,
            completes=" ".join((*BUILT_IN, "all")),
        ),
    ] = ()
    folder: Annotated[
        Path | None,
        Flag("--tools-dir", "The folder in which tools read, write and run commands.", _PANEL, "DIR"),
    ] = None
    confined: Annotated[
        bool,
        Flag(
            "--confine-commands/--no-confine-commands",
            "Let commands write in --tools-dir alone and read no home folder (Landlock, Linux).",
            _PANEL,
        ),
    ] = True
    as_root: Annotated[
        bool,
        Flag(
            "--commands-as-root",
            "Let a server of root run confined commands, which then read root's files of the system.",
            _PANEL,
        ),
    ] = False
    mcp_config: Annotated[
        Path | None,
        Flag(
            "--mcp-servers-config", "A JSON file of MCP servers whose tools clients may call.", _PANEL, "FILE"
        ),
    ] = None
    mcp_json: Annotated[str | None, Flag("--mcp-servers-json", "The same JSON itself.", _PANEL, "JSON")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.names and self.folder is None:
            raise EngineError("--tools needs --tools-dir DIR: the folder that the tools are confined to")
        if self.folder is not None and not self.folder.is_dir():
            raise EngineError(f"--tools-dir {self.folder}: there is no such folder")
        if self.folder is not None and not self.names:
            raise EngineError(f"--tools-dir {self.folder}: no tools are named; add --tools NAMES")

    @property
    def any(self) -> bool:
        return bool(self.names or self.mcp)

    @property
    def mcp(self) -> bool:
        return self.mcp_config is not None or self.mcp_json is not None

    @property
    def flag(self) -> str:
        """The flag that switches tools on, as errors name it."""
        return "--tools" if self.names else "--mcp-servers-config"
