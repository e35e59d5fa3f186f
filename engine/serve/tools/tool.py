"""A tool: what a model is told of it, and the function that runs it.

Arguments are a msgspec struct, from which the JSON schema of the definition is made. An answer is an object:
`plain_text_response` is text for the model, other objects are given to it as JSON, and `error` says what went wrong.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quengine.errors import EngineError
from quengine.serve.schemas.fields import Body
from quengine.serve.schemas.written import Written

Answer = dict[str, Any]
Write = Callable[[str], None]
"""Takes a piece of a tool's output while it runs."""
A = TypeVar("A", bound=msgspec.Struct)


class ToolError(EngineError):
    """A tool's failure; the message, in one line, is for its caller."""


@dataclass(frozen=True)
class ToolInput:
    """The arguments of a call as they came, the folder that relative paths start from, and where output is streamed."""

    arguments: dict[str, Any]
    folder: Path | None = None
    write: Write | None = None


class Permissions(Written):
    write: bool


class ListedTool(Written, kw_only=True):
    """An entry of GET /tools, in llama-server's form."""

    display_name: str
    tool: str
    type: Literal["server", "mcp"]
    permissions: Permissions
    uses_cwd: bool
    definition: dict[str, Any]


class ToolEvent(Written, kw_only=True):
    """Of a call's stream: a piece of output, or its end."""

    chunk: str | UnsetType = UNSET
    done: Literal[True] | UnsetType = UNSET
    error: str | UnsetType = UNSET


class ToolRequest(Body, frozen=True, kw_only=True):
    """Of POST /tools."""

    tool: Annotated[str, Meta(description="A name of GET /tools.")]
    params: Annotated[dict[str, Any], Meta(description="The tool's arguments.")] = msgspec.field(
        default_factory=dict
    )
    stream: Annotated[bool, Meta(description="Its output as it comes, of tools that have that.")] = False


@dataclass(frozen=True)
class ServerTool:
    """A tool that can be called. changes: it may change something, so a person is asked before it is called. streams:
    it has output while it runs."""

    name: str
    title: str
    description: str
    parameters: dict[str, Any]
    run: Callable[[ToolInput], Awaitable[Answer]]
    kind: Literal["server", "mcp"] = "server"
    changes: bool = False
    streams: bool = False

    @property
    def listing(self) -> ListedTool:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return ListedTool(
            display_name=self.title,
            tool=self.name,
            type=self.kind,
            permissions=Permissions(self.changes),
            uses_cwd=self.kind == "server",
            definition={"type": "function", "function": function},
        )


def schema_of(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of a struct, without references."""
    (schema,), parts = msgspec.json.schema_components([arguments], ref_template="{name}")

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return whole(parts[value["$ref"]])
        return {key: whole(each) for key, each in value.items() if key != "title"}

    made: dict[str, Any] = whole(schema)
    return made


def read_arguments(kind: type[A], call: ToolInput) -> A:
    """The arguments of a call as the struct `kind`. Raises ToolError if they do not have its form."""
    try:
        return msgspec.convert(call.arguments, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ToolError(f"the arguments are wrong: {error}") from None
