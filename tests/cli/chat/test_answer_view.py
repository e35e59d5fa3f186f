"""Words that come in pieces are wrapped whole; what a model thinks is dimmed and apart from its answer; control
characters are spelled out."""

import random
import textwrap

import pytest

from quengine.cli.chat.answer_view import AnswerView, WordWrap
from quengine.structured.tool_calls import ReasoningDelta, TextDelta
from tests.cli.chat.screen import Screen

TEXT = "the quick brown fox, jumping over unbelievably lazy dogs, went to sleep. " * 3


def shown(text: str, sizes: list[int], width: int) -> list[str]:
    screen, wrap, at, turn = Screen(width, 100), WordWrap(width), 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        screen.feed(wrap.write(text[at : at + size]))
        at, turn = at + size, turn + 1
    return screen.lines


@pytest.mark.parametrize("width", [20, 40, 79])
def test_lines_are_broken_at_words_whatever_the_pieces(width: int) -> None:
    expected = textwrap.wrap(TEXT, width - 1)
    chance = random.Random(width)
    for sizes in ([1], [2], [5], [chance.randint(1, 12) for _ in range(40)]):
        assert [line for line in shown(TEXT, sizes, width) if line] == expected


def test_line_ends_are_kept_and_long_words_are_broken_at_the_end_of_a_line() -> None:
    assert shown("a\n\nb c", [1], 20) == ["a", "", "b c"]
    assert shown("x" * 25, [25], 11) == ["x" * 10, "x" * 10, "x" * 5]
    assert "".join(shown("see " + "y" * 50, [3], 11)) == "see" + "y" * 50


def test_wide_characters_take_two_columns_and_break_anywhere() -> None:
    assert WordWrap(7).write("語語語語") == "語語語\n語"


Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")


@pytest.mark.parametrize("markdown", [True, False])
def test_reasoning_is_dimmed_before_the_text(markdown: bool, capsys: Captured) -> None:
    view = AnswerView(markdown)
    for delta in (ReasoningDelta("Hm\x1b"), ReasoningDelta("."), TextDelta("**Hel"), TextDelta("lo**")):
        view.write(delta)
    view.close()
    out = capsys.readouterr().out
    assert out.startswith("\x1b[2mHm\\x1b\x1b[0m\x1b[2m.\x1b[0m\n\n")
    assert out.endswith("\x1b[1mHello\x1b[0m" if markdown else "**Hello**")


def test_words_of_plain_text_are_wrapped_whole(capsys: Captured) -> None:
    view = AnswerView(markdown=False)
    view.write(TextDelta("word " * 10))
    view.close()
    assert capsys.readouterr().out.split("\n")[0].strip() == ("word " * 8).strip()
