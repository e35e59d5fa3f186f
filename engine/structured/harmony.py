"""harmony, the answer format of gpt-oss: messages, each with a channel and perhaps a recipient, a tool.

    <|start|>assistant to=RECIPIENT<|channel|>CHANNEL to=RECIPIENT <|constrain|>TYPE<|message|>BODY<|end|>

An answer begins after `<|start|>assistant`, which the prompt ends with. All of a header but `<|message|>` may be
absent, and the recipient stands in one of the two places. `<|return|>` and `<|call|>` end the last message.
Source: OpenAI's "harmony response format" (the openai-harmony package's documentation).

| channel | recipient | becomes |
|---|---|---|
| analysis | none | reasoning |
| final, commentary (a preamble to a call), any other, none | none | text |
| any | functions.NAME, where there are tools | a call of NAME with BODY as its arguments |
| any | any other | reasoning: it is not for the user |

Whatever is not of this form belongs to the text of the message in which it stands, or, at the beginning, to the text of
the answer. A header that the answer's end cuts off is dropped. Messages of one kind are joined by an empty line.

The template (`chat_template` of openai/gpt-oss-20b) takes an earlier answer's reasoning as `thinking`, one call a
message, and descriptions of all tools.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quengine.errors import EngineError
from quengine.structured.answer_parser import BETWEEN, AnswerParser, NoMatchError, Reading, held_back
from quengine.structured.calls.form import arguments_expression, dropped_of
from quengine.structured.constraint_spec import ConstraintSpec, control_ids, literal, marker
from quengine.structured.tool_calls import (
    CallDelta,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolUse,
    new_call_id,
    with_values,
)

if TYPE_CHECKING:
    from quengine.models.tokenizer import Tokenizer

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
FUNCTIONS = "functions."

_ENDS = (END, RETURN, CALL)
_OPENERS = (*_ENDS, START, CHANNEL)  # what another header may begin with
_OPENER = re.compile("|".join(map(re.escape, _OPENERS)))
_UNSPACED = re.compile(r"[^\s<]+")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_USER = (None, "user", "all")


class _CutOffError(Exception):
    """The answer ended in a header."""


@dataclass(frozen=True)
class Header:
    """The header of a message, whose channel or recipient may be absent (None)."""

    channel: str | None
    recipient: str | None

    def called(self, names: frozenset[str]) -> str | None:
        """The tool that the message calls; None: it calls none, or `names`, the tools that may be called, is empty."""
        if not names or self.recipient is None:
            return None
        name = self.recipient.removeprefix(FUNCTIONS)
        known = name != self.recipient or name in names
        return name if known and _NAME.fullmatch(name) else None

    @property
    def is_reasoning(self) -> bool:
        """Whether the message, which calls no tool, is not for the user."""
        return self.channel == "analysis" or self.recipient not in _USER


class HarmonyParser(AnswerParser):
    """Parses one answer.

    Args:
        names: the tools that may be called. If there are any, a message to an unknown function is a call, too.
        new_id: makes the id of a call.
        only_calls: the answer is constrained to a call. Text can then only be a call that was cut off, and is dropped.
    """

    def __init__(self, names: frozenset[str], new_id: Callable[[], str], only_calls: bool = False) -> None:
        self._names = names
        self._new_id = new_id
        self._only_calls = only_calls
        self._kind: type[TextDelta | ReasoningDelta | CallDelta] = TextDelta
        self._begun: set[type] = set()  # kinds that have been given out
        self._apart = False  # an earlier message was of the same kind
        self._without_arguments = False
        super().__init__()

    def _answer(self) -> Reading[None]:
        first = True
        while True:
            try:
                self._begin((yield from self._header(first)))
            except NoMatchError:
                self._give_back(first)
            except _CutOffError:
                if first and "<|" not in self._text and "to=" not in self._text:
                    self._say(self._text)
                break
            first = False
            if not (yield from self._body()):
                break
        self._end_message()

    def _give_back(self, first: bool) -> None:
        """Undoes the reading of a header that was none: its opener becomes text, and the rest is read again."""
        opener = None if first else _OPENER.match(self._text)
        self._at = 0 if opener is None else opener.end()
        self._say(self._text[: self._at])

    def _begin(self, header: Header) -> None:
        self._end_message()
        name = header.called(self._names)
        if name is not None:
            self._kind, self._without_arguments = CallDelta, True
            self._emit(CallDelta(self.calls, "", self._new_id(), name))
            self.calls += 1
            return
        self._kind = ReasoningDelta if header.is_reasoning else TextDelta
        self._apart = self._kind in self._begun

    def _body(self) -> Reading[bool]:
        """Emits the message up to what may be another header; False at the end of the answer."""
        while True:
            opener = _OPENER.search(self._text, self._at)
            held = 0 if self._closed else held_back(self._text, _OPENERS)
            certain = len(self._text) - held if opener is None else opener.start()
            self._say(self._text[self._at : certain])
            self._at = certain
            self._drop_read()
            if opener is not None:
                return True
            if self._closed:
                return False
            yield

    def _end_message(self) -> None:
        if self._without_arguments:
            self._say("{}")

    def _say(self, text: str) -> None:
        if not text or (self._kind is TextDelta and self._only_calls):
            return
        self._begun.add(self._kind)
        if self._kind is CallDelta:
            self._without_arguments = self._without_arguments and not text.strip()
            self._emit(CallDelta(self.calls - 1, text))
            return
        parted = f"{BETWEEN}{text}" if self._apart else text
        self._apart = False
        self._emit(TextDelta(parted) if self._kind is TextDelta else ReasoningDelta(parted))

    # --- headers

    def _header(self, first: bool) -> Reading[Header]:
        """Reads a header, and before it the end of the last message. `first`: the header after the prompt's
        `<|start|>assistant`."""
        for end in _ENDS:
            if (yield from self._follows(end)):
                break
        yield from self._space()
        if (yield from self._follows(START)):
            yield from self._word()
        elif not first and not (yield from self._follows(CHANNEL, read=False)):
            raise NoMatchError
        channel, recipient = None, (yield from self._recipient())
        if (yield from self._follows(CHANNEL)):
            channel = yield from self._word(dots=False)
            recipient = (yield from self._recipient()) or recipient
            yield from self._follows(CONSTRAIN)
            yield from self._unspaced()
        if not (yield from self._follows(MESSAGE)):
            raise NoMatchError
        return Header(channel, recipient)

    def _recipient(self) -> Reading[str | None]:
        yield from self._space()
        if not (yield from self._follows("to=")):
            return None
        return (yield from self._unspaced())

    def _unspaced(self) -> Reading[str]:
        """Reads up to a space or a mark, and the white space around it; returns the text without white space."""
        yield from self._space()
        parts: list[str] = []
        yield from self._some()
        while length := self._span(_UNSPACED):
            self._pass(length, parts.append)
            yield from self._some()
        yield from self._space()
        return "".join(parts)

    def _follows(self, text: str, read: bool = True) -> Reading[bool]:
        """Whether `text` comes next; it is skipped if `read`. Raises _CutOffError at the end of the answer."""
        at = self._at
        yield from self._some()
        found = yield from self._take(text)
        if found and self._text[at : self._at] != text:
            raise _CutOffError
        if not read:
            self._at = at
        return found

    def _some(self) -> Reading[None]:
        """Waits for a character. Raises _CutOffError where none follows."""
        if not (yield from self._peek()):
            raise _CutOffError


_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
_INSTRUCTIONS = ("system", "developer")
_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_REASONING_KEYS = ("reasoning_content", "reasoning")  # other servers' names for `thinking`


@dataclass(frozen=True)
class HarmonyFormat:
    """The `answer_format.AnswerFormat` of harmony. controls: the ids of its control tokens, by name."""

    controls: Mapping[str, int] = field(default_factory=dict, hash=False)
    calls_tools = True
    reasons = True
    efforts = ("low", "medium", "high")

    @classmethod
    def of(cls, template: str, tokenizer: "Tokenizer") -> "HarmonyFormat | None":
        """The format of a model with this chat template and vocabulary; None where the template writes no harmony."""
        written = all(text in template for text in (START, CHANNEL, MESSAGE))
        return cls(control_ids(tokenizer, _MARKERS)) if written else None

    def shown(self, use: ToolUse) -> frozenset[int]:
        del use
        return frozenset(self.controls.values())

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Mapping[str, Any]]:
        """A request's messages as the template reads them.

        The template writes instructions only from the first message, so those at the beginning are joined. It writes
        only the first call of a message, and takes a result for that of the call before it. So each call of a message
        becomes a message of its own, followed by its result.

        Raises:
            EngineError: instructions follow other messages, or a call's arguments are no JSON object.
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
        """The grammar of the whole answer: reasoning, then a required call or a text that `text` constrains.

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
        """As the protocol's. All tokens between two control tokens belong to one message."""
        parser, count = self.parser(use, prompt), 0
        marks = frozenset(self.controls.values())
        for _, run in itertools.groupby(tokens, marks.__contains__):
            part = list(run)
            if any(isinstance(delta, ReasoningDelta) for delta in parser.push(decode(part))):
                count += len(part)
        return count

    def _start(self, last: str) -> str:
        """The grammar's beginning: `last`, with reasoning before it or without."""
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
    """A message and the results after it, in which each call is a message followed by its results. Results of no call
    come last."""
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
    """The messages, with all instructions at the beginning joined into one. Raises EngineError for later ones."""
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
