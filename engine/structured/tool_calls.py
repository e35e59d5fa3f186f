"""Tools that a model may call: as a request gives them, and in the forms that templates and clients read.

    use = ToolUse.from_openai(tools, tool_choice, parallel_tool_calls)     what the request asks for, checked
    form = llm.answer_format                                               how this model writes: answer_format
    ids = llm.encode_chat(form.messages(messages), form.tools(use))        the prompt
    for delta in llm.stream_answer(ids, params, use).deltas(): ...         TextDelta, ReasoningDelta or CallDelta

The shapes are OpenAI's (API reference, "chat", `tools` and `tool_choice`).
"""

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quengine.errors import EngineError, shown
from quengine.platform import strict_json

Choice = Literal["none", "auto", "required"]

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_ALPHANUMERIC = string.ascii_letters + string.digits
MAX_TOOLS = 128
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """A function that may be called. `described` is the request's own entry, which the template shows to the model.
    `place` says where the request has its parameters, for errors."""

    name: str
    parameters: Mapping[str, Any] = field(hash=False)
    described: Mapping[str, Any] = field(hash=False)
    place: str = field(default="tools", compare=False)


@dataclass(frozen=True)
class ToolUse:
    """Which tools there are and whether one must be called.

    Attributes:
        tools: all that the model is given.
        choice: "none", "auto" (text or calls) or "required" (nothing but calls).
        named: the only tool that may be called, if the request names one; `choice` is then "required".
        parallel: whether an answer may hold several calls.
        allowed: the tools that may be called, if the request allows only some of `tools`.
    """

    tools: tuple[Tool, ...] = ()
    choice: Choice = "none"
    named: str | None = None
    parallel: bool = True
    allowed: frozenset[str] | None = None

    @classmethod
    def from_openai(cls, tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> "ToolUse":
        """From the fields of a request, each None where it is absent.

        Functions are taken as chat completions have them ({"type", "function": {"name", ...}}) and as responses do
        ({"type", "name", ...}). tool_choice is "none", "auto", "required", names a function, or allows some of them.

        Raises:
            EngineError: a field is not what OpenAI's API takes.
        """
        entries = [] if tools is None else tools
        if not isinstance(entries, list | tuple):
            raise EngineError("tools: must be a list of functions")
        if len(entries) > MAX_TOOLS:
            raise EngineError(f"tools: {len(entries)} are more than the {MAX_TOOLS} that are accepted")
        known = tuple(_tool(entry, f"tools[{n}]") for n, entry in enumerate(entries))
        names = [tool.name for tool in known]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise EngineError(f"tools: two functions are named {twice!r}")
        if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
            raise EngineError(f"parallel_tool_calls = {shown(parallel_tool_calls)}: must be true or false")
        allowed = None
        if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
            tool_choice, allowed = _allowed(tool_choice.get("allowed_tools"), names)
        choice, named = _choice(tool_choice, names)
        return cls(known, choice, named, parallel_tool_calls is not False and named is None, allowed)

    @property
    def described(self) -> list[Mapping[str, Any]] | None:
        """What the template is given as `tools`: nothing where none may be called."""
        return [tool.described for tool in self.tools] if self.choice != "none" else None

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.choice == "none":
            return ()
        allowed = self.allowed if self.named is None else {self.named}
        return tuple(tool for tool in self.tools if allowed is None or tool.name in allowed)


@dataclass(frozen=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallDelta:
    """More of one call: `id` and `name` with its first delta only, `arguments` is the next piece of its JSON text."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def as_openai(self) -> dict[str, Any]:
        """An entry of `delta.tool_calls` in a streamed chunk."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Delta = TextDelta | ReasoningDelta | CallDelta


@dataclass(frozen=True)
class ToolCall:
    """A call of an answer; `arguments` is JSON text as the model wrote it, cut short where the answer was."""

    id: str
    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """An entry of `message.tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def collect(deltas: Sequence[Delta]) -> tuple[str, list[ToolCall]]:
    """The text and the calls of an answer that was not streamed."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    calls: list[ToolCall] = []
    for delta in deltas:
        if not isinstance(delta, CallDelta):
            continue
        if delta.name is not None:
            calls.append(ToolCall(delta.id or "", delta.name, delta.arguments))
        else:
            last = calls[delta.index]
            calls[delta.index] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
    return text, calls


def reasoning_of(deltas: Sequence[Delta]) -> str:
    """What the model thought, of an answer that was not streamed."""
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))


def _tool(entry: Any, at: str) -> Tool:
    if not isinstance(entry, Mapping) or entry.get("type") != "function":
        raise EngineError(f'{at}: must be {{"type": "function", "function": {{"name": ...}}}}')
    function = entry.get("function", entry)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise EngineError(f"{at}: its name {shown(name)} must be 1 to 64 letters, digits, or _ . -")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise EngineError(f"{at}: the parameters of {name} must be a JSON schema")
    if "function" in entry:
        return Tool(name, parameters or _NO_PARAMETERS, entry, f"{at}.function.parameters")
    plain = {key: value for key, value in entry.items() if key != "type"}
    described = {"type": "function", "function": plain}
    return Tool(name, parameters or _NO_PARAMETERS, described, f"{at}.parameters")


def _allowed(value: Any, names: Sequence[str]) -> tuple[Any, frozenset[str]]:
    """The mode of tool_choice {"type": "allowed_tools"}, and the functions that it allows."""
    given = value if isinstance(value, Mapping) else {}
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise EngineError("tool_choice: allowed_tools must have a mode, auto or required, and tools")
    allowed = [_choice(each, names)[1] for each in tools]
    if None in allowed:
        raise EngineError(f"tool_choice: allowed_tools must be functions, not {shown(tools)}")
    return mode, frozenset(filter(None, allowed))


def _choice(value: Any, names: Sequence[str]) -> tuple[Choice, str | None]:
    if value is None:
        return ("auto" if names else "none"), None
    if value == "none" or (value == "auto" and not names):
        return "none", None
    if value == "auto":
        return "auto", None
    if value == "required":
        if not names:
            raise EngineError("tool_choice = 'required': there are no tools")
        return "required", None
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) and value.get("type") == "function" else None
    if not isinstance(name, str):
        raise EngineError(f"tool_choice = {shown(value)}: must be none, auto, required or a function")
    if name not in names:
        raise EngineError(
            f"tool_choice: no tool is named {shown(name)}; there: {', '.join(names)[:200] or 'none'}"
        )
    return "required", name


def with_values(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    """A message with its calls' arguments as values instead of OpenAI's JSON text; with calls it always has content.

    Raises:
        EngineError: a call's arguments are no JSON object. The error names the message by `at`.
    """
    changed = dict(message)
    if isinstance(changed.get("tool_calls"), Sequence) and changed["tool_calls"]:
        changed["tool_calls"] = [_with_value(call, at) for call in changed["tool_calls"]]
        changed["content"] = changed.get("content") or ""
    return changed


def _with_value(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise EngineError(f"{at}: a tool call must have a function")
    arguments = function.get("arguments", {})
    try:
        value = strict_json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except strict_json.StrictJSONError:
        value = None
    if not isinstance(value, Mapping):
        raise EngineError(f"{at}: the arguments of {str(function.get('name'))[:64]} are no JSON object")
    return {**call, "function": {**function, "arguments": value}}


def new_call_id() -> str:
    """An id of OpenAI's kind."""
    return "call_" + random_id(24)


def random_id(length: int) -> str:
    """`length` random letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length))
