"""`engine chat`: piped and at a terminal, its commands, and what Ctrl-C does."""

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quengine.cli.main import run
from tests.cli.chat.chat_terminal import COMMON, READY, TAKEN, Terminal, chat
from tests.gguf_builder import ModelSizes
from tests.tiny_models import HARMONY_MARKS, chat_vocabulary, harmony_vocabulary, write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=4096)
    return str(write_tiny(tmp_path_factory.mktemp("chat") / "tiny.gguf", kind="Q8_0", sizes=sizes))


def talk(monkeypatch: pytest.MonkeyPatch, model: str, *lines: str, flags: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return run(["chat", "-m", model, *COMMON, "-n", "5", "--ignore-eos", *flags])


Captured = pytest.CaptureFixture[str]


def test_answers_go_to_stdout_and_all_else_to_stderr(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert talk(monkeypatch, model, "hello", "/stats", "", "more") == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n") and "tok/s" not in captured.out
    assert "from the cache" not in captured.err.split("context 4096")[0]
    assert "cut at -n 5" in captured.err
    assert "of 4096 tokens used" in captured.err


def test_piped_bytes_that_are_no_text_are_a_user_error(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    assert run(["chat", "-m", model, *COMMON]) == 1
    assert "cannot read standard input: not utf-8, byte 0xe9\n" in capsys.readouterr().err


def test_a_pipe_without_a_message_says_so(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert talk(monkeypatch, model, "", " ") == 0
    captured = capsys.readouterr()
    assert "no message came from standard input" in captured.err and not captured.out


def test_the_second_turn_is_mostly_cached(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert talk(monkeypatch, model, "hello there, " * 7, "more", "/stats") == 0
    match = re.search(r"prompt +(\d+) tokens \((\d+) from the cache\)", capsys.readouterr().err)
    assert match is not None
    prompt, cached = map(int, match.groups())
    assert 0 < prompt - cached < prompt / 2


def test_piped_answers_repeat_with_the_same_seed(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    texts = []
    for seed in ("3", "3", "4"):
        flags = ("--temp", "1.5", "--seed", seed, "-n", "20")
        assert talk(monkeypatch, model, "hello", "more", flags=flags) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_commands_change_the_conversation(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    first, second = tmp_path / "first talk.json", tmp_path / "second.json"
    lines = [
        "/system be kind",
        "hello",
        f"/save '{first}'",
        "/reset",
        "//etc/hosts is a file",
        f"/save {second}",
        f"/load '{first}'",
        "/system",
        "/help",
        "/exit",
        "never asked",
    ]
    assert talk(monkeypatch, model, *lines) == 0
    one, two = (json.loads(path.read_text())["messages"] for path in (first, second))
    assert [m["role"] for m in one] == ["system", "user", "assistant"]
    assert two[:2] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "/etc/hosts is a file"},
    ]
    err = capsys.readouterr().err
    for said in ("saved 3 messages", "loaded 3 messages", "system message: be kind", "/stats", "cleared"):
        assert said in err


def test_system_flag_and_removal(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    lines = ["/system", '/system ""', "/system", f"/save {tmp_path / 'talk.json'}", "/stats"]
    assert talk(monkeypatch, model, *lines, flags=("--system", "be terse")) == 0
    err = capsys.readouterr().err
    assert err.count("no system message") == 2 and "system message: be terse" in err
    assert "no answer yet" in err
    assert json.loads((tmp_path / "talk.json").read_text())["messages"] == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/nonsense", "no command /nonsense; /help lists them"),
        ("/sytem x", "no command /sytem; did you mean /system?"),
        ("/undo", "the conversation has no message yet"),
        ("/regen", "the conversation has no message yet"),
        ("/edit", "the conversation has no message yet"),
        ("/copy", "no answer yet"),
        ("/file", "/file needs one file name"),
        ("/file /no/such/file", "cannot attach /no/such/file: No such file"),
        ("/set nonsense 1", "no setting nonsense; /set lists them"),
        ("/save", "/save needs one file name"),
        ("/load a b", "/load needs one file name"),
        ("/load 'a", "/load 'a: No closing quotation"),
        ("/load /no/such/file", "cannot load /no/such/file"),
        ("word " * 5000, "the context holds 4096"),
    ],
)
def test_an_error_in_piped_input_is_one_line_and_exit_code_1(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured, line: str, problem: str
) -> None:
    assert talk(monkeypatch, model, line, "never asked") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert problem in captured.err and captured.err.count("\n") == 1


def test_a_full_context_says_so(model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert talk(monkeypatch, model, "hello", flags=("-c", "48", "-n", "-1")) == 0
    assert "the context is full; /reset begins anew" in capsys.readouterr().err


def test_an_empty_answer_says_so(model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    end = chat_vocabulary()["tokenizer.ggml.eos_token_id"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert run(["chat", "-m", model, *COMMON, "--logit-bias", f"{end}+1e6"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n"
    assert "no answer; the message is dropped" in captured.err


def test_a_model_without_a_template_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    bare = str(write_tiny(tmp_path / "bare.gguf", changes={"tokenizer.chat_template": None}))
    assert talk(monkeypatch, bare, "hello") == 1
    assert "bare.gguf has no chat template, so it cannot chat" in capsys.readouterr().err


@pytest.fixture
def terminal(model: str, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path, *chat(model))
    yield opened
    opened.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for(READY)
    terminal.type(b"hello\r")
    terminal.wait_for(TAKEN)
    terminal.wait_for_bytes(20)  # the answer has begun; at 4,000 tokens it is far from its end
    terminal.type(b"\x03")
    terminal.wait_for(b"stopped")
    terminal.wait_for(READY)
    terminal.type(b"\x03")  # at the prompt
    terminal.wait_for(b"Ctrl-D or /exit leaves")
    terminal.wait_for(READY)
    terminal.type(b"/nonsense\r")
    terminal.wait_for(b"error: no command /nonsense")
    terminal.wait_for(READY)
    terminal.type(f"/save {tmp_path / 'talk.json'}\r".encode())
    terminal.wait_for(b"saved 2 messages")
    terminal.wait_for(READY)
    terminal.type(b"\x04")
    assert terminal.process.wait(120) == 0
    history = tmp_path / "quengine" / "chat_history"
    assert "+hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_the_conversation_goes_on_after_ctrl_c(terminal: Terminal, tmp_path: Path) -> None:
    """The key reaches every process of the terminal, also the one that renders the template."""
    terminal.wait_for(READY)
    terminal.type(b"hello\r")
    terminal.wait_for(TAKEN)
    terminal.wait_for_bytes(20)
    terminal.type(b"\x03")
    terminal.wait_for(b"stopped")
    terminal.wait_for(READY)
    terminal.type(b"again\r")
    terminal.wait_for(TAKEN)
    terminal.wait_for_bytes(20)
    terminal.type(b"\x03")
    terminal.wait_for(b"stopped")
    terminal.wait_for(READY)
    terminal.type(f"/save {tmp_path / 'talk.json'}\r".encode())
    terminal.wait_for(b"saved 4 messages")


def test_every_answer_is_held_to_the_grammar(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand now?\n"))
    assert run(["chat", "-m", model, "--device", "cpu", "--grammar", 'root ::= "yes" | "no"']) == 0
    assert set(capsys.readouterr().out.split()) <= {"yes", "no"}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A model that answers as gpt-oss does, and flags by which it thinks a little before a text that is held."""
    words = harmony_vocabulary()
    tokens = words["tokenizer.ggml.tokens"]
    sizes = ModelSizes(embedding=64, feed_forward=128, context=4096)
    path = tmp_path_factory.mktemp("thinker") / "tiny.gguf"
    write_tiny(path, kind="Q8_0", sizes=sizes, vocabulary=words)
    flags = ["--temp", "1", "--seed", "1", "-n", "300", "--grammar", 'root ::= "Hello."']
    for token in ("a", "<|end|>"):
        flags += ["--logit-bias", f"{tokens.index(token)}+30"]
    return str(path), flags


def test_what_a_model_thinks_is_no_part_of_its_answer(
    thinker: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    model, flags = thinker
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"hi\nagain\n/save {tmp_path / 'talk.json'}\n"))
    assert run(["chat", "-m", model, *COMMON, *flags, "--reasoning-effort", "low"]) == 0
    assert capsys.readouterr().out == "Hello.\nHello.\n"
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["content"] for m in messages] == ["hi", "Hello.", "again", "Hello."]
    command = ["generate", "-m", model, *COMMON, *flags, "hi"]
    assert run([*command, "--show-prompt", "--reasoning-effort", "high"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello.\n" and "Reasoning: high" in captured.err
    assert run([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == "Hello." and result["reasoning"]
    assert not any(mark in result["reasoning"] for mark in HARMONY_MARKS)


def test_a_reasoning_effort_that_the_template_does_not_take_is_an_error(
    thinker: tuple[str, list[str]], model: str, capsys: Captured
) -> None:
    for name, problem in (
        (thinker[0], "reasoning effort much: the chat template of this model takes low, medium, high"),
        (model, "reasoning effort much: the chat template of this model has no reasoning effort"),
    ):
        assert run(["generate", "-m", name, *COMMON, "--reasoning-effort", "much", "hi"]) == 1
        assert problem in capsys.readouterr().err
    assert run(["generate", "-m", model, *COMMON, "--raw", "--reasoning-effort", "low", "hi"]) == 1
    assert "--reasoning-effort needs a chat template" in capsys.readouterr().err
