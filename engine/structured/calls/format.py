"""A chat template's way of writing tool calls, as requests use it: messages, grammar and parser of a `CallForm`.

The form is found when it is first needed, by rendering the template (`probe`). Where renderings do not tell one, the
text of the template may (`NAMED_FORMS`, `tool_calls_format`), and else calls take the form `generic.GENERIC_FORM`.
"""

import hashlib
import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quengine.structured.answer_parser import AnswerParser
from quengine.structured.calls.form import INDEX, SEPARATED_TYPES, CallForm, CallGrammar, ParameterForm
from quengine.structured.calls.generic import GENERIC_FORM, with_text_calls, with_tools
from quengine.structured.calls.parser import CallFormParser
from quengine.structured.calls.probe import Render, found_form, shows_tools, takes_system
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.tool_calls import ToolUse
from quengine.structured.tool_calls_format import ToolFormat, literal, new_call_id, with_values

if TYPE_CHECKING:
    from quengine.models.tokenizer import Tokenizer

_ALPHANUMERIC = string.ascii_letters + string.digits

NAMED_FORMS: Mapping[str, CallForm] = {
    # Kimi K2 of some months, whose template cannot be rendered with calls: it changes a list.
    "<|tool_calls_section_begin|>": CallForm(
        head="<|tool_call_begin|>functions.",
        middle=f":{INDEX}<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
    ),
    # Granite 3: its template tells the model of this form, and writes no calls.
    "<|tool_call|>": CallForm('{"name": "', '", "arguments": ', "}", "<|tool_call|>[", ", ", "]"),
    # LFM 2: calls as Python writes them.
    "List of tools: ": CallForm(
        head="",
        middle="(",
        tail=")",
        open="<|tool_call_start|>[",
        separator=", ",
        close="]<|tool_call_end|>",
        parameters=ParameterForm("", dict.fromkeys(SEPARATED_TYPES, "="), "", ", ", quote="'"),
    ),
}
"""By a text of the template: forms that models are trained on, and that renderings do not show."""


@dataclass(frozen=True)
class CallFormat:
    """Calls of one form.

    Attributes:
        written: whether the template writes an answer's calls, which else become its text.
        system: whether the template takes a system message.
    """

    form: CallForm
    tokenizer: "Tokenizer"
    written: bool = True
    system: bool = True

    @cached_property
    def _controls(self) -> Mapping[str, int]:
        """Control tokens in the form's texts."""
        texts = list(self.form.texts())
        found = [name for name in self.tokenizer.control_texts if any(name in text for text in texts)]
        return {name: token for name in found if (token := self.tokenizer.control_id(name)) is not None}

    @property
    def marker_ids(self) -> frozenset[int]:
        return frozenset(self._controls.values())

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[Mapping[str, Any]]:
        """A request's messages as the template reads them, with `tools` in one where it does not show them."""
        changed = [self._message(message, f"messages[{n}]") for n, message in enumerate(messages)]
        if not self.written:
            changed = with_text_calls(self.form, changed)
        if tools and not self.form.shows_tools:
            return with_tools(self.form, changed, tools, self.system)
        return changed

    def constraint(self, use: ToolUse) -> ConstraintSpec | None:
        """The grammar of an answer that must be calls; else None. Raises EngineError for a wrong schema."""
        if use.choice != "required":
            return None
        return ConstraintSpec(
            "grammar", CallGrammar(self._until_end, self._literal).lark(use.callable, use.parallel)
        )

    def parser(self, use: ToolUse) -> AnswerParser:
        return CallFormParser(self.form, use.callable, self.new_id, only_calls=use.choice == "required")

    def new_id(self) -> str:
        """An id for a call: of the length that the template insists on, else of OpenAI's kind."""
        length = self.form.id_length
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length)) if length else new_call_id()

    @cached_property
    def _until_end(self) -> CallForm:
        """The form as an answer has it, which ends at the first end token."""
        ends = {self.tokenizer.token_text(token) for token in self.tokenizer.eos_ids}
        close = min(
            (self.form.close.partition(end)[0] for end in ends if end), key=len, default=self.form.close
        )
        return replace(self.form, close=close)

    def _literal(self, text: str) -> str:
        """A text in a grammar, control tokens named as such."""
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
        """An id of the length that the template insists on: others are exchanged, the same for the same one."""
        length = self.form.id_length
        if not length or not isinstance(given, str) or re.fullmatch(f"[a-zA-Z0-9]{{{length}}}", given):
            return given
        return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:length]


class TemplateCalls:
    """The calls of a chat template, whose form is found when it is first asked for.

    Args:
        source: the template's text. render: `ChatTemplate.render` of it.
    """

    def __init__(self, source: str, tokenizer: "Tokenizer", render: Render) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._render = render

    @cached_property
    def format(self) -> CallFormat | ToolFormat:
        named = ToolFormat.of(self._source, self._tokenizer)
        form = found_form(self._render)
        if form is None:
            return named if named is not None else self._not_written()
        if (
            named is not None and not form.starts_marked
        ):  # Llama's bare JSON: renderings do not show its other forms
            return named
        system = form.shows_tools or takes_system(self._render)
        return CallFormat(form, self._tokenizer, system=system)

    @property
    def marker_ids(self) -> frozenset[int]:
        return self.format.marker_ids

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> Sequence[Mapping[str, Any]]:
        """A request's messages as the template reads them. Raises EngineError for arguments that are no object."""
        if not tools and not any("tool_calls" in each or "tool_call_id" in each for each in messages):
            return messages
        return self.format.messages(messages, tools)

    def constraint(self, use: ToolUse) -> ConstraintSpec | None:
        """The grammar of an answer that must be calls; else None. Raises EngineError for a wrong schema."""
        return self.format.constraint(use) if use.choice == "required" else None

    def parser(self, use: ToolUse) -> AnswerParser:
        return self.format.parser(use)

    def _not_written(self) -> CallFormat:
        """The form of a template that writes no calls."""
        form = next((form for text, form in NAMED_FORMS.items() if text in self._source), GENERIC_FORM)
        shown = form is not GENERIC_FORM and shows_tools(self._render)
        form = replace(form, shows_tools=shown)
        return CallFormat(form, self._tokenizer, False, shown or takes_system(self._render))
