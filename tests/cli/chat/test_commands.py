"""Commands that answer again, drop, attach and copy; completion of their names; values and checks of `/set`."""

import base64
import io
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from quengine.cli.chat.commands import changed, setting_names, settings_lines
from quengine.cli.chat.prompt import CommandCompleter
from quengine.cli.main import run
from quengine.errors import EngineError
from quengine.models.hub.presets import write_preset
from quengine.request.sampling_params import SamplingParams
from tests.cli.chat.chat_terminal import COMMON, READY, TAKEN, Terminal, chat
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=1024)
    return str(write_tiny(tmp_path_factory.mktemp("chat") / "tiny.gguf", kind="Q8_0", sizes=sizes))


@pytest.fixture
def talk(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs lines through `engine chat` and returns the messages afterwards."""

    def talk(*lines: str, flags: tuple[str, ...] = ("--temp", "1.5", "--seed", "3")) -> list[dict[str, str]]:
        saved = tmp_path / "talk.json"
        monkeypatch.setattr(
            sys, "stdin", io.StringIO("".join(f"{each}\n" for each in (*lines, f"/save {saved}")))
        )
        assert run(["chat", "-m", model, *COMMON, "-n", "8", "--ignore-eos", *flags]) == 0
        messages: list[dict[str, str]] = json.loads(saved.read_text())["messages"]
        return messages

    return talk


def test_regen_gives_another_answer_and_the_same_one_on_every_run(talk) -> None:
    first = talk("hello")
    again = talk("hello", "/regen")
    third = talk("hello", "/regen", "/regen")
    assert [m["role"] for m in third] == ["user", "assistant"]
    assert first[0] == again[0] == third[0] == {"role": "user", "content": "hello"}
    assert len({first[1]["content"], again[1]["content"], third[1]["content"]}) == 3
    assert talk("hello", "/regen") == again


def test_edit_with_text_replaces_the_last_message(talk) -> None:
    messages = talk("one", "two", "/edit three")
    assert [m["content"] for m in messages if m["role"] == "user"] == ["one", "three"]
    assert messages == talk("one", "three")


def test_undo_drops_the_last_exchange(talk, capsys: Captured) -> None:
    assert talk("one", "two", "/undo") == talk("one")
    assert "dropped: two" in capsys.readouterr().err


def test_commands_of_ollama_have_their_names_too(
    talk, model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert talk("/?", "one", "/clear", "two") == talk("two")
    assert "/regen" in capsys.readouterr().err
    for leave in ("/bye", "/quit", "/exit"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{leave}\n/not reached\n"))
        assert run(["chat", "-m", model, *COMMON]) == 0


def test_set_changes_the_next_answer(talk, capsys: Captured) -> None:
    assert talk("/set n 2", "/set temp 0", "hello") == talk("hello", flags=("-n", "2"))
    assert "max_tokens" in capsys.readouterr().err


def test_a_file_is_sent_with_the_next_message(talk, tmp_path: Path, capsys: Captured) -> None:
    notes = tmp_path / "my notes.txt"
    notes.write_text("a ``` fence")
    messages = talk(f"/file '{notes}'", "what is this?", "and now?")
    assert messages[0]["content"] == "my notes.txt:\n````\na ``` fence\n````\n\nwhat is this?"
    assert messages[2]["content"] == "and now?"
    assert "tokens, sent with the next message" in capsys.readouterr().err


@pytest.mark.parametrize("size", [3000, 200_000])
def test_a_file_that_does_not_fit_the_context_is_refused(
    model: str, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "long.txt").write_text("x;" * (size // 2))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/file {tmp_path / 'long.txt'}\n"))
    assert run(["chat", "-m", model, *COMMON]) == 1
    err = capsys.readouterr().err
    assert "cannot attach" in err and err.count("\n") == 1


def completed(text: str) -> list[str]:
    return [each.text for each in CommandCompleter().get_completions(Document(text), CompleteEvent())]


def test_commands_settings_and_paths_are_completed(tmp_path: Path) -> None:
    assert completed("/re") == ["regen", "reset"]
    assert completed("/set top") == ["top_k", "top_p", "top_n_sigma"]
    (tmp_path / "notes.txt").touch()
    assert completed(f"/file {tmp_path}/no") == ["tes.txt"]
    for none in ("hello", "//re", "/set top_k ", "/nonsense x", "/re\nx"):
        assert completed(none) == []


@pytest.fixture
def terminal(model: str, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path, *chat(model, "-n", "8"))
    yield opened
    opened.close()


def test_at_a_terminal_a_message_is_edited_completed_and_copied(terminal: Terminal, tmp_path: Path) -> None:
    terminal.line("hello")
    terminal.line("/edit")
    terminal.wait_for(READY)
    terminal.wait_for(b"hello")
    terminal.type(b" you\r")
    terminal.wait_for(TAKEN)
    terminal.wait_for(READY)
    terminal.type(b"/und")
    terminal.wait_for(b"drop the last message")  # in the menu
    terminal.type(b"\x03")
    terminal.line("/copy")
    terminal.wait_for(b"\x1b]52;c;")
    terminal.wait_for(b"\x07")
    copied = base64.b64decode(terminal.seen[: terminal.at - 1].rpartition(b";")[2]).decode()
    terminal.line(f"/save {tmp_path / 'talk.json'}")
    terminal.wait_for(b"saved 2 messages")
    user, assistant = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert user["content"] == "hello you" and assistant["content"] == copied


def test_model_goes_on_with_another_or_with_the_one_before(
    talk, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_preset("short", {"model": model, "ctx_size": 256, "max_tokens": 3, "system": "be brief"})
    messages = talk("hello", "/model short", "and?", "/model")
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    err = capsys.readouterr().err
    assert "the conversation of 2 messages goes on with short" in err and "context 256 tokens" in err
    assert messages[1:3] == talk("hello")

    bare = write_tiny(tmp_path / "bare.gguf", changes={"tokenizer.chat_template": None})
    lines = f"/model {bare}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert run(["chat", "-m", model, *COMMON]) == 1
    assert "has no chat template" in capsys.readouterr().err


def test_an_image_is_refused_in_one_line(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/image cat.png\n"))
    assert run(["chat", "-m", model, *COMMON]) == 1
    assert "has no projector" in capsys.readouterr().err


def test_models_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_preset("smolly", {"model": "smollm2-135m"})
    document = Document("/model smoll")
    found = [each.text for each in CommandCompleter().get_completions(document, CompleteEvent())]
    assert found[:2] == ["smolly", "smollm2-135m"]


PARAMS = SamplingParams(seed=1)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("temp", "0.3", "temperature", 0.3),
        ("temperature", "0", "temperature", 0.0),
        ("top_k", "5", "top_k", 5),
        ("top-k", "5", "top_k", 5),
        ("--min-p", "0.1", "min_p", 0.1),
        ("n", "20", "max_tokens", 20),
        ("n", "-1", "max_tokens", None),
        ("s", "7", "seed", 7),
        ("ignore_eos", "on", "ignore_eos", True),
        ("stop", "'a b' c", "stop", ("a b", "c")),
        ("logit_bias", "3+1 4-inf", "logit_bias", {3: 1.0, 4: -math.inf}),
    ],
)
def test_a_setting_has_the_names_of_its_flag(name: str, text: str, field: str, value: object) -> None:
    assert getattr(changed(PARAMS, name, text), field) == value


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("top_p", "1.5", "top_p = 1.5: must be a finite number from 0 to 1"),
        ("temp", "nan", "temperature = nan"),
        ("top_k", "many", "/set top_k 'many': must be a whole number"),
        ("ignore_eos", "perhaps", "must be on or off"),
        ("tmp", "1", "no setting tmp; did you mean temp?"),
        ("logit_bias", "x", "must be TOKEN_ID"),
        ("stop", "'a", "No closing quotation"),
    ],
)
def test_values_that_the_flag_refuses_are_refused(name: str, text: str, problem: str) -> None:
    with pytest.raises(EngineError, match=problem.replace("?", "[?]")):
        changed(PARAMS, name, text)


def test_a_seed_of_minus_one_is_drawn_and_an_empty_list_empties() -> None:
    drawn = changed(PARAMS, "seed", "-1").seed
    assert drawn is not None and drawn != 1
    assert changed(changed(PARAMS, "stop", "x"), "stop", '""').stop == ()


def test_every_setting_is_listed_as_it_would_be_typed() -> None:
    lines = settings_lines(PARAMS)
    assert [line.split()[0] for line in lines] == setting_names()
    values = {line.split()[0]: re.split(" {2,}", line)[1] for line in lines}
    assert values["max_tokens"] == "-1" and values["temp"] == "0.8" and values["stop"] == '""'
    for name, value in values.items():
        assert changed(PARAMS, name, value) == PARAMS, name
    assert len(settings_lines(PARAMS, "top-p")) == 1
