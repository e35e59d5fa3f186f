"""What a terminal shows while a prompt is computed, and lines about a conversation that are wrapped at words."""

import logging
import sys

import pytest

from quengine.cli.progress import ProgressLine, PromptMeter, clear_before
from quengine.cli.terminal import note

Captured = pytest.CaptureFixture[str]


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error, captured, is a terminal of 40 columns."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")


def test_a_long_prompt_is_shown_with_its_rate_and_erased(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    on_terminal(monkeypatch)
    progress = PromptMeter()
    for done in (512, 1024, 3000):
        progress(done, 3000)
    progress.clear()
    _, first, second, third = capsys.readouterr().err.split("prompt: ")
    assert first.startswith("512 of 3000 tokens\r") and second.startswith("1024 of 3000 tokens, ")
    assert " tok/s" in second and third.endswith(" tok/s\r\x1b[K")


def test_a_log_line_takes_its_place(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    on_terminal(monkeypatch)
    line = ProgressLine()
    for shown in ("loading", ""):
        line(shown)
        clear_before(logging.LogRecord("x", logging.WARNING, "", 0, "compiling", None, None))
    assert capsys.readouterr().err.endswith("loading\r\x1b[K\r\x1b[K")


def test_a_short_prompt_is_not(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    on_terminal(monkeypatch)
    progress = PromptMeter()
    progress(0, 20)
    progress.clear()
    assert capsys.readouterr().err == ""


def test_words_of_a_note_are_whole(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    on_terminal(monkeypatch)
    note(
        "a line of more words than fit forty columns, /and/a/path/that/is/longer/than/a/whole/line/by/itself"
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("  ") for line in lines)
    assert all(len(line) < 40 for line in lines[:2]) and lines[2].endswith("itself")
