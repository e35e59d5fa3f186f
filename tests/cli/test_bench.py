"""`engine bench`: the flags, the five outputs, and what goes where."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quengine.cli.bench_table import _write_csv, _write_html, _write_json, _write_md
from quengine.cli.main import run
from quengine.diagnostics.bench.bench_plan import BenchTest
from quengine.diagnostics.bench.bench_row import BenchRow, ModelFacts
from quengine.diagnostics.bench.profile import read_profile
from quengine.kernels.cpu.runtime.threads import max_threads
from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.blocks.experts import ExpertConfig
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

QUICK = ["-p", "6", "-n", "3", "-r", "2", "-t", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=64)
    return str(write_tiny(tmp_path_factory.mktemp("bench") / "tiny.gguf", kind="Q8_0", sizes=sizes))


def test_the_table_is_all_of_stdout_and_nothing_else_is_printed(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "-m", model, *QUICK, "-d", "0,32"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(line.startswith("|") and line.endswith("|") for line in lines)
    assert {len(line) for line in lines} == {len(lines[0])}
    assert cells[0][:8] == ["model", "size", "params", "type", "device", "threads", "test", "t/s"]
    assert [row[6] for row in cells[2:]] == ["pp6", "tg3", "pp6 @ d32", "tg3 @ d32"]
    assert [row[8] == "-" for row in cells[2:]] == [True, False, True, False]
    assert captured.err == ""


@pytest.mark.parametrize("width", [80, 100, 158])
def test_on_a_terminal_the_table_fits_and_says_what_it_leaves_out(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quengine.cli.bench_table._terminal_width", lambda: width)
    facts = ModelFacts("Mistral-7B-Instruct-v0.3.Q4_K_M", "/m.gguf", 2**32, 7 * 10**9, "Q4_K+Q6_K")
    of_cpu = {"device": "cpu", "backend": "cpu", "profile": (), "kernels_per_step": None}
    row = cuda_row(model=facts, **of_cpu)
    _write_md(iter([row, replace(row, test=BenchTest(2048, 0, 16384))]))
    table, _, notes = capsys.readouterr().out.partition("\n\n")
    lines = table.splitlines()
    assert len(lines) == 4 and {len(line) for line in lines} == {len(lines[0])} and len(lines[0]) <= width
    headings = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert {"model", "test", "t/s"} <= set(headings) and "pp2048 @ d16384" in lines[3]
    missing = {"size", "params", "type", "device", "threads", "GB/s", "% of bandwidth", "peak memory"} - set(
        headings
    )
    assert all(name in notes.replace("\n", " ") for name in missing) and bool(notes) == bool(missing)
    assert max(map(len, notes.splitlines()), default=0) <= width


def test_json_is_one_list_and_carries_samples_machine_and_versions(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "-m", model, *QUICK, "-pg", "4,2", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["test"] for row in rows] == ["pp6", "tg3", "pp4+tg2"]
    for row in rows:
        assert len(row["samples_tok_s"]) == len(row["samples_s"]) == 2
        assert row["tok_s"] == pytest.approx(sum(row["samples_tok_s"]) / 2)
        assert row["machine"]["cpu"]
        assert row["versions"]["torch"]


def test_jsonl_is_one_object_a_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "-m", model, *QUICK, "-p", "5", "-p", "7,8", "-o", "jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["test"] for row in rows] == ["pp6", "pp5", "pp7", "pp8", "tg3"]


def test_csv_has_a_heading_and_a_line_a_row(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "-m", model, *QUICK, "-o", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["test"] for row in rows] == ["pp6", "tg3"]
    assert len(json.loads(rows[0]["samples_tok_s"])) == 2


def test_html_is_a_page_with_a_bar_and_a_line_a_row(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "-m", model, *QUICK, "-o", "html"]) == 0
    page = capsys.readouterr().out
    (kept,) = re.findall(r'<script type="application/json" id="rows">(.*?)</script>', page)
    rows = json.loads(kept)
    bars = [
        each.text
        for each in ElementTree.fromstring(re.findall(r"<svg.*?</svg>", page, re.S)[0]).iter()
        if each.text
    ]
    for row in rows:
        assert sum(text.endswith(f"  {row['test']}") for text in bars) == 1
    assert page.count("<tr>") == len(rows) + 1 > 1
    assert {"Tokens a second", "Prompts", "One sequence"} <= set(bars)
    assert "Reads of memory run at " in page


def test_several_models_and_thread_counts_make_a_row_each(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = [1, max_threads()]
    threads = ",".join(map(str, counts))
    args = ["-m", f"{model},{model}", "-p", "0", "-n", "2", "-r", "1", "-t", threads, "-o", "jsonl"]
    assert run(["bench", *args]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["threads"] for row in rows] == counts * 2


def test_a_synthetic_model_needs_no_file_and_says_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["bench", "--synthetic", "tiny", *QUICK, "-o", "jsonl"]) == 0
    captured = capsys.readouterr()
    (path,) = tmp_path.rglob("*.gguf")
    assert str(path) in captured.err
    assert {json.loads(line)["model_path"] for line in captured.out.splitlines()} == {str(path)}


def test_flags_are_checked_before_a_synthetic_model_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["bench", "--synthetic", "tiny", "-d", "100"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "-d 100" in line and not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no model"),
        (["-b", "1,0"], "-b 0: must be at least 1"),
        (["-p", "12,x"], "-p 12,x"),
        (["-p", "-5"], "-p -5"),
        (["-pg", "512"], "-pg 512"),
        (["-t", "0"], "-t 0"),
        (["-r", "0"], "-r 0"),
        (["-o", "xml"], "md, json, jsonl, csv"),
        (["-p", "65", "-n", "0"], "66 positions"),
        (["--synthetic", "huge"], "huge"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_1(
    args: list[str], words: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *(["-m", model] if args else []), *args]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert words in line


def test_profile_on_the_cpu_is_one_line_and_exit_2(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (["--profile"], ["--trace", "t.json"]):
        assert run(["bench", "-m", model, *QUICK, *flag]) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert captured.out == ""
        assert "run is on the CPU" in line


def cuda_row(**changes: object) -> BenchRow:
    """A row as a GPU would give it, with one profiled kernel."""
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": "_matvec_kernel",
        "ts": 0.0,
        "dur": 2.0,
        "args": {"grid": [7, 1, 1]},
    }
    made = BenchRow(
        model=ModelFacts("m", "/m.gguf", 2**30, 10**9, "Q4_K"),
        test=BenchTest(0, 128),
        device="cuda:0",
        backend="cuda",
        threads=4,
        seconds=(0.25,),
        bytes_per_token=4 * 10**9,
        bandwidth=4e12,
        load_s=1.0,
        peak_bytes=3 * 2**30,
        held_bytes=2**31,
        kernels_per_step=229,
        profile=(read_profile([kernel], "decode step", 1),),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_gpus_table_has_its_own_columns_yardsticks_and_profiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = {"machine": {"gpu": {"name": "GPU X"}}}
    monkeypatch.setattr("quengine.diagnostics.machine.describe_machine", lambda _: machine)
    prompt = cuda_row(
        test=BenchTest(512, 0),
        operations=512 * 10**9,
        matrix_rate=8e14,
        profile=(),
        kernels_per_step=None,
        bytes_per_token=0,
    )
    _write_md(iter([cuda_row(matrix_rate=8e14), prompt]))
    lines = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    assert table[0][-3:] == ["over weights + cache", "% of matrix rate", "kernels/step"]
    assert table[2][4] == "cuda:0"
    assert table[2][-3:] == ["1.00 GiB", "-", "229"]
    assert table[3][-2:] == ["0", "-"]
    assert lines[5].startswith("Measured on this GPU X: copies at 4000 GB/s")
    assert "800 TFLOP/s" in lines[5]
    assert lines[7] == "m, tg128: device time of a decode step"
    assert "| matvec " in "\n".join(lines[9:])

    machine |= {"versions": {"torch": "2"}, "time": "now"}  # type: ignore[dict-item]
    machine["machine"] |= {"cpu": "CPU Y"}  # type: ignore[dict-item]
    _write_html(iter([cuda_row(matrix_rate=8e14), prompt]))
    page = capsys.readouterr().out
    assert "CPU Y, GPU X; torch 2. Measured now." in page
    assert "Copies run at 4,000 GB/s here" in page
    assert ">51%  tg128</text>" in page and ">0%  pp512</text>" in page
    assert page.count("<td>229</td>") == page.count("<th>kernels/step</th>") == 1


def test_a_mixture_of_experts_has_a_table_with_its_active_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    experts = ExpertConfig(count=8, router=RouterKind(used=2), feed_forward_length=64)
    facts = ModelFacts("e", "/e.gguf", 2**30, 47 * 10**9, "Q4_K", 13 * 10**9, 2**28, experts)
    of_cpu = {"device": "cpu", "backend": "cpu", "profile": (), "kernels_per_step": None}
    dense, sparse = cuda_row(**of_cpu), cuda_row(**of_cpu, model=facts)
    _write_md(iter([sparse, sparse, dense]))
    lines = capsys.readouterr().out.splitlines()
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tables[0][-1] == "active params" and tables[2][-1] == tables[3][-1] == "13.00 B"
    assert lines[4] == "" and tables[5][-1] == "peak memory" and len(tables[7]) == len(tables[5])
    _write_csv(iter([dense, sparse]))
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [each["model_active_params"] for each in rows] == ["", "13000000000"]


def test_profiles_are_in_json_and_in_a_cell_of_csv(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quengine.diagnostics.machine.describe_machine", lambda _: {})
    _write_json(iter([cuda_row()]))
    (found,) = json.loads(capsys.readouterr().out)
    assert found["profile"][0]["kernels"][0]["calls"] == 1
    assert found["kernels_per_step"] == 229
    _write_csv(iter([cuda_row()]))
    (cells,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert json.loads(cells["profile"]) == found["profile"]


def test_drafts_have_columns_of_their_own_and_fields_in_json(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "bench",
        "-m",
        model,
        "-p",
        "6",
        "-n",
        "12",
        "-r",
        "2",
        "-t",
        "1",
        "--device",
        "cpu",
        "-b",
        "1,2",
    ]
    flags += ["--draft-model", model, "--draft-tokens", "3"]
    assert run(flags) == 0
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()
    ]
    assert cells[0][-3:] == ["drafted", "accepted", "accept length"]
    rows = {row[6]: row for row in cells[2:]}
    assert list(rows) == ["pp6", "tg12", "pp6 x 2", "tg12 x 2"]
    assert rows["pp6"][-3:] == ["0", "0", "-"]
    # Two repetitions of 12 tokens, each of three steps of four.
    assert rows["tg12"][-3:] == ["18", "18", "4.00"] and rows["tg12 x 2"][-3:-1] == ["36", "36"]
    assert run([*flags, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[1]["drafted_tokens"] == 18 and found[1]["accept_rate"] == 1
    assert run([*flags, "--profile"]) == 1
    assert "without drafts" in capsys.readouterr().err
