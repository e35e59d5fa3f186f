"""The tools of /v1/responses as functions, which is what a model calls.

A `custom` tool takes free text: it becomes a function with the text as its one argument, and `CustomInput` reads the
text out of a call as it grows. Tools of other types run at OpenAI's or have no form here: they are skipped with a note.

Source: OpenAI's API reference, "responses", `tools` and `tool_choice`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.reading import shown
from quengine.structured.tool_calls import Tool

Entry = dict[str, Any]

INPUT = "input"
"""The argument of a custom tool's function."""


@dataclass(frozen=True)
class OfferedTools:
    """`functions` and `choice` are the fields `tools` and `tool_choice` of a request with functions alone; `custom` are
    the custom tools by name."""

    functions: list[Any]
    choice: Any
    custom: Mapping[str, Entry]

    def entry(self, tool: Tool) -> Entry:
        """A tool as the response object lists it: a function's fields beside the type."""
        if tool.name in self.custom:
            return {"description": None, "format": {"type": "text"}, **self.custom[tool.name]}
        function = tool.described["function"]
        return {"strict": False, "description": None, "parameters": None, **function, "type": "function"}


def offered_tools(tools: Sequence[Any] | None, choice: Any, notes: list[str]) -> OfferedTools:
    """The tools that the model is told of. `notes` gets a line for each that is skipped. Raises ApiError."""
    functions: list[Any] = []
    custom: dict[str, Entry] = {}
    for n, entry in enumerate(tools or ()):
        kind = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(kind, str):
            raise bad_request(f"tools[{n}] = {shown(entry)}: must be an object with a type", "tools")
        if kind == "custom":
            function = _function(entry, f"tools[{n}]", notes)
            custom[function["name"]] = entry
            functions.append(function)
        elif kind == "function":
            functions.append(entry)
        else:
            notes.append(f"tools[{n}] skipped: {shown(kind, 40)}")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        names, choice = _allowed(choice)
        functions = [function for function in functions if _name(function) in names]
    elif isinstance(choice, dict) and choice.get("type") == "custom":
        choice = {**choice, "type": "function"}
    return OfferedTools(functions, choice, custom)


def _function(entry: Entry, at: str, notes: list[str]) -> Entry:
    """A custom tool as a function. The grammar of its format is described to the model."""
    name, about, form = entry.get("name"), entry.get("description"), entry.get("format")
    if not isinstance(name, str) or not isinstance(about, str | None) or not isinstance(form, dict | None):
        raise bad_request(
            f"{at} = {shown(entry)}: must have a name, and may have description and format", "tools"
        )
    described = [about or ""]
    if form and form.get("type") != "text":
        described.append(f"The input is text of this {form.get('syntax')} grammar:\n{form.get('definition')}")
        notes.append(f"{at}: its grammar is shown to the model and not enforced")
    properties = {INPUT: {"type": "string", "description": "The input, as it is."}}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "name": name,
        "description": "\n\n".join(filter(None, described)),
        "parameters": parameters,
    }


def _allowed(choice: Entry) -> tuple[set[str], str]:
    """The names and the mode of {"type": "allowed_tools"}. Raises ApiError."""
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise bad_request(f"tool_choice.mode = {shown(mode)}: must be auto or required", "tool_choice")
    if not isinstance(tools, list) or not all(isinstance(entry, dict) for entry in tools):
        raise bad_request(f"tool_choice.tools = {shown(tools)}: must be an array of tools", "tool_choice")
    return {name for entry in tools if isinstance(name := _name(entry), str)}, mode


def _name(entry: Entry) -> Any:
    function = entry.get("function", entry)
    return function.get("name") if isinstance(function, dict) else None


_HEAD = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PIECES = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}' + _LOW + ")+"
)
"""Whole characters of a JSON string."""


class CustomInput:
    """The text that a custom tool is called with, out of the JSON of its function's arguments as it is generated.

    What is not such JSON is the text itself: a model that writes it without quotes means the same.
    """

    def __init__(self) -> None:
        self._arguments = ""
        self._at: int | None = None  # from where the string is not decoded yet
        self.text = ""

    def push(self, arguments: str) -> str:
        """The text that these further arguments add."""
        self._arguments += arguments
        if self._at is None:
            head = _HEAD.match(self._arguments)
            if head is None:
                return ""
            self._at = head.end()
        pieces = _PIECES.match(self._arguments, self._at)
        if pieces is None:
            return ""
        self._at = pieces.end()
        return self._add(json.loads(f'"{pieces[0]}"', strict=False))

    def finish(self) -> str:
        """The text that is left once the call is whole, or was cut off."""
        if self._at is not None:
            return ""
        try:
            value = json.loads(self._arguments)
        except (ValueError, RecursionError):
            value = None
        given = value.get(INPUT) if isinstance(value, dict) else value
        return self._add(given if isinstance(given, str) else self._arguments)

    def _add(self, text: str) -> str:
        self.text += text
        return text
