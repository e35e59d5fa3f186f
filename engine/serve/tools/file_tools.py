"""The tools that read, write and edit files: `read_file`, `write_file`, `edit_file`."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from quengine.serve.tools.tool import Answer, ServerTool, ToolError, ToolInput, read_arguments, schema_of
from quengine.serve.tools.workspace import Workspace

MAX_TEXT = 16 << 10
"""Bytes that one call gives a model to read."""
A = TypeVar("A", bound=Struct)


class ReadFile(Struct):
    path: Annotated[str, Meta(description="Path of the file")]
    start_line: Annotated[int, Meta(ge=1, description="First line, counted from 1")] = 1
    end_line: Annotated[int, Meta(ge=-1, description="Last line, which is read too; -1: to the end")] = -1
    append_loc: Annotated[bool, Meta(description="Put its number before each line")] = False


class WriteFile(Struct):
    path: Annotated[str, Meta(description="Path of the file")]
    content: Annotated[str, Meta(description="The whole new content")]


class Edit(Struct):
    old_text: Annotated[str, Meta(min_length=1, description="Text that is in the file exactly once")]
    new_text: Annotated[str, Meta(description="What takes its place")]


class EditFile(Struct):
    path: Annotated[str, Meta(description="Path of the file")]
    edits: Annotated[list[Edit], Meta(min_length=1, description="Replacements that do not overlap")]


def file_tools(workspace: Workspace) -> list[ServerTool]:
    """The tools, which work in threads."""

    def tool(
        title: str,
        about: str,
        kind: type[A],
        work: Callable[[Workspace, A, ToolInput], Answer],
        changes: bool,
    ) -> ServerTool:
        async def run(call: ToolInput) -> Answer:
            return await asyncio.to_thread(work, workspace, read_arguments(kind, call), call)

        return ServerTool(work.__name__, title, about, schema_of(kind), run, changes=changes)

    return [
        tool("Read file", f"Read a text file, at most {MAX_TEXT} bytes of it.", ReadFile, read_file, False),
        tool("Write file", "Write a file, and make the folders it is in.", WriteFile, write_file, True),
        tool("Edit file", "Replace texts that are in a file exactly once.", EditFile, edit_file, True),
    ]


def read_file(workspace: Workspace, given: ReadFile, call: ToolInput) -> Answer:
    content = workspace.read(workspace.resolve(given.path, call.folder))
    if len(content) > MAX_TEXT and given.end_line == -1:
        raise ToolError(
            f"{given.path}: it has {len(content)} bytes, more than {MAX_TEXT}; read a part with start_line and end_line"
        )
    last = None if given.end_line == -1 else given.end_line
    shown, size = [], 0
    for number, line in enumerate(
        content.splitlines(keepends=True)[given.start_line - 1 : last], given.start_line
    ):
        text = line.decode(errors="replace")
        shown.append(f"{number}\u2192{text}" if given.append_loc else text)
        size += len(line)
        if size > MAX_TEXT:
            shown[-1] = "[output truncated]"
            break
    return {"plain_text_response": "".join(shown)}


def write_file(workspace: Workspace, given: WriteFile, call: ToolInput) -> Answer:
    path, content = workspace.resolve(given.path, call.folder), given.content.encode(errors="replace")
    workspace.write(path, content)
    return {"result": "file written successfully", "path": str(path), "bytes": len(content)}


def edit_file(workspace: Workspace, given: EditFile, call: ToolInput) -> Answer:
    """All edits are looked for in the file as it was; none is made where one cannot be."""
    path = workspace.resolve(given.path, call.folder)
    content = workspace.read(path).decode(errors="surrogateescape")
    places = []
    for number, edit in enumerate(given.edits):
        count = content.count(edit.old_text)
        if count != 1:
            found = f"is {count} times" if count else "is not"
            raise ToolError(f"edits[{number}].old_text {found} in {given.path}; it must be there, and unique")
        at = content.index(edit.old_text)
        places.append((at, at + len(edit.old_text), edit.new_text, number))
    places.sort()
    for (_, end, _, first), (begin, _, _, second) in pairwise(places):
        if begin < end:
            raise ToolError(f"edits[{first}] and edits[{second}] overlap in {given.path}: make them one edit")
    edited = content
    for begin, end, text, _ in reversed(places):
        edited = edited[:begin] + text + edited[end:]
    if edited == content:
        raise ToolError(f"{given.path}: the edits change nothing")
    workspace.write(path, edited.encode(errors="surrogateescape"))
    return {"result": "file edited successfully", "path": str(path), "edits_applied": len(places)}
