"""Named forms of tool calls, told by words in a chat template's text; and the grammar of an answer that must be calls.

They hold where `calls.probe` finds no form by rendering the template, and for Llama 3, whose template shows one of the
forms that the model writes.

| format | a call | models |
|---|---|---|
| hermes | `<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>` | Qwen 2.5 and 3, Hermes |
| mistral | `[TOOL_CALLS]` [{"name": ..., "arguments": {...}}, ...] | Mistral 7B v0.3, Nemo, Small 2501 |
| mistral-named | `[TOOL_CALLS]`name`[ARGS]`{...} | Mistral Small 3.2, Devstral, Magistral |
| llama3 | {"name": ..., "parameters": {...}}, or the same or f.call(k=v) after `<|python_tag|>` | Llama 3.1 to 3.3 |

The mistral-named form has `[CALL_ID]` and an id before `[ARGS]` where the template does. Parsing is
`tool_calls_parser`'s. gpt-oss writes calls as messages of its own form, which `harmony_format` has.
"""

import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from quengine.errors import EngineError
from quengine.platform import strict_json
from quengine.structured.calls.form import arguments_grammar
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.tool_calls import Tool, ToolUse
from quengine.structured.tool_calls_parser import ToolCallParser

if TYPE_CHECKING:
    from quengine.models.tokenizer import Tokenizer

FormatName = Literal["hermes", "mistral", "mistral-named", "llama3"]

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_MARKERS = (TOOL_CALLS, CALL_ID, ARGS, PYTHON_TAG, TOOL_CALL, TOOL_CALL_END)
_ALPHANUMERIC = string.ascii_letters + string.digits
_MISTRAL_ID = re.compile("[a-zA-Z0-9]{9}")


@dataclass(frozen=True)
class ToolFormat:
    """One model's way. `marker_ids` are control tokens by name that its calls are made of.

    The text that is parsed has to show them: `LLM.stream(..., show_special=...)`.
    """

    name: FormatName
    controls: Mapping[str, int] = field(default_factory=dict, hash=False)
    with_call_id: bool = False

    @classmethod
    def of(cls, template: str, tokenizer: "Tokenizer") -> "ToolFormat | None":
        """From the text of a chat template and the control tokens of the vocabulary; None: it is none of these."""
        name = _format_name(template)
        if name is None:
            return None
        return cls(name, control_ids(tokenizer, _MARKERS), CALL_ID in template)

    @property
    def marker_ids(self) -> frozenset[int]:
        return frozenset(self.controls.values())

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Mapping[str, Any]]:
        """A request's messages as templates read them.

        OpenAI has a call's arguments as JSON text, templates want the value. Mistral's templates refuse ids that are
        not 9 letters and digits: other ids are exchanged, a call's and its result's for the same one.

        Raises:
            EngineError: a call's arguments are no JSON object.
        """
        del tools  # the template shows them
        return [self._message(message, f"messages[{n}]") for n, message in enumerate(messages)]

    def constraint(self, use: ToolUse) -> ConstraintSpec | None:
        """The grammar of an answer that must be calls, their arguments valid under the tools' schemas; else None.

        Raises:
            EngineError: a tool's schema is no JSON schema, or all together are too large.
        """
        if use.choice != "required":
            return None
        calls = "\n".join(f"call{n}: {self._call(tool)}" for n, tool in enumerate(use.callable))
        one = " | ".join(f"call{n}" for n in range(len(use.callable)))
        return ConstraintSpec("grammar", f"start: {self._start(use.parallel)}\none: {one}\n{calls}")

    def parser(self, use: ToolUse, new_id: Callable[[], str] | None = None) -> ToolCallParser:
        """A parser for one answer. `new_id` makes a call's id, by default one of this format's kind."""
        names = frozenset(tool.name for tool in use.callable)
        return ToolCallParser(self.name, names, new_id or self.new_id, only_calls=use.choice == "required")

    def new_id(self) -> str:
        """An id for a call: 9 letters and digits for Mistral, whose templates insist, else OpenAI's kind."""
        if self.name.startswith("mistral"):
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return new_call_id()

    def _start(self, several: bool) -> str:
        if self.name == "hermes":
            return 'one ("\\n" one)*' if several else "one"
        if self.name == "mistral":
            more = ' ("," " "? one)*' if several else ""
            return f'{self._marker(TOOL_CALLS)} " "? "[" one{more} "]"'
        return "one+" if several and self.name == "mistral-named" else "one"

    def _call(self, tool: Tool) -> str:
        arguments = arguments_grammar(tool)
        if self.name == "mistral-named":
            call_id = f" {self._marker(CALL_ID)} /[a-zA-Z0-9]{{9}}/" if self.with_call_id else ""
            return (
                f"{self._marker(TOOL_CALLS)} {literal(tool.name)}{call_id} {self._marker(ARGS)} {arguments}"
            )
        key = "parameters" if self.name == "llama3" else "arguments"
        head = literal(f'{{"name": "{tool.name}", "{key}": ')
        if self.name != "hermes":
            return f'{head} {arguments} "}}"'
        begin, end = self._marker(TOOL_CALL), self._marker(TOOL_CALL_END)
        return f'{begin} "\\n" {head} {arguments} "}}" "\\n" {end}'

    def _marker(self, text: str) -> str:
        return marker(self.controls, text)

    def _message(self, message: Mapping[str, Any], at: str) -> Mapping[str, Any]:
        changed = with_values(message, at)
        if calls := changed.get("tool_calls"):
            changed["tool_calls"] = [{**call, "id": self._known_id(call.get("id", ""))} for call in calls]
        if "tool_call_id" in changed:
            changed["tool_call_id"] = self._known_id(changed["tool_call_id"])
        return changed

    def _known_id(self, given: Any) -> Any:
        if not self.name.startswith("mistral") or not isinstance(given, str) or _MISTRAL_ID.fullmatch(given):
            return given
        return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def _format_name(template: str) -> FormatName | None:
    if TOOL_CALLS in template:
        return "mistral-named" if ARGS in template else "mistral"
    if TOOL_CALL in template:
        # Qwen3-Coder and others put XML between the same tags.
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return None


def with_values(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    """A message whose calls have their arguments as a value, where OpenAI has JSON text, and which has content then.

    Raises:
        EngineError: a call's arguments are no JSON object; it names the message by `at`.
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


def control_ids(tokenizer: "Tokenizer", names: Sequence[str]) -> dict[str, int]:
    """Those of `names` that are control tokens of the vocabulary, with their ids."""
    return {text: token for text in names if (token := tokenizer.control_id(text)) is not None}


def new_call_id() -> str:
    """An id of OpenAI's kind."""
    return "call_" + "".join(secrets.choice(_ALPHANUMERIC) for _ in range(24))


def marker(controls: Mapping[str, int], text: str) -> str:
    """A marker in a grammar: the control token where it is one, else its letters."""
    token = controls.get(text)
    return literal(text) if token is None else f"<[{token}]>"


def literal(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text)
