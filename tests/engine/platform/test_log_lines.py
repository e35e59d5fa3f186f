"""Lines of the log: one each, errors with their causes, nothing that a terminal obeys."""

import logging
import sys

import pytest

from quengine.platform.log_lines import OneLine, Seldom


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("quengine", logging.ERROR, "", 0, message, args, sys.exc_info())


def failed() -> logging.LogRecord:
    try:
        try:
            raise ValueError("no such\nkey")
        except ValueError as error:
            raise RuntimeError("the table is gone") from error
    except RuntimeError:
        return record("GET %s failed", "/x")


def test_an_error_is_told_with_its_causes_in_one_line() -> None:
    expected = (
        "engine: error: GET /x failed: RuntimeError: the table is gone, caused by ValueError: no such key"
    )
    assert OneLine().format(failed()) == expected


def test_with_v_its_traceback_follows() -> None:
    first, *rest = OneLine(tracebacks=True).format(failed()).splitlines()
    assert first == OneLine().format(failed())
    assert any("test_log_lines.py" in line for line in rest)


def test_a_terminal_gets_no_control_characters_and_no_end_of_line() -> None:
    line = OneLine().format(record("a\x1b]0;title\x07\n\rengine: error: b%s", "\u202e"))
    assert line == "engine: error: a\\x1b]0;title\\x07 engine: error: b\\u202e"


def test_a_line_has_an_end() -> None:
    assert len(OneLine().format(record("x" * 10**6))) < 2100


def test_a_warning_that_comes_often_is_logged_seldom_with_its_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    often = Seldom(logging.getLogger("quengine.test"), seconds=3600)
    for _ in range(1000):
        often.warning("full")
    often._again_at = 0.0
    often.warning("full")
    assert [r.getMessage() for r in caplog.records] == ["full", "full (999 such warnings were left out)"]
