"""`engine run`: one answer or a conversation, and the offer to pull what is not here."""

import hashlib
import os
import sys
from pathlib import Path

import pytest

from quengine.cli import loading
from quengine.cli.main import run
from tests.cli.chat.chat_terminal import COMMON, Terminal
from tests.gguf_builder import ModelSizes
from tests.hub_server import Hub, serve_hub
from tests.tiny_models import write_tiny

Captured = pytest.CaptureFixture[str]
FLAGS = [*COMMON, "--ignore-eos", "-n", "5"]
REPO, FILE = "someone/Tiny-GGUF", "Tiny-Q8_0.gguf"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=256)
    return str(write_tiny(tmp_path_factory.mktemp("run") / "tiny.gguf", kind="Q8_0", sizes=sizes))


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Standard input is a pipe with this text, which the writer has closed."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    monkeypatch.setattr(sys, "stdin", os.fdopen(reader, encoding="utf-8"))


def test_a_prompt_gets_the_answer_that_generate_gives(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    pipe(monkeypatch, "")
    assert run(["run", model, "hello", "there", *FLAGS, "--system", "be kind"]) == 0
    answer = capsys.readouterr()
    assert "tok/s" in answer.err and "peak memory" not in answer.err
    pipe(monkeypatch, "")
    assert run(["generate", "-m", model, "hello there", *FLAGS, "--system", "be kind"]) == 0
    assert capsys.readouterr().out == answer.out
    pipe(monkeypatch, "hello\n")
    assert run(["run", model, "there", *FLAGS, "--verbose"]) == 0
    piped = capsys.readouterr()
    assert "peak memory" in piped.err
    assert run(["generate", "-m", model, "hello\n\nthere", *FLAGS]) == 0
    assert capsys.readouterr().out == piped.out


def test_what_cannot_be_answered_is_one_line(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for arguments, problem in (
        ([model], "no prompt: give one after the model's name"),
        ([model, "hi", "--session", "trip"], "leave the PROMPT out"),
        (["hf.co/someone/Tiny-GGUF:Q8_0", "hi"], "engine pull hf:someone/Tiny-GGUF:Q8_0"),
    ):
        pipe(monkeypatch, "")
        assert run(["run", *arguments, *COMMON]) == 1
        err = capsys.readouterr().err
        assert problem in err and err.count("\n") == 1


def test_without_a_prompt_it_is_a_conversation(model: str, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "run", model, *FLAGS)
    try:
        terminal.line("hello")
        terminal.line("/exit")
        assert terminal.process.wait(120) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("command", [["run"], ["chat", "-m"]])
def test_a_model_that_is_not_here_is_pulled_when_the_user_agrees(
    model: str, command: list[str], tmp_path: Path
) -> None:
    with serve_hub(Hub(files={REPO: {FILE: Path(model).read_bytes()}})) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}
        terminal = Terminal(tmp_path, *command, f"hf:{REPO}:Q8_0", *FLAGS, environment=environment)
        try:
            terminal.wait_for(b"is not on this machine. Pull it? [Y/n]")
            terminal.type(b"\r")
            terminal.line("hello")
            digest = hashlib.sha256(Path(model).read_bytes()).hexdigest()
            assert list((tmp_path / "hf").rglob(digest))
        finally:
            terminal.close()


def test_a_pull_that_is_declined_is_the_error_of_a_model_that_is_not_here(tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    terminal = Terminal(tmp_path, "run", f"hf:{REPO}:Q8_0", environment=environment)
    try:
        terminal.wait_for(b"Pull it? [Y/n]")
        terminal.type(b"n\r")
        terminal.wait_for(b"fetch it with: engine pull hf:someone/Tiny-GGUF:Q8_0")
        assert terminal.process.wait(120) == 1
    finally:
        terminal.close()


def test_names_of_models_that_are_here_ask_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "fetch", lambda *_: pytest.fail("fetched"))
    loading.offer_pull(model)
