"""`engine tokenize`: vocabulary-only files, plain and JSON output, standard input, errors."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from quengine.cli.main import run
from tests.gguf_builder import GGUFBuilder, bpe_vocabulary


@pytest.fixture
def model(tmp_path: Path) -> str:
    values = bpe_vocabulary(special=("<s>", "<|im_end|>")) | {"tokenizer.ggml.add_bos_token": True}
    return str(GGUFBuilder().kv("general.architecture", "llama").kvs(values).write(tmp_path / "vocab.gguf"))


def output(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert run(["tokenize", *args]) == 0
    return capsys.readouterr().out


def test_each_token_is_a_line_with_its_id_and_piece(capsys: pytest.CaptureFixture[str], model: str) -> None:
    lines = output(capsys, "-m", model, "é the\n").splitlines()
    assert [line.split(None, 1)[1] for line in lines] == ["<s>  (control)", "<C3>", "<A9>", "' the'", r"'\n'"]
    assert lines[0].split()[0] == "259"


def test_json_has_ids_and_pieces_bytes_where_they_are_part_of_a_character(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    found = json.loads(output(capsys, "--json", "-m", model, "the é"))
    assert found["pieces"] == ["<s>", "the", " ", [0xC3], [0xA9]]
    assert (found["count"], found["ids"][:2]) == (5, [259, 256 + 1])


def test_bos_can_be_left_out(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert json.loads(output(capsys, "-m", model, "--json", "--no-bos", "the"))["ids"] == [257]


def test_names_of_control_tokens_are_text_unless_asked(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    plain = json.loads(output(capsys, "-m", model, "--json", "--no-bos", "<|im_end|>"))
    special = json.loads(output(capsys, "-m", model, "--json", "--no-bos", "--special", "<|im_end|>"))
    assert (plain["count"], special["ids"]) == (10, [260])


def test_a_dash_reads_standard_input_byte_by_byte(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"a\xffb\r\n")))
    pieces = json.loads(output(capsys, "-m", model, "--json", "--no-bos", "-"))["pieces"]
    raw = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces)
    assert raw.decode() == "a\ufffdb\r\n"


def test_what_is_no_output_goes_to_standard_error(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert run(["tokenize", "-m", model, "--no-bos", "the"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("    257  'the'\n", "1 token\n")


@pytest.mark.parametrize("args", [["-m", "nowhere.gguf", "x"], ["x"], ["-m", "nowhere.gguf"]])
def test_what_is_missing_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert run(["tokenize", *args]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "error" in captured.err and "Traceback" not in captured.err


def test_a_file_with_an_unknown_tokenizer_is_one_line_and_exit_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    values = bpe_vocabulary(pre="gpt-9")
    path = GGUFBuilder().kv("general.architecture", "llama").kvs(values).write(tmp_path / "v.gguf")
    assert run(["tokenize", "-m", str(path), "x"]) == 1
    assert "'gpt-9' is not supported" in capsys.readouterr().err


def test_token_names_from_a_file_do_not_command_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    values = bpe_vocabulary(special=("<\x1b[2J\x9b>",))
    path = GGUFBuilder().kv("general.architecture", "llama").kvs(values).write(tmp_path / "vocab.gguf")
    shown = output(capsys, "-m", str(path), "--special", "<\x1b[2J\x9b>")
    assert "<\\x1b[2J\\x9b>  (control)" in shown and "\x1b" not in shown
