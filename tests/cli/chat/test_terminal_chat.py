"""A conversation on a pseudo-terminal: markdown, messages of several lines, the status line, keys during an answer."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quengine.cli.chat.input import joined
from quengine.cli.main import run
from tests.cli.chat.chat_terminal import COMMON, READY, TAKEN, Terminal, chat
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

BOLD = 'root ::= "**Hello**"'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=1024)
    return str(write_tiny(tmp_path_factory.mktemp("chat") / "tiny.gguf", kind="Q8_0", sizes=sizes))


@pytest.fixture
def opened(model: str, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    terminals = []

    def opened(*flags: str, cursor: bool = False) -> Terminal:
        terminals.append(Terminal(tmp_path, *chat(model, *flags), cursor=cursor))
        return terminals[-1]

    yield opened
    for terminal in terminals:
        terminal.close()


def test_markdown_is_rendered_and_is_not_where_that_is_switched_off(
    opened: Callable[..., Terminal],
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = opened("--grammar", BOLD)
    terminal.line("hi")
    terminal.wait_for(b"\x1b[1mHello\x1b[0m")
    terminal = opened("--grammar", BOLD, "--no-markdown")
    terminal.line("hi")
    terminal.wait_for(b"**Hello**")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert run(["chat", "-m", model, *COMMON, "--grammar", BOLD]) == 0
    assert capsys.readouterr().out == "**Hello**\n"


def test_a_message_of_several_lines_is_one(opened: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = opened("-n", "4")
    terminal.wait_for(READY)
    terminal.type(b"one\x1b\rtwo\r")  # Alt-Enter
    terminal.wait_for(TAKEN)
    terminal.wait_for(READY)
    terminal.type(b'"""/three\rfour"""\r')
    terminal.wait_for(TAKEN)
    terminal.line(f"/save {tmp_path / 'talk.json'}")
    terminal.wait_for(b"saved 4 messages")
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [each["content"] for each in messages[::2]] == ["one\ntwo", "/three\nfour"]


def test_blocks_are_joined_in_a_pipe_too() -> None:
    lines = ["a", '"""', "b", "", '/c"""', '"""d"""', '"""e', "f"]
    assert list(joined(iter(lines))) == ["a", "b\n\n/c", "d", "e\nf"]


def test_the_status_line_has_tokens_and_speed(opened: Callable[..., Terminal]) -> None:
    terminal = opened("-n", "8", cursor=True)
    terminal.wait_for(b"0 of 1024 tokens (0%)")
    terminal.type(b"hi\r")
    terminal.wait_for(TAKEN)
    terminal.wait_for(b" of 1024 tokens (")
    terminal.wait_for(b" tok/s")


def test_what_is_typed_during_an_answer_waits_for_the_next_prompt(opened: Callable[..., Terminal]) -> None:
    terminal = opened("-n", "300", "--no-markdown")
    terminal.line("hi")
    terminal.wait_for_bytes(20)
    terminal.type(b"/nonsense\r")
    answer = terminal.at
    terminal.wait_for(READY)
    assert b"/nonsense" not in terminal.seen[answer : terminal.at]
    terminal.wait_for(b"error: no command /nonsense")
