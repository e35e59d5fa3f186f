"""The tools that search the folder, `file_glob_search` and `grep_search`.

Each search is a process of its own (`search_main.py`) with a time limit.
"""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict

from quengine.serve.tools.command import run_program
from quengine.serve.tools.tool import Answer, ServerTool, ToolError, ToolInput, read_arguments, schema_of
from quengine.serve.tools.workspace import Workspace

MAX_ROWS = 100
_SECONDS = 15.0
_MAX_OUTPUT = 8 << 20
_GLOB = "Glob pattern; without a / it is compared with names in any folder, with one with paths"
_INCLUDE = Annotated[str, Meta(description=f"{_GLOB}, of what is looked at")]
_EXCLUDE = Annotated[str, Meta(description=f"{_GLOB}, of what is left out")]


class FindFiles(Struct):
    path: Annotated[str, Meta(description="Folder to search in")]
    include: _INCLUDE = "**"
    exclude: _EXCLUDE = ""
    type: Annotated[str, Meta(description='"file", "dir" or "all"')] = "file"
    max_depth: Annotated[int, Meta(ge=0, description="Folders down; 0: all, 1: this folder alone")] = 0
    limit: Annotated[int, Meta(ge=1, description=f"Most results, up to {MAX_ROWS}")] = MAX_ROWS


class SearchLines(Struct):
    path: Annotated[str, Meta(description="File or folder to search in")]
    pattern: Annotated[str, Meta(description="Regular expression, or text where literal is true")]
    include: _INCLUDE = "**"
    exclude: _EXCLUDE = ""
    return_line_numbers: Annotated[bool, Meta(description="Show the number of each line")] = False
    literal: Annotated[bool, Meta(description="The pattern is text")] = False
    ignore_case: Annotated[bool, Meta(description="Upper and lower case are the same")] = False
    context_lines: Annotated[int, Meta(ge=0, le=20, description="Lines around each match")] = 0


def search_tools(workspace: Workspace) -> list[ServerTool]:
    async def find(call: ToolInput) -> Answer:
        return await _find(workspace, read_arguments(FindFiles, call), call.folder)

    async def grep(call: ToolInput) -> Answer:
        return await _grep(workspace, read_arguments(SearchLines, call), call.folder)

    return [
        ServerTool(
            "file_glob_search",
            "Find files",
            "List files below a folder by name. Folders such as .git, node_modules and build are listed, not entered.",
            schema_of(FindFiles),
            find,
        ),
        ServerTool(
            "grep_search",
            "Search files",
            "Find lines of the files below a folder, or of one file, by a regular expression.",
            schema_of(SearchLines),
            grep,
        ),
    ]


async def _find(workspace: Workspace, given: FindFiles, folder: Path | None) -> Answer:
    if given.type not in ("file", "dir", "all"):
        raise ToolError(f'invalid type {given.type!r}: must be "file", "dir" or "all"')
    limit = min(given.limit, MAX_ROWS)
    base = workspace.resolve(given.path, folder)
    found = await _search(workspace, base, asdict(given) | {"limit": limit}, "folder")
    lines = [path + "/" * is_folder for path, is_folder in found["rows"]]
    lines += ["", "---", f"Total matches: {found['total']}"]
    if found["cut"]:
        lines.append(f"[the first {limit} of {found['total']} are shown: narrow the pattern]")
    entries = [{"path": path, "type": "dir" if is_folder else "file"} for path, is_folder in found["rows"]]
    return {"plain_text_response": "\n".join(lines) + "\n", "entries": entries, "base": str(base)}


async def _grep(workspace: Workspace, given: SearchLines, folder: Path | None) -> Answer:
    base = workspace.resolve(given.path, folder)
    found = await _search(workspace, base, asdict(given) | {"limit": MAX_ROWS}, "any")
    numbered = given.return_line_numbers or given.context_lines > 0
    lines = []
    for path, number, text, matches in found["rows"]:
        mark = ":" if matches else "-"
        lines.append(f"{path}{mark}{f'{number}{mark}' if numbered else ''}{text}")
    lines += ["", "---", f"Total matches: {found['total']}"]
    if found["cut"]:
        lines.append(f"[the first {MAX_ROWS} are shown: narrow the path, the pattern or include]")
    return {"plain_text_response": "\n".join(lines) + "\n"}


async def _search(
    workspace: Workspace, base: Path, asked: dict[str, Any], kind: Literal["folder", "any"]
) -> dict[str, Any]:
    """What the search process answers. Raises ToolError."""
    descriptor = workspace.open(base, os.O_RDONLY)
    try:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISDIR(mode) or (kind == "any" and stat.S_ISREG(mode))):
            raise ToolError(f"{base}: it is no folder" + " and no file" * (kind == "any"))
        program = [
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).with_name("search_main.py")),
            str(descriptor),
        ]
        ended = await run_program(
            program,
            Path("/"),
            _SECONDS,
            _MAX_OUTPUT,
            given=json.dumps(asked).encode(),
            descriptors=[descriptor],
        )
    finally:
        os.close(descriptor)
    if ended.code is None:
        raise ToolError(f"the search was ended after {_SECONDS:g} s: narrow the path or the pattern")
    try:
        answer: dict[str, Any] = json.loads(ended.output)
    except ValueError:
        raise ToolError(f"the search failed with exit code {ended.code}") from None
    if "error" in answer:
        raise ToolError(answer["error"])
    return answer
