"""The messages, the grammar and the parser of tool calls in the form of a chat template (`CallForm`).

If a template shows no tools, a system message describes them, and the form of calls is the one that most models were
trained on (Hermes, Qwen). If it does not write calls, earlier calls and their results become text.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quengine.errors import EngineError
from quengine.structured.answer_parser import AnswerParser
from quengine.structured.calls.form import CallForm, CallGrammar, dropped_of
from quengine.structured.calls.json_calls import LlamaCallParser
from quengine.structured.calls.parser import CallFormParser
from quengine.structured.constraint_spec import ConstraintSpec, control_ids, literal
from quengine.structured.tool_calls import ToolUse, new_call_id, random_id, with_values

if TYPE_CHECKING:
    from quengine.models.tokenizer import Tokenizer

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
    """The messages with a description of the tools at the beginning.

    system: the template takes a system message; else the description begins the first message.
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
    """The messages, in which calls become text of their answers, and results become user messages."""
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
    """The text of a result's content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


class CallFormat:
    """Calls of one form.

    Args:
        form: the form, or a function that finds it when it is first needed (`named.template_form`).
        tokenizer: the model's; None: no text of the form is a control token.
    """

    def __init__(self, form: CallForm | Callable[[], CallForm], tokenizer: "Tokenizer | None" = None) -> None:
        self._given = form
        self._tokenizer = tokenizer

    @cached_property
    def form(self) -> CallForm:
        return self._given if isinstance(self._given, CallForm) else self._given()

    @cached_property
    def _controls(self) -> Mapping[str, int]:
        """The control tokens in the form's texts."""
        if self._tokenizer is None:
            return {}
        texts = list(self.form.texts())
        found = [name for name in self._tokenizer.control_texts if any(name in text for text in texts)]
        return control_ids(self._tokenizer, found)

    @property
    def marker_ids(self) -> frozenset[int]:
        return frozenset(self._controls.values())

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """A request's messages as the template reads them. One of them describes `tools` where the template does not.

        A call's arguments are JSON text in OpenAI's form; most templates take the value. If the template requires ids
        of a certain length, others are replaced, in a call and its result alike.

        Raises:
            EngineError: a call's arguments are no JSON object.
        """
        if not tools and not any("tool_calls" in each or "tool_call_id" in each for each in messages):
            return messages
        changed = [self._message(message, f"messages[{n}]") for n, message in enumerate(messages)]
        if not self.form.writes_calls:
            changed = with_text_calls(self.form, changed)
        if tools and not self.form.shows_tools:
            return with_tools(self.form, changed, tools, self.form.takes_system)
        return changed

    def constraint(self, use: ToolUse) -> ConstraintSpec | None:
        """The grammar of an answer that must be calls with valid arguments; None where no call is required.

        Raises:
            EngineError: a tool's schema is no JSON schema, or all together are too large.
        """
        if use.choice != "required":
            return None
        try:
            lark = CallGrammar(self._until_end, self._literal).lark(use.callable, use.parallel)
            dropped = dropped_of(use.callable)
        except RecursionError:
            raise EngineError("tools: a schema is nested too deeply") from None
        return ConstraintSpec("grammar", lark, from_schemas=True, dropped=dropped)

    def parser(self, use: ToolUse, new_id: Callable[[], str] | None = None) -> AnswerParser:
        """A parser for one answer. new_id: makes a call's id; None: one that the template accepts."""
        new_id, only = new_id or self.new_id, use.choice == "required"
        if self.form.python_tag:
            return LlamaCallParser(frozenset(tool.name for tool in use.callable), new_id, only)
        return CallFormParser(self.form, use.callable, new_id, only)

    def new_id(self) -> str:
        """An id for a call: of the length that the template requires, else in OpenAI's form."""
        return random_id(self.form.id_length) if self.form.id_length else new_call_id()

    @cached_property
    def _until_end(self) -> CallForm:
        """The form of calls in an answer, which ends at the first end token."""
        tokenizer, close = self._tokenizer, self.form.close
        ends = [] if tokenizer is None else [tokenizer.token_text(token) for token in tokenizer.eos_ids]
        close = min((close.partition(end)[0] for end in ends if end), key=len, default=close)
        return replace(self.form, close=close)

    def _literal(self, text: str) -> str:
        """The expression of a text, in which control tokens are token ids."""
        if not self._controls:
            return literal(text)
        parts = re.split("(" + "|".join(map(re.escape, self._controls)) + ")", text)
        return " ".join(
            f"<[{self._controls[part]}]>" if part in self._controls else literal(part)
            for part in parts
            if part
        )

    def _message(self, message: Mapping[str, Any], at: str) -> Mapping[str, Any]:
        changed = with_values(message, at)
        if calls := changed.get("tool_calls"):
            changed["tool_calls"] = [self._call(call) for call in calls]
        if "tool_call_id" in changed:
            changed["tool_call_id"] = self._known_id(changed["tool_call_id"])
        return changed

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        if self.form.as_text:
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return {**call, "id": self._known_id(call.get("id", "")), "function": function}

    def _known_id(self, given: Any) -> Any:
        length = self.form.id_length
        if not length or not isinstance(given, str) or re.fullmatch(f"[a-zA-Z0-9]{{{length}}}", given):
            return given
        return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:length]
