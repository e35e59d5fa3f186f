"""The format of a model's answers: which parts of the text are reasoning, text for the user, and tool calls.

`request.chat_format` finds the format of a model. `answer_violation` checks a finished answer.

Every `prompt` here is the text of the prompt's end, which may begin the answer: DeepSeek-R1's opens the reasoning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quengine.errors import EngineError
from quengine.structured.answer_parser import AnswerParser, TextParser
from quengine.structured.calls.form import arguments_expression
from quengine.structured.calls.format import CallFormat
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.reasoning_tags import switches
from quengine.structured.schema_check import schema_violation
from quengine.structured.tool_calls import ToolCall, ToolUse

NO_CALLS = "tools: the chat template of this model has no known form of calls"


class AnswerFormat(Protocol):
    """The answer format of one model.

    Attributes:
        calls_tools: answers may call tools; if not, a request may give none.
        reasons: answers may have reasoning.
        efforts: the values of the template's variable `reasoning_effort`; None where they are not known.
    """

    @property
    def calls_tools(self) -> bool: ...

    @property
    def reasons(self) -> bool: ...

    @property
    def efforts(self) -> tuple[str, ...] | None: ...

    def shown(self, use: ToolUse) -> frozenset[int]:
        """The control tokens whose names the parser needs in the text (`LLM.stream(..., show_special=...)`)."""
        ...

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """A request's messages as the template reads them. One of them describes `tools` where the template does not.

        Raises:
            EngineError: the template cannot be given a message.
        """
        ...

    def tools(self, use: ToolUse) -> Sequence[Mapping[str, Any]] | None:
        """The template's variable `tools`."""
        ...

    def constraint(
        self, use: ToolUse, text: ConstraintSpec | None, prompt: str = ""
    ) -> ConstraintSpec | None:
        """The constraint of the whole answer: calls where `use` requires one, else a text that `text` constrains.

        Raises:
            EngineError: a tool's schema is no JSON schema, or all together are too large; or the model calls no tools.
        """
        ...

    def bounded(self, spec: ConstraintSpec | None, prompt: str, budget: int) -> ConstraintSpec | None:
        """`spec` with at most `budget` tokens of reasoning; -1: any number. Raises EngineError where the format cannot
        be limited."""
        ...

    def parser(self, use: ToolUse, prompt: str = "") -> AnswerParser:
        """A parser for one answer."""
        ...

    def with_reasoning_in_text(self) -> "AnswerFormat":
        """The same format with reasoning as part of the text. Raises EngineError where that is impossible."""
        ...

    def continuation(self, prompt: str, reasoning: str, text: str) -> list[tuple[str, str]]:
        """The text after a prompt whose answer has begun, as pairs (text that the format writes, given text)."""
        ...

    def reasoning_tokens(
        self, use: ToolUse, tokens: Sequence[int], decode: Callable[[Sequence[int]], str], prompt: str = ""
    ) -> int:
        """How many of an answer's tokens are reasoning. `decode`: the text of tokens, control tokens included."""
        ...


@dataclass(frozen=True)
class TextFormat:
    """Text without reasoning, with tool calls of the form `calls`; None: without calls.

    marked: every answer has marks of that form, with calls or without.
    """

    calls: CallFormat | None = None
    marked: bool = False
    reasons = False
    efforts = None

    @property
    def calls_tools(self) -> bool:
        return self.calls is not None

    def shown(self, use: ToolUse) -> frozenset[int]:
        return self.calls.marker_ids if self.calls is not None and self._marks(use) else frozenset()

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Sequence[Mapping[str, Any]]:
        return messages if self.calls is None else self.calls.messages(messages, tools)

    def tools(self, use: ToolUse) -> Sequence[Mapping[str, Any]] | None:
        return use.described

    def constraint(
        self, use: ToolUse, text: ConstraintSpec | None, prompt: str = ""
    ) -> ConstraintSpec | None:
        del prompt
        if self.calls is None and use.callable:
            raise EngineError(NO_CALLS)
        return (None if self.calls is None else self.calls.constraint(use)) or text

    def bounded(self, spec: ConstraintSpec | None, prompt: str, budget: int) -> ConstraintSpec | None:
        del prompt, budget
        return spec

    def with_reasoning_in_text(self) -> "TextFormat":
        return self

    def continuation(self, prompt: str, reasoning: str, text: str) -> list[tuple[str, str]]:
        del prompt, reasoning
        return [("", text)]

    def parser(self, use: ToolUse, prompt: str = "") -> AnswerParser:
        del prompt
        return self.calls.parser(use) if self.calls is not None and self._marks(use) else TextParser()

    def _marks(self, use: ToolUse) -> bool:
        return self.marked or bool(use.callable)

    def reasoning_tokens(
        self, use: ToolUse, tokens: Sequence[int], decode: Callable[[Sequence[int]], str], prompt: str = ""
    ) -> int:
        del use, tokens, decode, prompt
        return 0


PROMPT_TOKENS = 64
"""The number of tokens at a prompt's end that are enough to hold the beginning of an answer."""


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def nearest_effort(form: AnswerFormat, template: str | None, effort: str) -> str | None:
    """The template's effort that is nearest to `effort`; None where it has no efforts and no switch."""
    if form.efforts is not None:
        place = _EFFORTS.index(effort)
        return min(form.efforts, key=lambda each: abs(_EFFORTS.index(each) - place))
    known = "reasoning_effort" in (template or "") or effort == "none"
    return effort if known or switch_variables(form, template, True) else None


def effort_variables(form: AnswerFormat, template: str | None, effort: str | None) -> dict[str, Any]:
    """The template's variables for a reasoning effort. effort: None is the template's own, with reasoning on.

    Where the template only switches reasoning on and off, "none" is off and any other effort on.

    Raises:
        EngineError: the template takes no such value.
    """
    source = template or ""
    known = "reasoning_effort" in source
    switch = switch_variables(form, template, effort != "none")
    if effort is None or (effort == "none" and not known):
        return switch
    if not known and not switch:
        raise EngineError(f"{effort}: the chat template of this model has no reasoning effort")
    if form.efforts is not None and effort not in form.efforts:
        raise EngineError(f"{effort}: the chat template of this model takes {', '.join(form.efforts)}")
    return {**switch, "reasoning_effort": effort} if known else switch


def switch_variables(form: AnswerFormat, template: str | None, on: bool) -> dict[str, Any]:
    """The variables that switch a template's reasoning on or off; none where it has no switch."""
    return {} if template is None or form.efforts is not None else switches(template, on)


def answer_violation(
    spec: ConstraintSpec | None, use: ToolUse | None, text: str, calls: Sequence[ToolCall] = ()
) -> str | None:
    """The first violation in a finished answer of the schemas that constrained it, in one line; None: it is valid.

    Args:
        spec: the request's constraint.
        use: its tools; the arguments of calls are checked where calls were required.
        text: the answer's text, without its reasoning.
        calls: its calls.
    """
    if use is not None and use.choice == "required":
        tools = {tool.name: tool for tool in use.callable}
        for call in calls:
            if call.name not in tools:
                continue
            wrong = schema_violation(arguments_expression(tools[call.name]).standard, call.arguments)
            if wrong is not None:
                return f"{call.name}: {wrong}"
        return None
    return schema_violation(spec.schema, text) if spec is not None else None
