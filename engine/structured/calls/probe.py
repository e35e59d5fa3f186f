"""Finds a chat template's form of calls by rendering it with one call, three calls, and calls without arguments.

The rendered names, keys, values and ids are words that occur nowhere else; the text between them is the form. A
template is rendered some ten times, a few milliseconds each (`models.template.chat_template`).
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quengine.errors import EngineError
from quengine.structured.calls.form import ID, INDEX, NAME, CallForm, ParameterForm, common_start

Render = Callable[..., str]
"""`ChatTemplate.render`: (messages, add_generation_prompt, tools)."""

ASKED, SAID = "zqasked", "zqsaid"
_NAMES = ("zqfirst", "zqsecond", "zqthird")
_IDS = ("zqid00001", "zqid00002", "zqid00003")
_LONG_ID = "call_zqid0000000000000000"
_VALUES: Mapping[str, Any] = {
    "string": "zqvalue",
    "integer": 71717,
    "number": 717.25,
    "boolean": True,
    "object": {"zqinner": 71},
    "array": [71, 72],
}
_BARE = "{zqinner:71}"
_KEYS = {kind: f"zqkey{n}" for n, kind in enumerate(_VALUES)}
_ARGUMENTS = {_KEYS[kind]: value for kind, value in _VALUES.items()}
_TWO = {_KEYS["string"]: "zqone", "zqlast": "zqtwo"}
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")


class UnclearError(Exception):
    """The renderings do not show a form."""


@dataclass(frozen=True)
class _Probe:
    """A template, and whether arguments are given to it as JSON text (`as_text`) or as values."""

    render: Render
    as_text: bool

    def calls(self, *arguments: Any, content: str = "", ids: Sequence[str] = _IDS) -> str:
        """The text after the question, where the assistant answers with calls of these arguments."""
        calls = [
            {
                "id": given,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(each) if self.as_text else each},
            }
            for each, name, given in zip(arguments, _NAMES, ids, strict=False)
        ]
        return self._answer({"role": "assistant", "content": content, "tool_calls": calls})

    def text(self) -> str:
        """The text after the question, where the assistant answers with text."""
        return self._answer({"role": "assistant", "content": SAID})

    def prompt(self) -> str:
        """The text after the question at the end of a prompt."""
        return _behind(self.render([{"role": "user", "content": ASKED}], True, described()))

    def _answer(self, message: Mapping[str, Any]) -> str:
        return _behind(self.render([{"role": "user", "content": ASKED}, message], False, described()))


@dataclass(frozen=True)
class _Call:
    """The place of a call in a rendering: its name is at `at` .. `name_end`, its arguments at `start` .. `end`."""

    at: int
    name_end: int
    start: int
    end: int


def described(names: Sequence[str] = _NAMES) -> list[dict[str, Any]]:
    """The tools of the rendered requests."""
    types = {"zqlast": "string", **{key: kind for kind, key in _KEYS.items()}}
    properties: dict[str, Any] = {
        key: {"type": kind, "description": "zqdescribed"} for key, kind in types.items()
    }
    properties[_KEYS["object"]]["additionalProperties"] = True  # Command R reads it
    properties[_KEYS["array"]]["items"] = {"type": "integer"}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    functions = [{"name": name, "description": "zqdescribed", "parameters": parameters} for name in names]
    return [{"type": "function", "function": function} for function in functions]


def shows_tools(render: Render) -> bool:
    """Whether a template writes tools into the prompt."""
    try:
        return "zqdescribed" in render([{"role": "user", "content": ASKED}], True, described())
    except EngineError:
        return False


def takes_system(render: Render) -> bool:
    """Whether a template writes a system message."""
    try:
        return SAID in render(
            [{"role": "system", "content": SAID}, {"role": "user", "content": ASKED}], True, None
        )
    except EngineError:
        return False


def found_form(render: Render) -> CallForm | None:
    """The form of calls of the template that `render` renders; None where the renderings do not show one."""
    for as_text in (False, True):
        probe = _Probe(render, as_text)
        try:
            form = _form(probe)
        except (UnclearError, EngineError):
            continue
        return replace(form, as_text=as_text, id_length=_id_length(probe), shows_tools=shows_tools(render))
    return None


def _id_length(probe: _Probe) -> int:
    try:
        probe.calls(_TWO, ids=[_LONG_ID])
    except EngineError:
        return len(_IDS[0])
    return 0


def _form(probe: _Probe) -> CallForm:
    several = True
    try:
        text = probe.calls(_TWO, _TWO, _TWO)
    except EngineError:
        text, several = probe.calls(_TWO), False
    if several and _NAMES[2] not in text:
        text, several = probe.calls(_TWO), False
    try:
        calls, parameters = [_json_call(text, n) for n in range(3 if several else 1)], False
    except UnclearError:
        calls, parameters = [_parameter_call(text, n) for n in range(3 if several else 1)], True
    form = _around(probe, text, calls)
    if not parameters:
        return form
    return _with_parameters(probe, form, text, calls[0])


def _around(probe: _Probe, text: str, calls: Sequence[_Call]) -> CallForm:
    """The form around names and arguments. The tail of parameters is still part of the call's tail."""
    first, last = calls[0], calls[-1]
    header = _header(probe, text[: first.at])
    before = _slotted(text[: first.at], 0)
    middle, index = _indexed([_slotted(text[each.name_end : each.start], n) for n, each in enumerate(calls)])
    end = _slotted(text[last.end :], len(calls) - 1)
    turn_end = probe.text().partition(SAID)[2]
    if len(calls) == 1:
        tail = _without_turn(end, turn_end)
        return CallForm(before[header:].lstrip(), middle, tail, several=False, index=index or 0)
    betweens = [
        _slotted(text[one.end : two.at], n + 1) for n, (one, two) in enumerate(itertools.pairwise(calls))
    ]
    between, second = _indexed(betweens)
    if second is not None:
        index = second - 1
        behind = between.rpartition(INDEX)[2]
        if before.endswith(f"{index}{behind}"):
            before = before.removesuffix(f"{index}{behind}") + INDEX + behind
    head = _common_suffix(before[header:], between).lstrip()
    tail = _common_prefix(between[: len(between) - len(head)], end)
    close = _without_turn(end[len(tail) :], turn_end)
    if not close:  # an answer need not end with white space
        tail = tail.rstrip()
    return CallForm(
        head=head,
        middle=middle,
        tail=tail,
        open=before[header : len(before) - len(head)].lstrip(),
        separator=between[len(tail) : len(between) - len(head)],
        close=close,
        index=index or 0,
        text_mark=_text_mark(probe),
    )


def _header(probe: _Probe, before: str) -> int:
    """The length of the turn's beginning, in the text before a call's name; the rest belongs to the call.

    The turn's beginning is what the prompt of an answer also has and, where the template writes text before a call,
    everything up to the end of that text.
    """
    header = _border(before, len(_common_prefix(before, probe.prompt())))
    try:
        text, called, _ = probe.calls(_TWO, content=SAID).partition(_NAMES[0])
        said = text.partition(SAID)[2] if called else ""  # some write either a text or calls
    except EngineError:
        said = ""
    if said:
        header = max(header, _border(before, len(before) - len(_common_suffix(before, said))))
    thought = before.rfind("</think>")
    return max(header, thought + len("</think>")) if thought >= 0 else header


def _border(text: str, at: int) -> int:
    """`at`, or the beginning of a marker that a cut at `at` would split: markers may have first letters in common."""
    opened = max(text.rfind("<", 0, at), text.rfind("[", 0, at))
    if opened < 0:
        return at
    mark = _MARK.match(text, opened)
    return opened if mark is not None and mark.end() > at else at


def _text_mark(probe: _Probe) -> str:
    """The recipient in plain letters that begins an answer's text; "" where answers begin with none."""
    prompt, text = probe.prompt(), probe.text().partition(SAID)[0]
    mark = text.removeprefix(prompt)
    return mark if text.startswith(prompt) and mark.strip().isalpha() else ""


def _without_turn(end: str, turn_end: str) -> str:
    """The text after the last call, without the end that every turn has."""
    if turn_end.strip() and turn_end.strip() in end:
        return end.partition(turn_end.strip())[0].rstrip()
    if same := _common_suffix(end, turn_end).strip():
        return end[: end.rindex(same)].rstrip()
    marks = [at for mark in _MARK.findall(turn_end) if (at := end.find(mark)) >= 0]
    end = end[: min(marks, default=len(end))]
    return end.rstrip()


def _with_parameters(probe: _Probe, form: CallForm, text: str, call: _Call) -> CallForm:
    """The form with a `ParameterForm`, read from the arguments of a call."""
    key, value = text.index(_KEYS["string"], call.name_end), text.index("zqone", call.name_end)
    other = text.index("zqlast", value)
    before = text[call.name_end : key]
    between = text[value + len("zqone") : other]
    head = _common_suffix(before, between).lstrip()
    tail = _common_prefix(between[: len(between) - len(head)], form.tail)
    if not tail:
        raise UnclearError
    separators, bare = _separators(probe)
    parts = ParameterForm(head, separators, tail, between[len(tail) : len(between) - len(head)])
    return replace(
        form,
        middle=form.middle[: len(form.middle) - len(head)],
        tail=form.tail[len(tail) :],
        parameters=_quoted(parts, bare),
    )


def _quoted(form: ParameterForm, bare: bool) -> ParameterForm:
    """The form with the quote of strings, where the texts around them differ only by it from those of other values."""
    string, other = form.separators["string"], form.separators["integer"]
    quote = string.removeprefix(other)
    if quote and string.startswith(other) and form.tail.startswith(quote):
        same = {**form.separators, "string": other}
        return replace(form, separators=same, tail=form.tail.removeprefix(quote), quote=quote, bare=bare)
    if bare:
        raise UnclearError
    return form


def _separators(probe: _Probe) -> tuple[dict[str, str], bool]:
    """The text between a key and a value of each JSON type, and whether keys within values have no quotes.

    Raises:
        UnclearError: values have no plain form.
    """
    text = probe.calls(_ARGUMENTS)
    found, bare, at = {}, False, text.index(_NAMES[0])
    for kind, value in _VALUES.items():
        at = text.index(_KEYS[kind], at) + len(_KEYS[kind])
        following = [text.find(key, at) for key in _KEYS.values()]
        end = min((each for each in following if each >= 0), default=len(text))
        spelled = next((each for each in spellings(value) if each in text[at:end]), None)
        if spelled is None:
            raise UnclearError
        bare = bare or spelled == _BARE
        found[kind] = text[at : text.index(spelled, at)]
    return found, bare


def spellings(value: Any) -> Iterator[str]:
    """The ways in which templates write a value: text, JSON, Python's literal, JSON without spaces or quotes."""
    if isinstance(value, str):
        yield value
        return
    yield from (json.dumps(value), repr(value), json.dumps(value, separators=(",", ":")))
    if isinstance(value, dict):
        yield _BARE


def _json_call(text: str, number: int) -> _Call:
    at = _name_at(text, number, lambda end: _json_at(text, end) is not None)
    end = at + len(_NAMES[number])
    found = _json_at(text, end)
    if found is None:
        raise UnclearError
    return _Call(at, end, *found)


def _json_at(text: str, start: int) -> tuple[int, int] | None:
    """The place of the arguments, as JSON, after `start` and before the next call."""
    limit = min((at for name in _NAMES if (at := text.find(name, start)) >= 0), default=len(text))
    for found in re.finditer("{", text[:limit][start:]):
        try:
            value, end = json.JSONDecoder().raw_decode(text, start + found.start())
        except ValueError:
            continue
        if value == _TWO:
            return start + found.start(), end
    return None


def _parameter_call(text: str, number: int) -> _Call:
    at = _name_at(text, number, lambda end: text.find(_KEYS["string"], end) >= 0)
    end = at + len(_NAMES[number])
    start = text.find(_KEYS["string"], end)
    last = text.find("zqtwo", start)
    if start < 0 or last < 0:
        raise UnclearError
    return _Call(at, end, start, last + len("zqtwo"))


def _name_at(text: str, number: int, holds: Callable[[int], bool]) -> int:
    """The last place of a call's name before its arguments."""
    found = [each.start() for each in re.finditer(_NAMES[number], text)]
    fitting = [at for at in found if holds(at + len(_NAMES[number]))]
    if not fitting:
        raise UnclearError
    return fitting[-1]


def _slotted(text: str, number: int) -> str:
    return re.sub("|".join(_IDS), ID, text.replace(_NAMES[number], NAME))


def _indexed(texts: Sequence[str]) -> tuple[str, int | None]:
    """Texts that differ only by a number that counts up: one text with INDEX in its place, and the first number."""
    parts = [re.split(r"(\d+)", text) for text in texts]
    if len({len(each) for each in parts}) > 1:
        raise UnclearError
    made, index = [], None
    for same in zip(*parts, strict=True):
        if len(set(same)) == 1:
            made.append(same[0])
            continue
        if not same[0].isdigit() or [int(each) for each in same] != [
            int(same[0]) + n for n in range(len(same))
        ]:
            raise UnclearError
        index = int(same[0])
        made.append(INDEX)
    return "".join(made), index


def _behind(text: str) -> str:
    before, _, behind = text.rpartition(ASKED)
    if not before and not behind:
        raise UnclearError
    return behind


def _common_prefix(one: str, two: str) -> str:
    """The common beginning of both texts, shortened so that it cuts no tag."""
    common = common_start(one, two)
    while (opened := max(_opened(text, len(common)) for text in (one, two))) >= 0:
        common = common[:opened]
    return common


def _common_suffix(one: str, two: str) -> str:
    """The common end of both texts, shortened so that it cuts no tag."""
    common = common_start(one[::-1], two[::-1])[::-1]
    while any(_opened(text, len(text) - len(common)) >= 0 for text in (one, two)):
        common = common.partition(">")[2]
    return common


def _opened(text: str, at: int) -> int:
    """The beginning of the tag around `at`; -1 where there is none."""
    opened, closed = text.rfind("<", 0, at), text.rfind(">", 0, at)
    return opened if opened > closed and text.find(">", at) >= 0 else -1
