"""Reads the section of reasoning at the beginning of an answer; what follows it is another parser's.

A section begins where the answer does, or in the prompt. A tag that stands later is text. White space around the
reasoning, and before the text behind it, belongs to the tags. A section that is cut off is reasoning to its end.
"""

from quengine.structured.answer_parser import SPACE, AnswerParser, Reading
from quengine.structured.reasoning.tags import ReasoningTags, State
from quengine.structured.tool_calls import Delta, ReasoningDelta


class ReasoningParser(AnswerParser):
    """Parses one answer.

    Args:
        tags: the section's.
        state: whether the prompt has begun the section ("open"), or ended it ("closed").
        rest: the parser of what follows.

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
        """Give out the reasoning, and read over the closing tag."""
        end = self._tags.end
        yield from self._space()
        while True:
            self._drop_read()
            found = self._text.find(end)
            held = 0 if self._closed else self._held_back([end])
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
        """Read over what stands between the section and the text."""
        yield from self._space()
        if self._tags.header and (yield from self._follows(self._tags.header)):
            yield from self._space()

    def _follows(self, tag: str) -> Reading[bool]:
        """Read over `tag`, and white space before it, if it follows as a whole; else nothing is read."""
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
