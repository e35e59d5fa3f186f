"""`--session`: written after each exchange, resumed, listed; names and paths."""

import io
import json
import sys
from pathlib import Path

import pytest

from quengine.cli.chat.prompt import CommandCompleter
from quengine.cli.chat.session_file import session_path
from quengine.cli.main import run
from tests.cli.chat.chat_terminal import COMMON, READY, Terminal, chat
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=1024)
    return str(write_tiny(tmp_path_factory.mktemp("chat") / "tiny.gguf", kind="Q8_0", sizes=sizes))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "quengine" / "sessions"


@pytest.fixture
def talk(model: str, monkeypatch: pytest.MonkeyPatch):
    def talk(session: str, *lines: str, flags: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        command = ["chat", "-m", model, *COMMON, "-n", "5", "--ignore-eos", *flags]
        return run([*command, *(["--session", session] if session else [])])

    return talk


def said(path: Path) -> list[str]:
    messages = json.loads(path.read_text())["messages"]
    return [each["content"] for each in messages if each["role"] != "assistant"]


def test_a_named_session_is_kept_for_the_user_alone_and_resumed(talk, state: Path, capsys: Captured) -> None:
    assert talk("trip", "hello", "/system be kind") == 0
    assert [path.name for path in state.iterdir()] == ["trip.json"]
    assert state.stat().st_mode & 0o077 == 0
    assert talk("trip", "more", "/sessions") == 0
    err = capsys.readouterr().err
    assert "resumed" in err and "3 messages, the last one of yours: hello" in err
    assert "trip" in err.split("/sessions")[-1] and "5 messages  hello" in err
    assert said(state / "trip.json") == ["be kind", "hello", "more"]
    assert talk("trip", "/undo", flags=("--system", "be terse")) == 0
    assert said(state / "trip.json") == ["be terse", "hello"]


def test_a_path_is_a_file_and_a_session_that_says_nothing_leaves_none(
    talk, tmp_path: Path, state: Path
) -> None:
    path = tmp_path / "talk.json"
    assert talk(str(path), "/help") == 0
    assert not path.exists() and not state.exists()
    assert talk(str(path), "hello") == 0
    assert said(path) == ["hello"]


def test_a_session_that_cannot_be_kept_is_refused_before_it_begins(
    talk, tmp_path: Path, capsys: Captured
) -> None:
    assert talk(str(tmp_path / "none" / "talk.json"), "hello") == 1
    folder = tmp_path / "none"
    assert f"there is no folder {folder}; make it with mkdir -p {folder}" in capsys.readouterr().err
    (tmp_path / "text.json").write_text("hello")
    assert talk(str(tmp_path / "text.json"), "hello") == 1
    assert "is not a saved conversation" in capsys.readouterr().err
    assert (tmp_path / "text.json").read_text() == "hello"


def test_a_loaded_session_goes_on_in_its_own_file(talk, state: Path) -> None:
    assert talk("", "one", "/save a") == 0
    assert talk("b", "two", "/load a", "three", "/save", "/save c") == 0
    assert said(state / "a.json") == said(state / "c.json") == ["one", "three"]
    assert said(state / "b.json") == ["two"]


def test_a_saved_file_that_is_none_is_listed_with_what_is_wrong(talk, state: Path, capsys: Captured) -> None:
    assert talk("", "/sessions") == 0
    assert "no session is kept" in capsys.readouterr().err
    state.mkdir(parents=True)
    (state / "broken.json").write_text("{}")
    assert talk("", "/sessions") == 0
    assert 'it has no list "messages"' in capsys.readouterr().err


def test_names_are_completed_and_paths_are_told_from_names(state: Path) -> None:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    assert session_path("my trip") == state / "my trip.json"
    for path in ("a.json", "./trip", "/tmp/trip"):
        assert session_path(path) == Path(path)
    state.mkdir(parents=True)
    (state / "trip.json").write_text("{}")
    found = CommandCompleter().get_completions(Document("/load tr"), CompleteEvent())
    assert [each.text for each in found] == ["trip"]


def test_what_was_answered_is_kept_when_the_program_is_killed(
    model: str, tmp_path: Path, state: Path
) -> None:
    terminal = Terminal(tmp_path / "state", *chat(model, "-n", "5", "--session", "trip"))
    try:
        terminal.line("hello")
        terminal.wait_for(READY)
        terminal.process.kill()
        assert said(state / "trip.json") == ["hello"]
    finally:
        terminal.close()
