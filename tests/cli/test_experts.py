"""A mixture of experts from the command line: wrong flags are one line, and the tools give the same numbers."""

import json

import pytest

from quengine.cli.main import run
from quengine.models.synthetic.synthetic import write_synthetic
from tests.tiny_models import write_tiny

GREEDY = ["--device", "cpu", "-t", "1", "--raw", "--temp", "0", "-n", "4", "-c", "64", "--ignore-eos", "the"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_synthetic(tmp_path_factory.mktemp("experts") / "mixture.gguf", "qwen3moe-tiny"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("experts") / "dense.gguf", kind="Q8_0"))


def as_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    capsys.readouterr()
    assert run([*args]) == 0
    value = json.loads(capsys.readouterr().out)
    found = value[-1] if isinstance(value, list) else value
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    "command", [["generate", "--raw", "the"], ["chat"], ["serve", "--port", "0"], ["bench"]]
)
@pytest.mark.parametrize("flags", [["--n-cpu-moe", "-1"], ["-ncmoe", "-1"]])
def test_a_negative_number_of_layers_is_refused(
    mixture: str, command: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "-m", mixture, *flags]) == 1
    captured = capsys.readouterr()
    assert captured.err == "engine: error: --n-cpu-moe -1: must be at least 0\n" and not captured.out


@pytest.mark.parametrize("command", [["generate", "--raw", "the"], ["chat"], ["bench"]])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--cpu-moe"], "--cpu-moe"),
        (["-cmoe", "-ncmoe", "3"], "--cpu-moe"),
        (["--n-cpu-moe", "3"], "--n-cpu-moe 3"),
    ],
)
def test_a_dense_model_has_no_experts_to_place(
    dense: str, command: list[str], flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "-m", dense, "--device", "cpu", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"engine: error: {named}: llama model ") and not captured.out
    assert captured.err.endswith("has no experts; leave it out\n") and captured.err.count("\n") == 1


def test_a_server_of_a_dense_model_says_so_and_ends(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "-m", dense, "--device", "cpu", "--cpu-moe", "--port", "0"]) == 1
    listening, error = capsys.readouterr().err.splitlines()
    assert "listening on" in listening
    assert error.startswith("engine: error: --cpu-moe: ") and error.endswith("has no experts; leave it out")


@pytest.mark.parametrize("flags", [["--cpu-moe"], ["--n-cpu-moe", "300"]])
def test_on_the_cpu_the_flags_change_nothing_and_the_report_says_so(
    mixture: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-m", mixture, *GREEDY]) == 0
    plain = capsys.readouterr()
    assert run(["generate", "-m", mixture, *GREEDY, *flags]) == 0
    placed = capsys.readouterr()
    note = "--cpu-moe and --n-cpu-moe change nothing"
    assert placed.out == plain.out and note in placed.err and note not in plain.err


@pytest.mark.parametrize("flags", [["--cpu-moe"], ["--n-cpu-moe", "300"], []])
def test_a_benchmark_on_the_cpu_says_below_its_table_that_the_flags_change_nothing(
    mixture: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["-p", "0", "-n", "1,2", "-r", "1", "-t", "1", "--device", "cpu", "--no-warmup"]
    assert run(["bench", "-m", mixture, *quick, *flags]) == 0
    note = (
        "mixture: the whole model runs on the CPU, its experts too: --cpu-moe and --n-cpu-moe change nothing."
    )
    assert capsys.readouterr().out.splitlines()[4:] == (["", note] if flags else [])


def test_show_generate_and_bench_count_the_same_parameters_and_bytes(
    mixture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = as_json(capsys, "show", mixture, "--json")
    generated = as_json(capsys, "generate", "-m", mixture, *GREEDY, "--json")
    quick = ["-p", "0", "-n", "2", "-r", "1", "-t", "1", "--device", "cpu", "-b", "1,8", "-o", "json"]
    timed = as_json(capsys, "bench", "-m", mixture, *quick)
    size, timings = generated["model_size"], generated["timings"]
    assert isinstance(size, dict) and isinstance(timings, dict)
    assert shown["parameters"] == size["parameters"] == timed["model_params"] == 14_961_408
    assert (
        shown["active_parameters"] == size["active_parameters"] == timed["model_active_params"] == 5_524_224
    )
    assert shown["active_bytes"] == size["active_bytes"] == timed["model_active_bytes"]
    assert (size["experts"], size["experts_used"]) == (timed["experts"], timed["experts_used"]) == (16, 4)
    # Of eight rows each expert is chosen by one at least but for (12/16)^8 of the times.
    assert timed["experts_read"] == pytest.approx(16 * (1 - 0.75**8))
