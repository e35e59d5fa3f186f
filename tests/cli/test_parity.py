"""`engine parity`: the report, the JSON object and the exit codes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quengine.cli.main import run
from quengine.errors import EngineError
from quengine.models.gguf import open_gguf
from quengine.models.synthetic.synthetic import PRESETS, write_synthetic
from tests.gguf_builder import ModelSizes
from tests.models.hf.test_hf_vs_gguf import write_tokenizer, written_both_ways
from tests.tiny_models import chat_vocabulary, write_tiny

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
    page = Path(text).with_suffix(".html")
    assert run(["parity", "-m", model, "-f", text, *QUICK, "--html", str(page)]) == 0
    captured = capsys.readouterr()
    shown = page.read_text("utf-8")
    for word in (
        "cpu against reference",
        "Decode, operation by operation",
        "NMSE, median",
        "of 2 texts identical",
    ):
        assert word in shown
    for word in ("reference (the float64 definition", "cpu (", "prefill", "decode", "greedy", "budget"):
        assert word in captured.out
    assert "of 2 texts identical" in captured.out
    assert captured.out.splitlines()[-1].startswith("within the budget")
    assert captured.err == ""


def test_outside_the_budget_exits_1_and_says_what(
    model: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quengine.diagnostics.parity.parity_metrics import Budget

    strict = {phase: Budget(0.0, 0.0, 0.0) for phase in ("prefill", "decode", "greedy")}
    monkeypatch.setattr("quengine.diagnostics.parity.parity.REFERENCE_BUDGETS", strict)
    monkeypatch.setattr("quengine.diagnostics.parity.parity_rounding.FACTOR", 0.0)
    assert run(["parity", "-m", model, "-f", text, *QUICK]) == 1
    captured = capsys.readouterr()
    assert "OUTSIDE the budget" in captured.out
    assert "decode: NMSE median" in captured.out
    assert "rounding: what one rounding of every operation" in captured.out
    assert "no single operation is past its budget" in captured.out
    assert captured.err == ""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = replace(PRESETS["glm4moe-tiny"], vocab_size=512, embedding_length=256, context_length=128)
    return write_synthetic(tmp_path_factory.mktemp("experts") / "experts.gguf", spec)


def test_routing_is_reported_beside_values(
    experts: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [
        "parity",
        "-m",
        str(experts),
        "-f",
        text,
        "--prompts",
        "1",
        "--tokens",
        "3",
        "-t",
        "1",
        "--locate",
    ]
    assert run(args) == 0
    out = capsys.readouterr().out
    assert "routing: positions x layers where b by itself would choose other experts than a" in out
    for word in ("route", "experts+glu", "experts+residual"):
        assert out.count(word) == 2


def test_a_router_that_chooses_otherwise_exits_1(
    experts: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The selection bias of a layer turned around: no value is wrong, but other experts are chosen."""
    wrong = tmp_path / "wrong.gguf"
    shutil.copy(experts, wrong)
    with open_gguf(wrong) as file:
        tensor = file.tensors["blk.1.exp_probs_b.bias"]
    np.memmap(wrong, np.float32, "r+", tensor.offset, tensor.shape)[:] *= -1
    sides = ["--a", f"{experts}@reference", "--b", f"{wrong}@reference"]
    args = ["parity", *sides, "-f", text, "--prompts", "0", "-t", "1"]
    assert run([*args, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    for phase in ("prefill", "decode"):
        routing = result["routing"][phase]
        assert routing["within"] is False and routing["layer"] == 1
        assert 0 < routing["differing"] < routing["places"]
        assert routing["relative"] > routing["bound"] > 0
        assert result["phases"][phase]["nmse_max"] < 1e-9
        assert any(
            failure.startswith(f"{phase}: another choice of experts") for failure in result["failures"]
        )
    assert run(args) == 1
    assert "TOO WIDE" in capsys.readouterr().out


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
    from quengine.diagnostics.parity.parity_sides import LLMSide

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
    assert run(["parity", "-m", str(broken), "-f", text, "--prompts", "0", "-t", "1", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["phases"]["decode"]["nmse_median"] is None
    assert "not finite" in result["failures"][0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--a", "gpu"], "gpu"),
        (["--a", "cpu@nowhere"], "cpu@nowhere"),
        (["--a", "one.gguf", "--b", "other.gguf"], "leave it out"),
        (["--prompts", "51"], "--prompts 51"),
        (["-f", "no-such-file"], "no-such-file"),
        (["-f", "README.md", "--texts", "1"], "--texts"),
        (["--html", "no/such/page.html"], "no/such/page.html: no such folder"),
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


def test_a_text_that_is_empty_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    assert run(["parity", "-m", model, "-f", str(tmp_path / "empty.txt")]) == 1
    assert f"--file {tmp_path / 'empty.txt'}: there is no text in it" in capsys.readouterr().err


def test_locate_prints_every_operation_of_a_healthy_model(
    model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["parity", "-m", model, "-f", text, *QUICK, "--locate"]) == 0
    out = capsys.readouterr().out
    assert out.count("every operation is within its budget") == 2
    assert "prefill, operation by operation" in out and "decode, operation by operation" in out
    for word in ("norm+qkv", "attention", "output+residual", "norm+glu", "down+residual", "keys, values"):
        assert out.count(word) == 2
    assert "*" not in out


def test_a_failure_names_the_first_operation_without_being_asked(
    model: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quengine.kernels.cpu.backend import CpuBackend

    linear_add, calls = CpuBackend.linear_add, 0

    def second_of_two_is_wrong(self: CpuBackend, *rows: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        result = linear_add(self, *rows, **more)
        # In place: a captured step reads this memory, whose values are none yet.
        return result.mul_(1.01) if isinstance(result, torch.Tensor) and calls % 2 == 0 else result

    monkeypatch.setattr(CpuBackend, "linear_add", second_of_two_is_wrong)
    assert run(["parity", "-m", model, "-f", text, *QUICK]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  prefill: goes wrong first in layer 0, down+residual" in lines
    assert any(
        line.startswith("  first past its budget") and "layer 0, down+residual" in line for line in lines
    )


def test_json_has_what_was_located(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["parity", "-m", model, "-f", text, *QUICK, "--locate", "--json"]) == 0
    prefill, decode = json.loads(capsys.readouterr().out)["located"]
    assert (prefill["phase"], decode["phase"], prefill["first"]) == ("prefill", "decode", None)
    assert {"operation", "layer", "nmse", "budget", "cached", "within"} == prefill["operations"][0].keys()


def test_one_garbage_position_of_289_in_decode_fails(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quengine.diagnostics.parity.parity_sides import LLMSide

    forward, seen = LLMSide.forward, 0

    def garbage_once(self: LLMSide, ids: list[int], start: int) -> torch.Tensor:
        nonlocal seen
        logits = forward(self, ids, start)
        if self.device == "cpu" and len(ids) == 1 and start == 200:
            seen += 1
            return logits.roll(1, dims=1)
        return logits

    monkeypatch.setattr(LLMSide, "forward", garbage_once)
    path = tmp_path / "long.txt"
    path.write_bytes(bytes(97 + i * i % 23 for i in range(289)))
    assert run(["parity", "-m", model, "-f", str(path), "--prompts", "0", "-t", "1", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["phases"]["decode"]["nmse_p99"] < 1e-6, "only a maximum sees it"
    assert result["phases"]["decode"]["positions"] == 289 and seen
    assert [failure[:16] for failure in result["failures"]][:1] == ["decode: NMSE max"]


def test_a_layer_past_its_own_budget_fails_where_the_logits_do_not(
    model: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quengine.kernels.cpu.backend import CpuBackend
    from quengine.kernels.cpu.step_recorder import StepBatch

    linear_add, calls = CpuBackend.linear_add, 0

    def one_is_a_little_wrong(
        self: CpuBackend, batch: Any, x: Any, weight: Any, residual: Any, *rest: Any, **more: Any
    ) -> Any:
        nonlocal calls
        calls += 1
        result = linear_add(self, batch, x, weight, residual, *rest, **more)
        # The first layer's feed-forward in decode, by an NMSE of 1.4e-6, 27 times an operation's budget. A captured
        # step names its operations instead of computing them, so what serves is right.
        eager = not isinstance(batch, StepBatch) and len(result) == 1
        return result + 1.16e-3 * (result - residual) if eager and calls % 4 == 2 else result

    monkeypatch.setattr(CpuBackend, "linear_add", one_is_a_little_wrong)
    for flags in ([], ["--locate"]):
        calls = 0
        assert run(["parity", "-m", model, "-f", text, "--prompts", "0", "-t", "1", *flags]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2].startswith("OUTSIDE the budget"), lines
        assert lines[-1] == "  decode: goes wrong first in layer 0, down+residual"


@pytest.mark.parametrize(
    ("flags", "texts", "prompts", "tokens"),
    [
        ([], 14, 50, 128),
        (["--quick"], 6, 5, 32),
        (["--quick", "--tokens", "9", "--texts", "1"], 1, 5, 9),
        (["--prompts", "3"], 14, 3, 128),
    ],
)
def test_how_much_is_run(
    flags: list[str], texts: int, prompts: int, tokens: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[int, int, int]] = []

    def plan(_model: str, given: list[str], prompts: int, tokens: int, *_: object) -> None:
        planned.append((len(given), prompts, tokens))
        raise EngineError("planned")

    monkeypatch.setattr("quengine.diagnostics.parity.parity_workload.plan_workload", plan)
    assert run(["parity", "-m", model, *flags]) == 1
    assert planned == [(texts, prompts, tokens)]


def test_a_long_run_says_how_long_it_takes(
    model: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quengine.diagnostics.parity.parity_workload.estimate_seconds", lambda *_: 300.0)
    assert run(["parity", "-m", model, "-f", text, *QUICK]) == 0
    told = capsys.readouterr().err
    assert "this takes about 5 min" in told and "--quick" not in told
    assert run(["parity", "-m", model, "-f", text, "--prompts", "0", "-t", "1"]) == 0
    assert "--quick is shorter" in capsys.readouterr().err


# -- two files
# -----------------------------------------------------------------------------------------------------


def changed(model: str, to: Path, tensor: str, byte: int = 5, flip: int = 0x10) -> str:
    """A copy with one bit of one byte of a tensor turned around, as a bad disk or memory does."""
    from quengine.models.gguf import open_gguf

    shutil.copy(model, to)
    with open_gguf(model) as file:
        at = file.tensors[tensor].offset + byte
    raw = bytearray(to.read_bytes())
    raw[at] ^= flip
    to.write_bytes(raw)
    return str(to)


def test_a_file_and_its_copy_are_the_same(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copy(model, tmp_path / "me@home.gguf")
    args = ["parity", "--a", model, "--b", f"{copy}@cpu", "-f", text, *QUICK]
    assert run(args) == 0
    out = capsys.readouterr().out
    assert "tensors are the same byte for byte" in out and f"b         {copy}@cpu (cpu" in out
    assert run([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["model_a"], result["model"]) == (model, str(copy))
    assert (result["files"]["differing"], result["failures"]) == ([], [])
    # A file against another is computed alike on both sides, so that nothing is left but what the files hold.
    assert result["phases"]["decode"]["nmse_max"] == result["phases"]["prefill"]["nmse_max"] == 0


@pytest.mark.parametrize("tensor", ["blk.0.attn_q.weight", "blk.1.ffn_down.weight", "output.weight"])
def test_one_flipped_bit_in_one_block_is_found(
    tensor: str, model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Byte 5 is a code of the first block of Q8_0, whose scale is bytes 0 and 1.
    wrong = changed(model, tmp_path / "wrong.gguf", tensor)
    assert run(["parity", "--a", model, "--b", wrong, "-f", text, *QUICK]) == 1
    captured = capsys.readouterr()
    assert f"  {tensor} (Q8_0): 1 of " in captured.out and "the first in row 0" in captured.out
    assert "1 of the same type have other bytes" in captured.out
    assert "OUTSIDE the budget" in captured.out and captured.err == ""


def test_a_flipped_scale_shows_in_the_logits_and_where_it_goes_wrong(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = changed(model, tmp_path / "wrong.gguf", "blk.1.ffn_up.weight", byte=1, flip=0x08)
    assert run(["parity", "--a", model, "--b", wrong, "-f", text, *QUICK]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  decode: NMSE median") for line in lines)
    assert "  decode: goes wrong first in layer 1, norm+glu" in lines


def test_two_quantizations_are_compared_and_outside_the_budget(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=200)
    other = write_tiny(tmp_path / "q4.gguf", kind="Q4_0", sizes=sizes)
    assert run(["parity", "--a", f"{model}@reference", "--b", str(other), "-f", text, *QUICK, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["files"]["retyped"] > 0 and result["files"]["differing"] == []
    assert result["phases"]["decode"]["kl_mean"] > 1e-4 and result["phases"]["decode"]["nmse_median"] < 1


def test_a_checkpoint_folder_and_its_gguf_file_are_the_same(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=256)
    gguf, folder = (side.path for side in written_both_ways(tmp_path, sizes, "F16", tied=False))
    write_tokenizer(folder)
    assert run(["parity", "--a", str(gguf), "--b", str(folder), "-f", text, *QUICK, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    # The norms are F32 in one and F16 in the other.
    assert (result["files"]["differing"], result["files"]["retyped"]) == ([], 2 * sizes.blocks + 1)
    assert result["phases"]["decode"]["nmse_max"] == 0


def test_another_setting_is_named_even_where_the_logits_hide_it(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=256)
    changes = {"llama.attention.layer_norm_rms_epsilon": 1.0001e-5}
    other = write_tiny(tmp_path / "eps.gguf", kind="Q8_0", sizes=sizes, changes=changes)
    assert run(["parity", "--a", model, "--b", str(other), "-f", text, *QUICK]) == 1
    assert "  files: rms_eps is 9.999999747378752e-06 in a and 1.000" in capsys.readouterr().out


def swapped_tokens() -> dict[str, Any]:
    vocabulary = chat_vocabulary()
    tokens = list(vocabulary["tokenizer.ggml.tokens"])
    tokens[70], tokens[71] = tokens[71], tokens[70]
    return vocabulary | {"tokenizer.ggml.tokens": tokens}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"sizes": ModelSizes(embedding=32, feed_forward=128, context=256)},
            "embedding_length is 64 in a and 32",
        ),
        (
            {"sizes": ModelSizes("qwen2", embedding=64, feed_forward=128, context=256)},
            "architecture is llama",
        ),
        ({"vocabulary": swapped_tokens()}, "the vocabularies differ: token 70 is"),
    ],
    ids=["shape", "architecture", "vocabulary"],
)
def test_files_that_cannot_be_compared_are_one_line(
    change: dict[str, Any], words: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=256)
    architecture = "qwen2" if "architecture" in words else "llama"
    other = write_tiny(tmp_path / "other.gguf", architecture, "Q8_0", **{"sizes": sizes, **change})
    assert run(["parity", "--a", model, "--b", str(other), *QUICK]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert words in line and captured.out == ""


def test_without_a_model_it_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["parity"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--model" in line and "--a FILE --b FILE" in line
