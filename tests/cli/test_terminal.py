"""Generated text on a terminal cannot command it; in a pipe it is untouched."""

import io

import pytest

from quengine.cli.terminal import visible, write_text


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
