"""`engine parity`: the report, the JSON object and the exit codes."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from quengine.cli.main import run
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

QUICK = ["--prompts", "2", "--tokens", "4", "-t", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=256)
    return str(write_tiny(tmp_path_factory.mktemp("parity") / "tiny.gguf", kind="Q8_0", sizes=sizes))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the ferry left an hour late", encoding="utf-8")
    return str(path)


def test_a_healthy_model_is_within_the_budget_and_exits_0(
    model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["parity", "-m", model, "-f", text, *QUICK]) == 0
    captured = capsys.readouterr()
    for word in ("reference (the float64 definition", "cpu (", "prefill", "decode", "greedy", "budget"):
        assert word in captured.out
    assert "of 2 texts identical" in captured.out
    assert captured.out.splitlines()[-1].startswith("within the budget")
    assert captured.err == ""


def test_outside_the_budget_exits_1_and_says_what(
    model: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quengine.parity_metrics import Budget

    strict = {phase: Budget(0.0, 0.0) for phase in ("prefill", "decode", "greedy")}
    monkeypatch.setattr("quengine.parity.REFERENCE_BUDGETS", strict)
    assert run(["parity", "-m", model, "-f", text, *QUICK]) == 1
    captured = capsys.readouterr()
    assert "OUTSIDE the budget" in captured.out
    assert "decode: NMSE median" in captured.out
    assert captured.err == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can run that side")
def test_a_side_that_cannot_run_here_exits_2(
    model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["parity", "-m", model, "-f", text, "--a", "cpu", "--b", "cuda", *QUICK]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cuda" in captured.err


def test_json_carries_everything_the_report_says(
    model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["parity", "-m", model, "-f", text, *QUICK, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["a"], result["b"], result["within"], result["failures"]) == ("reference", "cpu", True, [])
    for phase in ("prefill", "decode", "greedy"):
        numbers = result["phases"][phase]
        assert {"nmse_median", "nmse_p99", "nmse_max", "kl_mean", "kl_p99", "top1", "top5"} <= numbers.keys()
        assert numbers["nmse_median"] <= numbers["budget"]["nmse_median"]
    assert (result["prompts"], result["generated"]) == (2, 8)


def test_a_divergence_is_reported_with_tokens_margin_and_difference(
    model: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quengine.parity import LLMSide

    greedy = LLMSide.greedy

    def last_token_wrong(self: LLMSide, prompt: list[int], count: int) -> list[int]:
        tokens = greedy(self, prompt, count)
        return [*tokens[:-1], (tokens[-1] + 1) % 100]

    monkeypatch.setattr(LLMSide, "greedy", last_token_wrong)
    args = ["parity", "-m", model, "-f", text, *QUICK]
    assert run(args) == 1
    out = capsys.readouterr().out
    assert "prompt 1, token 3: reference" in out
    assert "TOO WIDE" in out
    assert run([*args, "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["divergences"][0]
    assert (first["prompt"], first["index"], first["near_tie"]) == (0, 3, False)
    assert first["margin"] > 2 * first["max_difference"]
    assert {"token_a", "token_b", "text_a", "text_b"} <= first.keys()


def test_logits_that_are_not_finite_are_valid_json_and_fail(
    text: str, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    from quengine.models.gguf import open_gguf

    broken = tmp_path / "nan.gguf"
    shutil.copy(model, broken)
    with open_gguf(broken) as file:
        tensor = file.tensors["output_norm.weight"]
        offset, shape = tensor.offset, tensor.data.shape
    np.memmap(broken, np.uint8, "r+", offset, shape)[:] = 255
    assert run(["parity", "-m", str(broken), "-f", text, "--prompts", "0", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["phases"]["decode"]["nmse_median"] is None
    assert "not finite" in result["failures"][0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--a", "gpu"], "side 'gpu'"),
        (["--prompts", "51"], "--prompts 51"),
        (["-f", "no-such-file"], "no-such-file"),
        (["-f", "README.md", "--texts", "1"], "--texts"),
        (["--prompts", "0", "--texts", "0"], "nothing to compare"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_1(
    args: list[str], words: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["parity", "-m", model, *args]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert words in line
