"""What a model thinks is dimmed and apart from its answer; control characters are spelled out."""

import pytest

from quengine.cli.display.answer_view import AnswerView
from quengine.structured.tool_calls import ReasoningDelta, TextDelta

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
