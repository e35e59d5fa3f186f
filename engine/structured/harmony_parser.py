"""Reads answers in harmony, gpt-oss's form: messages with a channel, of which one may go to a tool.

    <|start|>assistant to=RECIPIENT<|channel|>CHANNEL to=RECIPIENT <|constrain|>TYPE<|message|>BODY<|end|>

An answer begins behind `<|start|>assistant`, which the prompt ends with. All of a header but `<|message|>` may be
absent, and the recipient stands in one of the two places. `<|return|>` and `<|call|>` end the last message.
Source: OpenAI's "harmony response format" (the openai-harmony package's documentation).

| channel | recipient | becomes |
|---|---|---|
| analysis | none | reasoning |
| final, commentary (a preamble to a call), any other, none | none | text |
| any | functions.NAME, where there are tools | a call of NAME with BODY as its arguments |
| any | any other | reasoning: it is not for the user |

Whatever is not of this form is text of the message in which it stands, at the beginning of an answer its text. A
header that the end of the answer cuts off is dropped. Messages of one kind are joined by an empty line.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from quengine.structured.answer_parser import BETWEEN, AnswerParser, NoMatchError, Reading
from quengine.structured.tool_calls import CallDelta, ReasoningDelta, TextDelta

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
    """What is said of a message before its body; None for what is not said."""

    channel: str | None
    recipient: str | None

    def called(self, names: frozenset[str]) -> str | None:
        """The tool that the message calls, where any of `names` may be called."""
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
        names: the tools that may be called. Any function is then a call: models also call what there is not.
        new_id: makes the id of a call.
        only_calls: the answer is held to a call, so that text is what was cut off: it is not given out.
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
        """What was read is no header: its opener is text, and what follows it is read again."""
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
        """Give the message out up to what may be another header; False at the end of the answer."""
        while True:
            opener = _OPENER.search(self._text, self._at)
            held = 0 if self._closed else self._held_back(_OPENERS)
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
        """Read a header with the end of the message before it. `first`: behind the prompt's `<|start|>assistant`."""
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
        """The text up to a space or a mark, and the white space around it."""
        yield from self._space()
        parts: list[str] = []
        while (yield from self._some()) and (length := self._span(_UNSPACED)):
            self._pass(length, parts.append)
        yield from self._space()
        return "".join(parts)

    def _follows(self, text: str, read: bool = True) -> Reading[bool]:
        """Whether `text` comes next; it is read over with `read`. Raises _CutOffError at the end of the answer."""
        at = self._at
        yield from self._some()
        found = yield from self._take(text)
        if found and self._text[at : self._at] != text:
            raise _CutOffError
        if not read:
            self._at = at
        return found

    def _some(self) -> Reading[bool]:
        """Wait for a character. Raises _CutOffError where none follows."""
        if not (yield from self._peek()):
            raise _CutOffError
        return True
