"""How a model's conversations are written: prompts by its chat template, answers in a form of their own."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from quengine.errors import EngineError
from quengine.models.template.chat_template import ChatTemplate, ChatTemplateError, encode_chat
from quengine.models.tokenizer import Tokenizer
from quengine.structured.answer_format import PROMPT_TOKENS, AnswerFormat, answer_format, effort_variables

Messages = Sequence[Mapping[str, Any]]


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
        """How the model writes answers: reasoning, text, tool calls. The template is rendered to find it."""
        calls = None if self._template is None else self._template.render
        return answer_format(self.source, self._tokenizer, self._rendered, calls)

    def end_of(self, prompt: Sequence[int]) -> str:
        """The end of a prompt as text, which `answers` takes."""
        return self._tokenizer.decode(prompt[-PROMPT_TOKENS:], skip_special=False)

    def render(self, messages: Messages, tools: Sequence[Any] | None, variables: Mapping[str, Any]) -> str:
        """The prompt of a conversation as text.

        tools: as `answers.tools` gives them. variables: more names for the template.

        Raises:
            EngineError: the model has no template, or the template fails (with its line).
        """
        given = self.answers.messages(messages, tools)
        return self._needed().render(given, tools=tools, variables=variables)

    def encode(
        self, messages: Messages, tools: Sequence[Any] | None, variables: Mapping[str, Any] | None
    ) -> list[int]:
        """The prompt of a conversation as token ids, in which messages hold no control tokens; see `render`."""
        template, given = self._needed(), self.answers.messages(messages, tools)
        return encode_chat(self._tokenizer, template, given, tools=tools, variables=variables)

    def effort_variables(self, effort: str | None) -> dict[str, str]:
        """The template's variables for a reasoning effort. Raises EngineError where it takes no such value."""
        return effort_variables(self.answers, self.source, effort)

    def _rendered(
        self, messages: Messages, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str | None:
        try:
            return self._needed().render(messages, add_generation_prompt, None, variables)
        except ChatTemplateError:
            return None

    def _needed(self) -> ChatTemplate:
        if self._template is None:
            raise EngineError(self._missing)
        return self._template
