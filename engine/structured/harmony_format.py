"""gpt-oss's way of writing answers, harmony: what its template reads, and the grammar of a constrained answer.

`harmony_parser` has the form of a message. The template (`chat_template` of openai/gpt-oss-20b) takes an earlier
answer's reasoning as `thinking`, one call a message, and descriptions of all tools.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quengine.errors import EngineError
from quengine.structured.calls.form import arguments_expression, dropped_of
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.harmony_parser import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MESSAGE,
    RETURN,
    START,
    HarmonyParser,
)
from quengine.structured.markers import control_ids, literal, marker
from quengine.structured.tool_calls import ReasoningDelta, Tool, ToolUse, new_call_id, with_values

if TYPE_CHECKING:
    from quengine.models.tokenizer import Tokenizer

_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
_INSTRUCTIONS = ("system", "developer")
_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_REASONING_KEYS = ("reasoning_content", "reasoning")  # other servers' names for `thinking`


@dataclass(frozen=True)
class HarmonyFormat:
    """`controls` are the control tokens by name that messages are made of; see `answer_format.AnswerFormat`."""

    controls: Mapping[str, int] = field(default_factory=dict, hash=False)
    calls_tools = True
    reasons = True
    efforts = ("low", "medium", "high")

    @classmethod
    def of(cls, template: str, tokenizer: "Tokenizer") -> "HarmonyFormat | None":
        """From the text of a chat template and the vocabulary; None where the template writes no such messages."""
        written = all(text in template for text in (START, CHANNEL, MESSAGE))
        return cls(control_ids(tokenizer, _MARKERS)) if written else None

    def shown(self, use: ToolUse) -> frozenset[int]:
        del use
        return frozenset(self.controls.values())

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Mapping[str, Any]]:
        """A request's messages as the template reads them.

        The template writes instructions from the first message alone: those at the beginning are joined. It writes
        the first call of a message, and takes a result for that of the call before it: calls of one message become
        messages of their own, each with its result behind it.

        Raises:
            EngineError: instructions stand behind other messages, or a call's arguments are no JSON object.
        """
        del tools  # the template shows them
        given = _with_instructions([_as_read(each, f"messages[{n}]") for n, each in enumerate(messages)])
        turns: list[list[Mapping[str, Any]]] = [[]]
        for message in given:
            if message.get("role") != "tool":
                turns.append([])
            turns[-1].append(message)
        return [message for turn in turns for message in _one_call_a_message(turn)]

    def tools(self, use: ToolUse) -> list[Mapping[str, Any]] | None:
        """The tools as the template reads them: a function without a description has an empty one."""
        described = use.described
        if described is None:
            return None
        return [{**each, "function": _described(each["function"])} for each in described]

    def constraint(
        self, use: ToolUse, text: ConstraintSpec | None, prompt: str = ""
    ) -> ConstraintSpec | None:
        """The grammar of the whole answer: reasoning, then a required call or a text that `text` asks for.

        Raises:
            EngineError: a tool's schema is no JSON schema, or all together are too large.
        """
        del prompt
        if use.choice == "required":
            calls = [self._call(n, tool) for n, tool in enumerate(use.callable)]
            names = " | ".join(f"call{n}" for n in range(len(calls)))
            lark = "\n".join([self._start(names), *calls])
            return ConstraintSpec("grammar", lark, from_schemas=True, dropped=dropped_of(use.callable))
        if text is None:
            return None
        last = f'{self._marker(CHANNEL)} "final" {self._type} {self._marker(MESSAGE)} text'
        return replace(text, lark=f"{self._start(last)}\ntext: %lark {{\n{text.lark}\n}}")

    def bounded(self, spec: ConstraintSpec | None, prompt: str, budget: int) -> ConstraintSpec | None:
        del prompt
        if budget >= 0:
            raise EngineError(
                f"reasoning budget {budget}: this model has no bound but its reasoning effort; leave it at -1"
            )
        return spec

    def with_reasoning_in_text(self) -> "HarmonyFormat":
        raise EngineError(
            'reasoning format "none": must be auto or deepseek, for this model reasons on a channel of its own'
        )

    def continuation(self, prompt: str, reasoning: str, text: str) -> list[tuple[str, str]]:
        del prompt
        thought = [(_ANALYSIS, reasoning)] if reasoning else []
        again = f"{END}{START}assistant" if reasoning else ""
        return [*thought, (f"{again}{CHANNEL}final{MESSAGE}", text)] if text or not thought else thought

    def parser(self, use: ToolUse, prompt: str = "") -> HarmonyParser:
        names = frozenset(tool.name for tool in use.callable)
        parser = HarmonyParser(names, new_call_id, only_calls=use.choice == "required")
        if prompt.endswith(_ANALYSIS):  # an answer that is continued
            parser.push(_ANALYSIS)
        return parser

    def reasoning_tokens(
        self, use: ToolUse, tokens: Sequence[int], decode: Callable[[Sequence[int]], str], prompt: str = ""
    ) -> int:
        """All tokens between two control tokens are of one message."""
        parser, count = self.parser(use, prompt), 0
        marks = frozenset(self.controls.values())
        for _, run in itertools.groupby(tokens, marks.__contains__):
            part = list(run)
            if any(isinstance(delta, ReasoningDelta) for delta in parser.push(decode(part))):
                count += len(part)
        return count

    def _start(self, last: str) -> str:
        """The grammar's beginning: `last`, or reasoning and then that."""
        thought = f'{self._marker(CHANNEL)} "analysis" {self._marker(MESSAGE)} /(?s:.)*/ {self._marker(END)}'
        again = f'{self._marker(START)} "assistant"'
        return f"start: thought? last\nthought: {thought} {again}\nlast: {last}"

    def _call(self, number: int, tool: Tool) -> str:
        channel, to = self._marker(CHANNEL), f" to={FUNCTIONS}{tool.name}"
        first = f'{literal(to)} {channel} "commentary"'
        second = f"{channel} {literal('commentary' + to)}"
        head = f"({first} | {second}) {self._type} {self._marker(MESSAGE)}"
        return f"call{number}: {head} {arguments_expression(tool).lark}"

    @property
    def _type(self) -> str:
        return f'(" "? {self._marker(CONSTRAIN)} "json" | " json")?'

    def _marker(self, text: str) -> str:
        return marker(self.controls, text)


def _as_read(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    changed = with_values(message, at)
    if message.get("role") != "assistant":
        return changed
    if not changed.get("tool_calls"):
        changed.pop("tool_calls", None)
    given = [value for key in _REASONING_KEYS if isinstance(value := changed.pop(key, None), str) and value]
    if given:
        changed.setdefault("thinking", given[0])
    if "tool_calls" in changed and changed.get("thinking") and changed["content"]:
        # A text before a call is analysis to the template, which takes it or `thinking`.
        changed |= {"thinking": f"{changed['thinking']}\n\n{changed['content']}", "content": ""}
    return changed


def _one_call_a_message(turn: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A message and the results behind it: each call as a message with its results, those of no call at the end."""
    calls = turn[0].get("tool_calls", ()) if turn else ()
    if len(calls) < 2:
        return turn
    waiting: dict[str, list[Mapping[str, Any]]] = {}
    for result in turn[1:]:
        waiting.setdefault(str(result.get("tool_call_id")), []).append(result)
    read: list[Mapping[str, Any]] = []
    for n, call in enumerate(calls):
        head = turn[0] if n == 0 else {"role": turn[0]["role"], "content": ""}
        read += [{**head, "tool_calls": [call]}, *waiting.pop(str(call.get("id")), ())]
    return read + [result for left in waiting.values() for result in left]


def _with_instructions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with those of instructions at their beginning as one."""
    given = [n for n, message in enumerate(messages) if message.get("role") in _INSTRUCTIONS]
    if given != list(range(len(given))):
        raise EngineError(
            f"messages[{given[-1]}]: this model's template takes instructions (system, developer) at the beginning only"
        )
    if len(given) < 2:
        return messages
    text = "\n\n".join(message.get("content") or "" for message in messages[: len(given)])
    return [{**messages[0], "content": text}, *messages[len(given) :]]


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "description": function.get("description") or ""}
