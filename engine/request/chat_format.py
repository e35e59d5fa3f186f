"""How a model's conversations are written: prompts by its chat template, answers in a form of their own.

The form of answers is chosen here, by the template and the vocabulary. `harmony` is gpt-oss's. Any other model writes
text, after a section of reasoning if `reasoning_tags` finds one, and with calls of the form that `calls.named` finds.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, Literal

from quengine.errors import EngineError
from quengine.models.template.chat_template import ChatTemplate, ChatTemplateError, encode_chat
from quengine.models.tokenizer import Tokenizer
from quengine.request.content_parts import IMAGE, places_of, with_image_parts
from quengine.request.turn_order import TurnOrder
from quengine.structured.answer_format import (
    PROMPT_TOKENS,
    AnswerFormat,
    TextFormat,
    effort_variables,
    switch_variables,
)
from quengine.structured.calls.format import CallFormat
from quengine.structured.calls.named import marked_form, template_form
from quengine.structured.calls.probe import Render as CallsRender
from quengine.structured.harmony import HarmonyFormat
from quengine.structured.reasoning_format import ReasoningFormat
from quengine.structured.reasoning_tags import ReasoningTags, Render, reasoning_in


def answer_format(
    template: str | None,
    tokenizer: Tokenizer,
    render: Render | None = None,
    calls: CallsRender | None = None,
) -> AnswerFormat:
    """The answer format of a model with this chat template and vocabulary; plain text without a template.

    render: renders the template, to find what its source does not show (`reasoning_tags`). calls:
        `ChatTemplate.render`, by which the form of tool calls is found; None: the format has no calls.
    """
    if template is None:
        return TextFormat()
    harmony = HarmonyFormat.of(template, tokenizer)
    if harmony is not None:
        return harmony
    text = TextFormat()
    if calls is not None:
        marked = marked_form(template)
        form = CallFormat(marked or partial(template_form, template, calls), tokenizer)
        text = TextFormat(form, marked is not None and bool(marked.text_ends))

    def has_token(text: str) -> bool:
        return len(tokenizer.encode(text, special=True)) == 1

    tags = ReasoningTags.of(template, render if _may_reason(template) else None, has_token)
    return text if tags is None else ReasoningFormat.of(tags, text, tokenizer)


def _may_reason(template: str) -> bool:
    """Whether the template may write reasoning. One that does names it, so others need not be rendered to find out."""
    return "reasoning" in template or "think" in template


Messages = Sequence[Mapping[str, Any]]
Ending = Literal["answer", "nothing", "continued"]
"""How a prompt ends: where an answer begins, after the last message, or within the last message, an answer."""
_DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y %H:%M:%S GMT"}
"""The date variables of the templates of Llama 3 and Firefunction, and their formats. Most templates call
strftime_now."""

_TOOLS = re.compile(r"\btools\b")
_READS_PARTS = re.compile(r"""\[\s*['"]type['"]\s*\]|\.type\b""")
_PROBE = "Alder and birch"


@dataclass(frozen=True)
class _Written:
    """The input of a template, and `tail`: the text after what it renders, as pairs for `encode_chat`."""

    messages: Messages
    variables: Mapping[str, Any]
    tail: Sequence[tuple[str, str]] = ()


class ChatFormat:
    """The conversations of one model.

    Args:
        template: its chat template; None where it has none.
        missing: the error of a conversation without a template.

    Attributes:
        source: the template's text; None without a template.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, missing: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._missing = missing
        self.source: str | None = None if template is None else template.source

    @cached_property
    def answers(self) -> AnswerFormat:
        """The format of the model's answers: reasoning, text, tool calls. It is found by rendering the template."""
        calls = None if self._template is None else self._template.render
        return answer_format(self.source, self._tokenizer, self._rendered, calls)

    @cached_property
    def order(self) -> TurnOrder:
        """The orders of messages that the template accepts. They are found by rendering it."""
        variables = _variables(self.source or "")
        return TurnOrder.of(lambda messages: self._rendered(messages, True, variables))

    def end_of(self, prompt: Sequence[int]) -> str:
        """The text of the last PROMPT_TOKENS tokens of a prompt, as `answers` takes it."""
        return self._tokenizer.decode(prompt[-PROMPT_TOKENS:], skip_special=False)

    def render(
        self,
        messages: Messages,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        ending: Ending = "answer",
    ) -> str:
        """The prompt of a conversation as text.

        tools: as `answers.tools` gives them. variables: more names for the template.

        Raises:
            EngineError: the model has no template, or the template fails (with its line).
        """
        template, written = self._needed(), self._written(messages, tools, variables, ending)
        given = self._shaped(written.messages)
        text = template.render(given, ending != "nothing", tools, written.variables)
        return text + "".join(part for pair in written.tail for part in pair)

    def encode(
        self,
        messages: Messages,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] | None,
        ending: Ending = "answer",
        marker: str = "",
    ) -> list[int]:
        """The prompt of a conversation as token ids, in which messages hold no control tokens; see `render`.

        marker: the text of an image in a prompt, for each IMAGE in a message (`content_parts`). "": there are none.

        Raises:
            EngineError: as `render`; or the template leaves images out.
        """
        written = self._written(messages, tools, variables or {}, ending)
        if not marker:
            return self._encoded(self._shaped(written.messages), written, tools, ending)
        images = sum(str(message.get("content")).count(IMAGE) for message in written.messages)
        ids, problem = self._tokenizer.encode(marker, special=True), None
        for shaped in (with_image_parts(written.messages, self.takes_parts_alone), written.messages):
            try:
                found = self._encoded(shaped, written, tools, ending, marker)
            except ChatTemplateError as error:
                problem = error
                continue
            if len(places_of(found, ids)) == images:
                return found
        raise problem or EngineError(f"the chat template does not write {marker} for each of {images} images")

    def _encoded(
        self,
        messages: Messages,
        written: "_Written",
        tools: Sequence[Any] | None,
        ending: Ending,
        marker: str = "",
    ) -> list[int]:
        change = partial(_with_markers, marker) if marker else str
        return encode_chat(
            self._tokenizer,
            self._needed(),
            messages,
            ending != "nothing",
            tools,
            written.variables,
            written.tail,
            change,
        )

    @cached_property
    def takes_parts_alone(self) -> bool:
        """Whether the template writes contents that are lists of parts, but not texts. It is found by rendering it."""
        if self._template is None or not _READS_PARTS.search(self.source or ""):
            return False
        for content, writes in ((_PROBE, False), ([{"type": "text", "text": _PROBE}], True)):
            try:
                text = self._template.render([{"role": "user", "content": content}])
            except ChatTemplateError:
                text = ""
            if (_PROBE in text) is not writes:
                return False
        return True

    def _shaped(self, messages: Messages) -> Messages:
        return with_image_parts(messages, True) if self.takes_parts_alone else messages

    def _written(
        self,
        messages: Messages,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        ending: Ending,
    ) -> "_Written":
        """The template's input. An answer to be continued is not in its messages: it is the tail, as the answer format
        writes it."""
        variables = {**_variables(self.source or ""), **variables}
        given = self.order.fit(self.answers.messages(messages, tools))
        if ending != "continued":
            return _Written(given, variables)
        *before, last = given
        if last.get("role") != "assistant":
            raise EngineError("continue_final_message: the last message must be the assistant's")
        if before and before[-1].get("role") == "assistant":
            raise EngineError(
                "messages: two of the assistant's stand at the end, and only one can be continued"
            )
        text, thought = str(last.get("content") or ""), reasoning_in(last)
        if not thought:
            variables |= switch_variables(self.answers, self.source, on=False)
        prompt = self._needed().render(self._shaped(before), True, tools, variables)
        return _Written(before, variables, self.answers.continuation(prompt, thought, text))

    def effort_variables(self, effort: str | None, budget: int = -1) -> dict[str, Any]:
        """The template's variables for a reasoning effort; a budget of 0 switches reasoning off.

        Raises:
            EngineError: the template takes no such effort.
        """
        given = effort_variables(self.answers, self.source, effort)
        return given if budget else given | switch_variables(self.answers, self.source, on=False)

    def _rendered(
        self, messages: Messages, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str | None:
        try:
            return self._needed().render(self._shaped(messages), add_generation_prompt, None, variables)
        except ChatTemplateError:
            return None

    def _needed(self) -> ChatTemplate:
        if self._template is None:
            raise EngineError(self._missing)
        return self._template


def _with_markers(marker: str, text: str) -> str:
    """A rendered text with `marker` in place of each IMAGE, or of its JSON escape, which `tojson` writes."""
    return text.replace(IMAGE, marker).replace(json.dumps(IMAGE)[1:-1], marker)


def _variables(source: str) -> dict[str, str]:
    """The variables of a template beside the messages: the date, and an empty text `functions` where it reads that
    instead of `tools` (Firefunction). Its tools are described in a system message, as for templates without tools."""
    now = {"date_string": datetime.now(), "datetime": datetime.now(UTC)}
    dates = {name: now[name].strftime(form) for name, form in _DATES.items() if name in source}
    return dates | ({"functions": ""} if "functions" in source and not _TOOLS.search(source) else {})
