"""The format of answers that begin with reasoning between two tags; another format has the text or calls after it.

The section begins the answer, or is opened by the prompt. A tag at any later place is text. White space around the
reasoning, and before the text after it, belongs to the tags. If the section is cut off, all of it is reasoning.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quengine.structured.answer_format import AnswerFormat
from quengine.structured.answer_parser import SPACE, AnswerParser, Reading, held_back
from quengine.structured.constraint_spec import ConstraintSpec, ReasoningBudget, control_ids, marker
from quengine.structured.reasoning_tags import REASONING_KEYS, ReasoningTags, State, reasoning_in
from quengine.structured.tool_calls import Delta, ReasoningDelta, ToolUse

if TYPE_CHECKING:
    from quengine.models.tokenizer import Tokenizer


class ReasoningParser(AnswerParser):
    """Parses one answer.

    Args:
        tags: the tags of the section.
        state: whether the prompt has opened the section ("open"), or closed it ("closed").
        rest: the parser of the text after the section.

    Attributes:
        inside: whether what comes next is reasoning.
    """

    def __init__(self, tags: ReasoningTags, state: State, rest: AnswerParser) -> None:
        self._tags = tags
        self._state = state
        self._rest = rest
        self.inside = state == "open"
        super().__init__()

    def _resumed(self) -> list[Delta]:
        out = super()._resumed()
        self.calls = self._rest.calls
        return out

    def _answer(self) -> Reading[None]:
        if self._state == "unknown":
            self.inside = yield from self._follows(self._tags.begin)
            if not self.inside and (yield from self._follows(self._tags.end)):  # of an empty section
                yield from self._header()
        if self.inside:
            yield from self._section()
            yield from self._header()
        while True:
            self._out += self._rest.push(self._text[self._at :])
            self._text, self._at = "", 0
            if self._closed:
                self._out += self._rest.finish()
                return
            yield

    def _section(self) -> Reading[None]:
        """Emits the reasoning, and skips the closing tag."""
        end = self._tags.end
        yield from self._space()
        while True:
            self._drop_read()
            found = self._text.find(end)
            held = 0 if self._closed else held_back(self._text, [end])
            certain = self._text[: len(self._text) - held] if found < 0 else self._text[:found]
            text = certain.rstrip(SPACE)
            if text:
                self._emit(ReasoningDelta(text))
            self._at = len(text)
            if found >= 0:
                self.inside = False
                self._at = found + len(end)
                return
            if self._closed:
                self._at = len(self._text)
                return
            yield

    def _header(self) -> Reading[None]:
        """Skips the white space and the header between the section and the text."""
        yield from self._space()
        if self._tags.header and (yield from self._follows(self._tags.header)):
            yield from self._space()

    def _follows(self, tag: str) -> Reading[bool]:
        """Skips `tag`, and white space before it, if all of it follows; else reads nothing."""
        at = self._at
        yield from self._space()
        while True:
            rest = self._text[self._at : self._at + len(tag)]
            if rest == tag:
                self._at += len(tag)
                return True
            if self._closed or not tag.startswith(rest):
                self._at = at
                return False
            yield


_SPACE = r"/[ \t\r\n]{0,4}/"


@dataclass(frozen=True)
class ReasoningFormat:
    """`tags` around the reasoning, `rest` for what follows; see `answer_format.AnswerFormat`.

    Attributes:
        controls: control tokens by name that the tags are made of.
        apart: whether reasoning is apart from the text; else the text has it, with its tags.
    """

    tags: ReasoningTags
    rest: AnswerFormat
    controls: Mapping[str, int] = field(default_factory=dict, hash=False)
    apart: bool = True
    efforts = None

    @classmethod
    def of(cls, tags: ReasoningTags, rest: AnswerFormat, tokenizer: "Tokenizer") -> "ReasoningFormat":
        written = tags.begin + tags.end + tags.header
        names = [text for text in tokenizer.control_texts if text in written]
        return cls(tags, rest, control_ids(tokenizer, names))

    @property
    def calls_tools(self) -> bool:
        return self.rest.calls_tools

    @property
    def reasons(self) -> bool:
        return True

    def with_reasoning_in_text(self) -> "ReasoningFormat":
        return replace(self, apart=False)

    def shown(self, use: ToolUse) -> frozenset[int]:
        return self.rest.shown(use) | frozenset(self.controls.values())

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """The messages of `rest`, with an answer's reasoning under every name that a template may read."""
        return [
            {**message, **dict.fromkeys(REASONING_KEYS, thought)}
            if (thought := reasoning_in(message))
            else message
            for message in self.rest.messages(messages, tools)
        ]

    def tools(self, use: ToolUse) -> Sequence[Mapping[str, Any]] | None:
        return self.rest.tools(use)

    def constraint(
        self, use: ToolUse, text: ConstraintSpec | None, prompt: str = ""
    ) -> ConstraintSpec | None:
        """The constraint of `rest` with the section before it: required where the prompt opened it, else optional.

        Raises:
            EngineError: as `rest.constraint`.
        """
        spec, state = self.rest.constraint(use, text), self.tags.state(prompt)
        if spec is None or state == "closed":
            return spec
        begin = "" if state == "open" else f"{_SPACE} {self._tag(self.tags.begin)} "
        section = f"section: {begin}{self._until_end()}"
        optional = "" if state == "open" else "?"
        lark = f"start: section{optional} rest\n{section}\nrest: %lark {{\n{spec.lark}\n}}"
        return replace(spec, lark=lark)

    def bounded(self, spec: ConstraintSpec | None, prompt: str, budget: int) -> ConstraintSpec | None:
        tags, state = self.tags, self.tags.state(prompt)
        if budget < 0 or state == "closed":
            return spec
        begin = "" if state == "open" else tags.begin
        bound = ReasoningBudget(budget, begin, tags.end, tags.closing + tags.header)
        return replace(spec, budget=bound) if spec else ConstraintSpec("reasoning budget", "", bound)

    def continuation(self, prompt: str, reasoning: str, text: str) -> list[tuple[str, str]]:
        """As the protocol's. The reasoning is left out where the prompt has closed the section."""
        state, closing = self.tags.state(prompt), self.tags.closing + self.tags.header
        if reasoning and state != "closed":
            thought = ("" if state == "open" else self.tags.opening, reasoning)
            return [thought, (closing, text)] if text else [thought]
        return [(closing if state == "open" else "", text)]

    def parser(self, use: ToolUse, prompt: str = "") -> AnswerParser:
        rest = self.rest.parser(use)
        return ReasoningParser(self.tags, self.tags.state(prompt), rest) if self.apart else rest

    def reasoning_tokens(
        self, use: ToolUse, tokens: Sequence[int], decode: Callable[[Sequence[int]], str], prompt: str = ""
    ) -> int:
        """The tokens between the tags, and the first ones of a closing tag that has several."""
        if not self.apart:
            return 0
        parser, count = ReasoningParser(self.tags, self.tags.state(prompt), self.rest.parser(use)), 0
        for token in tokens:
            was_inside = parser.inside
            parser.push(decode([token]))
            count += was_inside and parser.inside
            if was_inside and not parser.inside:
                break
        return count

    def _until_end(self) -> str:
        """The grammar of the rest of an open section: reasoning, the closing tag, white space and the header."""
        end, header = self.tags.end, self.tags.header
        after = f" {_SPACE} ({self._tag(header)})?" if header else ""
        if any(name in end for name in self.controls):
            return f"/(?s:.)*/ {self._tag(end)}{after} {_SPACE}"
        return f"ended{after} {_SPACE}\nended[lazy]: /(?s:.)*{_regex(end)}/"

    def _tag(self, text: str) -> str:
        """The grammar of a tag: control tokens, and the letters between them."""
        parts: list[str] = []
        while text:
            name = next((each for each in self.controls if text.startswith(each)), None)
            if name is None:
                later = [at for each in self.controls if (at := text.find(each)) > 0]
                length = min(later, default=len(text))
                parts.append(json.dumps(text[:length], ensure_ascii=False))
            else:
                length = len(name)
                parts.append(marker(self.controls, name))
            text = text[length:]
        return " ".join(parts)


def _regex(text: str) -> str:
    """A text as part of a regex between Lark's slashes."""
    return "".join(char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}" for char in text)
