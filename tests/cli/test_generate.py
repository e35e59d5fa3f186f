"""`engine generate`: where text and everything else go, what the flags mean, how it fails."""

import io
import json
import os
import re
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from gguf import GGUFReader

from quengine.cli.commands import generate
from quengine.cli.main import run
from quengine.models.synthetic.synthetic import write_synthetic
from tests import quick_python
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

COMMON = ["--device", "cpu", "--temp", "0", "-n", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=64, feed_forward=128)
    return str(write_tiny(tmp_path_factory.mktemp("generate") / "tiny.gguf", kind="Q8_0", sizes=sizes))


@pytest.fixture(scope="module")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a chat template."""
    path = tmp_path_factory.mktemp("generate") / "bare.gguf"
    return str(write_tiny(path, changes={"tokenizer.chat_template": None}))


def as_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    assert run(["generate", *args, *COMMON, "--json"]) == 0
    loaded = json.loads(capsys.readouterr().out)
    assert isinstance(loaded, dict)
    return loaded


def test_text_goes_to_stdout_and_the_report_to_stderr(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", model, "the", *COMMON, "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert "tok/s" not in captured.out
    for word in (
        "prompt",
        "generated  6 tokens",
        "ms/token",
        "first token",
        "load",
        "peak memory",
        "GB/s",
        "cpu",
    ):
        assert word in captured.err


LINE = (
    r"\n  6 tokens, [\d.]+ tok/s, first token after [\d.]+ s"
    r"( \([\d.]+ s of it for compiling kernels, once\))?; (.*)\n"
)


def test_the_report_is_a_line_unless_more_is_asked_for(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["generate", "-m", model, "the", *COMMON]) == 0
    line = re.fullmatch(LINE, capsys.readouterr().err)
    assert line is not None and line[2] == "cut at -n 6"
    assert run(["-v", "generate", "-m", model, "the", *COMMON]) == 0
    assert "peak memory" in capsys.readouterr().err
    monkeypatch.setattr("quengine.kernels.compile_clock.seconds", iter([0, 2.5, *[2.5] * 100]).__next__)
    assert run(["generate", "-m", model, "the", *COMMON]) == 0
    assert "(2.5 s of it for compiling kernels, once)" in capsys.readouterr().err


def test_why_an_answer_ended_is_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def why(*flags: str) -> str:
        assert run(["generate", "-m", model, "the", "--device", "cpu", "--temp", "0", *flags]) == 0
        return capsys.readouterr().err.rpartition("; ")[2].strip()

    assert why("-n", "6", "--ignore-eos") == "cut at -n 6"
    full = "cut: the context of {} tokens is full ({})"
    assert why("--raw", "-c", "32", "--ignore-eos") == full.format(32, "-c takes up to 128")
    assert why("--raw", "-c", "0", "--ignore-eos") == full.format(128, "the model's own maximum")
    assert why("-j", '{"const": 1}') == "ended by the model"
    assert (
        why("-n", "6", "--ignore-eos", "--logit-bias", "97+100", "--stop", "aa")
        == "ended by the model or a stop string"
    )


def test_one_token_has_no_speed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", model, "the", "--temp", "0", "-n", "1", "--stats"]) == 0
    report = capsys.readouterr().err
    assert "generated  1 token in 0.00 s; cut at -n 1" in report
    assert " 0.0 tok/s" not in report and "0.0 GB/s" not in report


def test_a_mixture_of_experts_reports_how_much_of_it_is_active(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_synthetic(tmp_path / "experts.gguf", "mixtral-tiny")
    args = ["-m", str(path), "--raw", "the"]
    assert run(["generate", *args, *COMMON, "--stats"]) == 0
    assert (
        "experts    2 of 8 a token and layer; 5.52 M of 14.95 M parameters are active"
        in capsys.readouterr().err
    )
    found = as_json(capsys, *args)["model_size"]
    assert isinstance(found, dict) and (found["experts"], found["experts_used"]) == (8, 2)
    assert found["active_bytes"] < found["nbytes"] and found["active_parameters"] < found["parameters"]


def test_verbose_says_what_is_done(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-c", "64", "-t", "1", "--draft-ngram", "2"]
    assert run(["-v", "generate", "-m", model, "the", *COMMON, *options, "--no-stats"]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert all(line.startswith("engine: ") for line in lines)
    said = captured.err.replace("engine: info: ", "")
    types = Counter(tensor.tensor_type.name for tensor in GGUFReader(model).tensors)
    counts = ", ".join(f"{count} {name}" for name, count in types.most_common())
    for wanted in (
        rf"^model {re.escape(model)}: .*, llama, 2 layers, .* million weights in .*; tensors: {counts}$",
        r"^device cpu: .+; .* GiB of memory free$",
        r"^context 64 tokens, cache .* \(f16\), weights .* MiB$",
        r"^drafts by look-up of up to 2 tokens",
        r"^loaded in \d+\.\d\d s: cpu backend, 1 threads, up to \d+ tokens of a prompt at once$",
        r"^tokenizer of \d+ tokens, chat template of \d+ characters$",
        r"^request of \d+ tokens \(0 from the cache\): .* s; 6 generated, .* tok/s; ended by length$",
    ):
        assert re.search(wanted, said, re.MULTILINE), (wanted, said)
    assert run(["generate", "-m", model, "the", *COMMON, *options, "--no-stats"]) == 0
    assert (capsys.readouterr().err, captured.out) == ("", captured.out)


def test_no_stats_leaves_stderr_empty(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", model, "the", *COMMON, "--no-stats"]) == 0
    assert capsys.readouterr().err == ""


def test_logprobs_are_a_line_for_each_token(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = as_json(capsys, "-m", model, "the", "--logprobs", "2")["logprobs"]
    assert isinstance(tokens, list)
    assert run(["generate", "-m", model, "the", *COMMON, "--logprobs", "2", "--no-stats"]) == 0
    title, *lines = capsys.readouterr().err.strip().splitlines()
    assert title.startswith("logprobs")
    numbers = [[float(part) for part in re.findall(r"(-?\d+\.\d{4}) '", line)] for line in lines]
    assert numbers == [
        [round(each["logprob"], 4), *(round(top["logprob"], 4) for top in each["top"])] for each in tokens
    ]


def test_json_has_every_documented_field_and_the_same_text(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = as_json(capsys, "-m", model, "the", "--logprobs", "2")
    assert result.keys() >= {
        "text",
        "tokens",
        "prompt_tokens",
        "finish_reason",
        "logprobs",
        "timings",
        "model",
        "device",
    }
    timings = result["timings"]
    assert isinstance(timings, dict)
    assert timings.keys() >= {
        *("load_s", "prompt_s", "ttft_s", "decode_s", "prompt_tok_s", "decode_tok_s", "gb_s", "peak_bytes"),
    }
    assert run(["generate", "-m", model, "the", *COMMON]) == 0
    assert capsys.readouterr().out == f"{result['text']}\n"


def test_every_way_to_give_the_prompt_means_the_same(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    file = tmp_path / "prompt.txt"
    file.write_text("the cat\n")
    outcomes = [
        as_json(capsys, "-m", model, "the cat")["tokens"],
        as_json(capsys, "-m", model, "-p", "the cat")["tokens"],
        as_json(capsys, "-m", model, "-f", str(file))["tokens"],
    ]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n")))
    outcomes.append(as_json(capsys, "-m", model, "-")["tokens"])
    assert all(tokens == outcomes[0] for tokens in outcomes)


def piped(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is a pipe with these bytes, which the writer has closed."""
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    monkeypatch.setattr("sys.stdin", os.fdopen(reader, encoding="utf-8"))


@pytest.mark.parametrize("form", ["argument", "-p", "-f", "none"])
def test_what_is_piped_in_comes_before_the_prompt(
    form: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("the cat\n")
    given = {"argument": ["the cat"], "-p": ["-p", "the cat"], "-f": ["-f", str(file)], "none": []}[form]
    whole = "some notes\nof mine" if form == "none" else "some notes\nof mine\n\nthe cat"
    piped(b"some notes\r\nof mine\n", monkeypatch)
    args = ["generate", "-m", model, "--raw", "--show-prompt", "--no-stats", *COMMON]
    assert run([*args, *given]) == 0
    assert capsys.readouterr().err == f"{whole}\n"


@pytest.mark.parametrize("form", [["-"], ["-p", "-"], ["-f", "-"]])
def test_a_dash_is_standard_input_alone(
    form: list[str], model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped(b"the cat\n", monkeypatch)
    assert run(["generate", "-m", model, "--raw", "--show-prompt", "--no-stats", *COMMON, *form]) == 0
    assert capsys.readouterr().err == "the cat\n"


def test_a_pipe_that_is_empty_leaves_the_prompt_as_it_is_typed(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["generate", "-m", model, "--raw", "--show-prompt", "--no-stats", *COMMON]
    piped(b"", monkeypatch)
    assert run([*args, "the cat"]) == 0
    assert capsys.readouterr().err == "the cat\n"
    piped(b"", monkeypatch)
    assert run(args) == 1
    assert "no prompt" in capsys.readouterr().err
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert run([*args, "the cat"]) == 0
    assert capsys.readouterr().err == "the cat\n"


def test_a_prompt_that_is_empty_or_no_text_is_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped(b"", monkeypatch)
    (tmp_path / "none.txt").touch()
    assert run(["generate", "-m", model, "-f", str(tmp_path / "none.txt")]) == 1
    assert f"-f {tmp_path / 'none.txt'}: the file is empty: give one" in capsys.readouterr().err
    assert run(["generate", "-m", model, "caf\udce9"]) == 1
    assert "the prompt has the byte 0xE9 at position 3, which is no UTF-8" in capsys.readouterr().err


def test_an_answer_without_a_token_says_why(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", model, "--raw", "the", "-n", "0"]) == 0
    assert capsys.readouterr().err.strip() == "0 tokens; cut at -n 0"
    assert run(["generate", "-m", model, "--raw", "the", "--grammar", 'root ::= ""']) == 0
    assert capsys.readouterr().err.strip().endswith("; ended by the model")


def test_a_pipe_that_is_no_text_is_an_error_of_one_line(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped(b"\x7fELF\xff\x00", monkeypatch)
    assert run(["generate", "-m", model, "the cat"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "standard input: not UTF-8, byte 0xff at 4" in line


class Lines(io.StringIO):
    """A stream that says when a line is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        size = super().write(text)
        if "\n" in text:
            self.written.set()
        return size


def test_a_pipe_that_keeps_silent_is_told_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_SAID_AFTER", 0.01)
    monkeypatch.setattr("sys.stderr", said := Lines())
    reader, writer = os.pipe()
    monkeypatch.setattr("sys.stdin", os.fdopen(reader, encoding="utf-8"))
    waiting = threading.Thread(target=generate.with_piped, args=("hi",))
    waiting.start()
    said.written.wait(60)
    os.close(writer)  # in any case: a stream that a thread reads cannot be closed
    waiting.join(60)
    assert (
        "waiting for standard input" in said.getvalue() and "`< /dev/null` leaves it out" in said.getvalue()
    )


@pytest.mark.parametrize("given", [[], ["the", "-p", "cat"], ["-p", "a", "-f", "b"]])
def test_the_prompt_is_given_exactly_once(
    model: str, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-m", model, *given]) == 1
    assert "prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["-p", "a", "-p", "b"], "2 prompts (-p 'a', -p 'b')"),
        (["-p", "a", "--prompt", "a"], "2 prompts (-p 'a', -p 'a')"),
        (["-f", "b.txt", "-f", "c.txt"], "2 prompts (-f 'b.txt', -f 'c.txt')"),
        (["the", "-p", "cat", "-f", "b.txt"], "3 prompts ('the', -p 'cat', -f 'b.txt')"),
    ],
)
def test_a_prompt_that_is_given_again_is_named_and_not_dropped(
    model: str, given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-m", model, *given]) == 1
    assert capsys.readouterr().err.startswith(f"engine: error: {says}: give one as an argument")


NO_UTF8 = b"caf\xe9"


def check_no_utf8(status: int, out: bytes, err: bytes) -> None:
    assert status == 1 and out == b""
    assert len(err.splitlines()) == 1 and err.startswith(b"engine: error: ")
    assert re.search(rb"byte 0x[Ee]9 at (position )?3\b", err), err


def test_a_byte_that_is_no_utf8_is_an_error_with_its_position(model: str) -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from quengine.cli.main import run; sys.exit(run(sys.argv[1:]))",
    ]
    args = [*command, "generate", "-m", model, *COMMON, "--backend", "reference"]  # compiles nothing
    env = {**os.environ, "PYTHONUTF8": "1"}
    by_argument = quick_python.run([*args, NO_UTF8], capture_output=True, env=env, timeout=240)
    by_stdin = quick_python.run([*args, "-"], input=NO_UTF8, capture_output=True, env=env, timeout=240)
    for done in (by_argument, by_stdin):
        check_no_utf8(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("prompt", [os.fsdecode(NO_UTF8), "-"], ids=["argument", "standard input"])
def test_nor_is_it_part_of_a_raw_prompt(
    model: str, prompt: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(NO_UTF8), "utf-8", "surrogateescape")  # Python's in UTF-8 mode
    monkeypatch.setattr(sys, "stdin", stdin)
    status = run(["generate", "-m", model, "--raw", *COMMON, "--backend", "reference", prompt])
    check_no_utf8(status, *capsysbinary.readouterr())


def test_show_prompt_prints_the_exact_prompt(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "-m", model, "the", "--system", "be brief", "--show-prompt", "--no-stats", *COMMON]
    assert run(args) == 0
    expected = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    )
    assert capsys.readouterr().err.removesuffix("\n") == expected


def test_raw_uses_the_prompt_as_it_is(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", model, "the", "--raw", "--show-prompt", "--no-stats", *COMMON]) == 0
    assert capsys.readouterr().err == "the\n"


def test_a_model_without_a_template_is_used_raw_and_says_so(
    bare_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-m", bare_model, "the", "--no-stats", *COMMON]) == 0
    assert "no chat template" in capsys.readouterr().err


def test_asking_for_a_template_that_is_not_there_is_an_error(
    bare_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-m", bare_model, "the", "--chat"]) == 1
    assert "no chat template" in capsys.readouterr().err
    assert run(["generate", "-m", bare_model, "the", "--system", "x"]) == 1


def test_user_text_becomes_control_tokens_only_with_special(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = as_json(capsys, "-m", model, "--raw", "<|im_end|>")["prompt_tokens"]
    special = as_json(capsys, "-m", model, "--raw", "--special", "<|im_end|>")["prompt_tokens"]
    assert special == 1
    assert plain == len("<|im_end|>")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--temp", "-1"], 1, "--temp -1.0: must be from 0 to 1000000"),
        (["--top-p", "2"], 1, "--top-p 2.0: must be"),
        (["-ub", "0"], 1, "-ub 0: must be at least 1"),
        (["-c", "100000"], 1, "128"),
        (["--backend", "magic"], 1, "backend"),
        (["--device", "tpu"], 1, "device"),
        (["--logit-bias", "x"], 1, "--logit-bias"),
        (["-n", "-2"], 1, "-n -2: must be from 0 to 2147483647, or -1"),
        (["-t", "0"], 1, "-t 0: must be at least 1"),
        (["--draft-tokens", "4"], 1, "draft_tokens"),
        (["--draft-ngram", "99"], 1, "--draft-ngram 99: must be"),
        (["--draft-model", "none.gguf"], 1, "draft model"),
    ],
)
def test_bad_flags_end_with_one_line(
    model: str, flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-m", model, "the", *flags]) == code
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1


def test_a_prompt_that_does_not_fit_names_both_numbers(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(["generate", "-m", model, "--raw", "a b c d e f g h i j k l m n", "-c", "8", "--device", "cpu"])
        == 1
    )
    error = capsys.readouterr().err
    assert "27 tokens" in error and "holds 8" in error


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", str(tmp_path / "none.gguf"), "the"]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_truncated_model_is_one_line(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(model).read_bytes()[:-1000])
    assert run(["generate", "-m", str(cut), "the"]) == 1
    error = capsys.readouterr().err
    assert "cut.gguf" in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(("cache_type", "size"), [("f16", "2.0 MiB"), ("q8_0", "1.1 MiB")])
def test_the_cache_is_of_the_type_and_size_that_is_said(
    cache_type: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ModelSizes(embedding=128, feed_forward=128, head_dim=32, context=4096)
    wide = str(write_tiny(tmp_path / "wide.gguf", kind="Q8_0", sizes=sizes))
    assert run(["generate", "-m", wide, "the", *COMMON, "--cache-type", cache_type, "--stats"]) == 0
    captured = capsys.readouterr()
    assert f"context 4096 tokens, cache {size} ({cache_type}), weights" in captured.err
    assert len(captured.out) > 1


def test_a_cache_type_that_cannot_be_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", model, "the", *COMMON, "--cache-type", "q5_0"]) == 1
    assert "--cache-type 'q5_0': must be f16 or q8_0 or q4_0" in capsys.readouterr().err
    assert run(["generate", "-m", model, "the", *COMMON, "--cache-type", "q8_0"]) == 1
    assert "this model's is 16; use --cache-type f16" in capsys.readouterr().err


SCHEMA = '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false}'


@pytest.mark.parametrize("flag", ["--json-schema", "-j", "--json-schema-file", "-jf"])
def test_a_schema_is_taken_from_the_command_line_and_from_a_file(
    model: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(SCHEMA)
    for given in (SCHEMA, str(file)):
        assert run(["generate", "-m", model, "the", flag, given, "--temp", "0", "-n", "60"]) == 0
        assert json.loads(capsys.readouterr().out) in ({"n": 1}, {"n": 2})


@pytest.mark.parametrize("grammar", ['root ::= "yes" | "no"', 'start: "yes" | "no"'])
def test_a_grammar_is_taken_from_the_command_line_and_from_a_file(
    model: str, grammar: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grammar.txt"
    file.write_text(grammar)
    for given in (grammar, str(file)):
        assert run(["generate", "-m", model, "the", "--grammar", given, "--temp", "0"]) == 0
        assert capsys.readouterr().out in ("yes\n", "no\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-j", "no-such-file.json"], "--json-schema: cannot read no-such-file.json: No such file"),
        (["-j", '{"type"'], "JSON schema: it is no JSON"),
        (["-j", '{"type": "objec"}'], "JSON schema: type: 'objec' must be string, number"),
        (["--grammar", "no-such.gbnf"], "--grammar: cannot read no-such.gbnf: No such file"),
        (["--grammar", "root ::= a"], "grammar, line 1: there is no rule 'a'"),
        (["--grammar", 'root ::= "a"', "-j", "{}"], "cannot both hold"),
    ],
)
def test_a_wrong_constraint_is_one_line(
    model: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-m", model, "the", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_drafts_leave_the_text_as_it_is_and_are_in_the_report(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["generate", "-m", model, "the the the", *COMMON, "-n", "30", "--stats"]
    assert run(args) == 0
    plain = capsys.readouterr()
    assert "drafted" not in plain.err
    for flags in (["--draft-ngram", "2"], ["-md", model, "--draft-max", "3"]):
        assert run([*args, *flags]) == 0
        drafted = capsys.readouterr()
        assert drafted.out == plain.out
        assert re.search(
            r"drafted    \d+ tokens in \d+ steps, \d+ accepted \(\d+%\); \d\.\d\d tokens", drafted.err
        )
        assert "drafts by " in drafted.err
    assert "(100%)" in drafted.err
    timings = as_json(capsys, "-m", model, "the", "-md", model, "--draft", "2")["timings"]
    assert isinstance(timings, dict)
    assert timings["drafted_tokens"] == timings["accepted_tokens"] > 0
    assert timings["accept_rate"] == 1 and timings["accept_length"] > 2
