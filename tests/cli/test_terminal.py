"""Generated text on a terminal cannot command it; in a pipe it is untouched."""

import io
import json

import pytest

from quengine.cli.terminal import AnswerPrinter, json_line, write_line, write_text
from quengine.errors import visible
from quengine.structured.tool_calls import ReasoningDelta, TextDelta


class Output(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def test_control_characters_are_spelled_out_and_text_is_kept() -> None:
    assert visible("a\x1b]0;title\x07b\x9b2J\r\x7f") == "a\\x1b]0;title\\x07b\\x9b2J\\x0d\\x7f"
    assert visible("lines\n\tand 语言 🙂 é") == "lines\n\tand 语言 🙂 é"


@pytest.mark.parametrize(("terminal", "written"), [(True, "\\x1b[2J"), (False, "\x1b[2J")])
def test_only_a_terminal_is_protected(terminal: bool, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output(terminal)
    monkeypatch.setattr("sys.stdout", output)
    write_text("\x1b[2J")
    assert output.getvalue() == written


@pytest.mark.parametrize("terminal", [True, False])
def test_reasoning_is_dimmed_on_a_terminal_and_nowhere_else(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(terminal)
    monkeypatch.setattr("sys.stdout", output)
    printer = AnswerPrinter()
    for delta in (ReasoningDelta("Hm\x1b"), ReasoningDelta("."), TextDelta("Hel"), TextDelta("lo")):
        printer.write(delta)
    dimmed = "\x1b[2mHm\\x1b\x1b[0m\x1b[2m.\x1b[0m\n\n"
    assert output.getvalue() == (dimmed if terminal else "") + "Hello"


def test_a_line_of_a_report_is_one_line_that_any_output_can_encode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_line("a\x1b[2J\nb\ud800 é")
    assert capsys.readouterr().out == "a\\x1b[2J\\nb\\ud800 é\n"


def test_json_is_readable_and_has_no_control_characters() -> None:
    value = {"é": "a\x1b\x7f\x9b\ud800語"}
    assert json_line(value) == '{"é": "a\\u001b\\u007f\\u009b\\ud800語"}'
    assert json.loads(json_line(value)) == value
