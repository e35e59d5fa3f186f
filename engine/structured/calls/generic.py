"""Tools for a chat template that shows none: described in a system message, and called in a form of our own.

The form is that which most models were trained on (Hermes, Qwen). Earlier calls and their results become text of the
conversation where the template does not write them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quengine.structured.calls.form import CallForm

GENERIC_FORM = CallForm(
    head='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    tail="}\n</tool_call>",
    separator="\n",
    shows_tools=False,
)

_INSTRUCTIONS = (
    "You may call functions to answer. Their names, descriptions and JSON schemas of their arguments, one a line:\n"
    "{tools}\n\n"
    "To call one, write its name and its arguments exactly in this form, with nothing behind it, and wait "
    "for the result:\n"
    "{example}"
)
_INSTRUCTING = ("system", "developer")
_RESULT = "<tool_response>\n{}\n</tool_response>"


def with_tools(
    form: CallForm, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], system: bool
) -> list[Mapping[str, Any]]:
    """The messages with the tools described at their beginning.

    system: whether the template takes a system message; else the description begins the first message.
    """
    described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=described, example=form.written([("NAME", {"KEY": "VALUE"})]))
    first = messages[0] if messages else {}
    if system and first.get("role") not in _INSTRUCTING:
        return [{"role": "system", "content": text}, *messages]
    if not messages:
        return [{"role": "user", "content": text}]
    if first.get("role") in _INSTRUCTING:
        return [_joined(first, text, behind=True), *messages[1:]]
    return [_joined(first, text, behind=False), *messages[1:]]


def with_text_calls(form: CallForm, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with calls as text of their answers, and results as messages of the user."""
    changed: list[Mapping[str, Any]] = []
    results = False  # the message before is one of results
    for message in messages:
        if message.get("role") == "tool":
            result = _RESULT.format(_text(message.get("content")))
            if results:
                changed[-1] = _joined(changed[-1], result, behind=True)
            else:
                changed.append({"role": "user", "content": result})
        elif calls := message.get("tool_calls"):
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            functions = [call["function"] for call in calls]
            text = form.written([(each["name"], each["arguments"]) for each in functions])
            changed.append(_joined(kept, text, behind=True))
        else:
            changed.append(message)
        results = message.get("role") == "tool"
    return changed


def _joined(message: Mapping[str, Any], text: str, behind: bool) -> dict[str, Any]:
    content = message.get("content") or ""
    if isinstance(content, str):
        parts = [part for part in ((content, text) if behind else (text, content)) if part]
        return {**message, "content": "\n\n".join(parts)}
    part = {"type": "text", "text": text}
    return {**message, "content": [*content, part] if behind else [part, *content]}


def _text(content: Any) -> str:
    """A result's content as text: it may be given as parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
